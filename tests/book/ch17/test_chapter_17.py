"""Chapter 17: four steps, counted; a training that goes on elsewhere; what the page and the stored race say."""

from __future__ import annotations

import contextlib
import io
import re
from unittest import mock

import pytest
import stored_pages
import torch
import torch.distributed as dist
import worlds
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from distmuon.sharding.precision import default_gather_dtype
from distmuon.verify.counter import CollectiveCounter
from muon_conformance.programs import PROGRAMS
from muonbook.ch17 import four_steps
from muonbook.ch17.kit import conformance_table
from muonbook.measure import results

WORKER = str(worlds.ROOT / "scripts" / "17_muonw.py")
MESHES = ("--dp 4", "--dp 2 --tp 2", "--hybrid")


def rows(out: str) -> dict[str, tuple[int, float, float, str]]:
    """Return way -> collectives, bytes over those of all matrices, Newton–Schulz of each, how near one process."""
    line = r"^(\S.*?)  +(\d+) +([\d.]+) +([\d.]+) times +(bit for bit|about 1e-\d)$"
    found = re.findall(line, out, re.M)
    return {name: (int(calls), float(sent), float(times), near) for name, calls, sent, times, near in found}


def table_of(words: str) -> dict[str, tuple[int, float, float, str]]:
    """Return what the page prints for this mesh."""
    return rows(stored_pages.printed("17_muonw", f"python ../scripts/17_muonw.py {words}"))


def test_every_step_sends_less_and_ends_where_one_process_does() -> None:
    table = table_of("--dp 4")
    assert list(table) == [four_steps.TORCH, *four_steps.WAYS, four_steps.OURS]
    torchs, each, once, owner, ours = table.values()
    assert torchs[0] > 300
    assert (each[0], once[0], owner[0], ours[0]) == (24, 1, 2, 2)
    assert torchs[1] > each[1] == once[1] > owner[1] == ours[1]
    assert each[2] == once[2] == 4
    assert owner[2] == ours[2] == 1
    assert torchs[3] != "bit for bit"
    assert {row[3] for row in (each, once, owner, ours)} == {"bit for bit"}


def test_torchs_products_are_those_counted_by_hand_and_ours_are_as_few_on_every_mesh() -> None:
    """A layer has four matrices of 64 x 64 and two of 64 x 256. A step multiplies X by its transpose, squares the
    result, [64, 64], and multiplies X by a sum of both; all in products of 64 x 64 matrices:"""
    square, wide, steps = 1 + 1 + 1, 4 + 1 + 4, 5
    once = steps * (4 * square + 2 * wide)
    repeated = steps * 3  # one of the two is cut along its long side: all four ranks square the same [64, 64]
    tables = {words: table_of(words) for words in MESHES}
    assert [tables[words][four_steps.TORCH][2] for words in MESHES] == [round((once + repeated) / once, 2), 2.07, 2.04]
    for table in tables.values():
        assert table[four_steps.TORCH][0] > 300
        assert table[four_steps.OURS][0] == 2
        assert table[four_steps.OURS][2:] == (1.0, "bit for bit")


def test_runs_on_fake_tensors_are_no_products() -> None:
    """DTensor tries a call that it meets for the first time on tensors without data; the second time it need not."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        a = DTensor.from_local(torch.ones(4, 5), mesh, [Shard(0)])  # [8, 5]
        b = DTensor.from_local(torch.ones(5, 7), mesh, [Replicate()])
        for _ in range(2):
            with four_steps.LocalProducts() as products:
                a @ b
            assert products.flops == 2 * 4 * 5 * 7
    finally:
        dist.destroy_process_group()


def test_a_training_goes_on_on_another_mesh_and_a_damaged_checkpoint_is_refused() -> None:
    """The page damages a byte between the last two commands."""
    whole, resumed, refused = (cell.printed for cell in stored_pages.cells("17_muonw") if "--train 12" in cell.source)
    assert "step   6   loaded; whole tensors as they were, bit for bit: True" in resumed
    assert resumed.splitlines()[-1] == whole.splitlines()[-1]
    assert "is damaged: it is not what its sha256 says" in refused


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--hybrid --dp 3", "--hybrid with --dp 3 --tp 1: two replicas want an even --dp and --tp 1."),
        ("--tp 3", "--tp 3 does not divide the model's 4 heads; choose 1, 2 or 4."),
        (
            "--backend gloo --device cuda",
            "torch's DTensor gathers no GPU tensors over gloo, which this job needs; take ",
        ),
        ("--dp 3", "--dp 3 does not divide 64 rows, which steps 1 to 3 need; choose 4."),
        ("--train 5 --save out/x --save-at 6", "--save-at 6: must be from 1 to 5."),
        ("--train 5 --save scripts", "--save scripts exists already, and nothing is overwritten; name another."),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch, words: str, says: str) -> None:
    monkeypatch.chdir(worlds.ROOT)
    ending = worlds.answer(WORKER, *words.split())
    assert ending.code == 2
    assert says in ending.err


def printed_by(words: str) -> str:
    """Return what the one cell with these words prints."""
    return stored_pages.cell_with("17_muonw", words).printed


def test_torchs_collectives_are_those_counted_matrix_by_matrix() -> None:
    square, wide, tall = map(int, re.findall(r"(\d+) collectives", printed_by("FakeStore")))
    of_a_line = [int(count) for count in re.findall(r"(\d)$", printed_by("def counted"), re.M)]
    assert of_a_line == [1, 1, 1, 1]
    assert square == wide == 1 + 5 * 3
    assert tall == 1 + 5 * 2
    table = table_of("--dp 4")
    assert 4 * (4 * square + wide + tall) == table[four_steps.TORCH][0]


def test_the_exchange_on_the_page_is_exact_and_sends_what_the_table_counts() -> None:
    assert printed_by("bit for bit equal").count("True") == 4
    gather, owner = map(float, re.findall(r"0\.\d+", printed_by("gather everywhere")))
    table = table_of("--dp 4")
    assert gather == table["2 gather all at once"][1]
    assert abs(owner - table[four_steps.OURS][1]) <= 0.006
    assert "False" not in printed_by("WRITERS, READERS")
    assert printed_by("WRITERS, READERS").count("True") == 5


def test_updates_grow_towards_a_fifth_and_the_clip_ends_at_its_threshold() -> None:
    pictures = (worlds.ROOT / "notebooks" / "17_muonw.ipynb").read_text(encoding="utf-8")
    assert "from step 2 to 42: Muon between 0.1 and 0.2; AdamW between 0.1 and 0.7." in pictures
    clipped = re.findall(r"largest logit ([\d.]+), clipped ([\d.]+)", printed_by("def largest_logits"))
    assert [float(after) for _, after in clipped] == [30.0, 30.0]
    assert all(float(before) > 30 for before, _ in clipped)


def test_what_the_page_says_of_times_is_stored() -> None:
    found = results.load("muonw")
    times = [[1 / race["ratio"]["median"] for race in races] for races in found["race"].values()]
    assert all(24.5 < row[0] < 33.5 and 5 < row[-1] < 7 for row in times)
    saves = [(row["parameter_bytes_of_a_rank"], row["blocked"]["median"]) for row in found["save"]]
    assert [f"{blocked:.0%} of {size / 1e6:.0f} MB" for size, blocked in saves] == ["31% of 3 MB", "7% of 50 MB"]
    assert all(0.03 <= round(race["ratio"]["median"], 2) <= 0.19 for races in found["race"].values() for race in races)
    assert all(0.055 < row["observed"]["median"] < 0.095 for row in found["watch"])
    logits = {row["run"]: row for row in found["logits"]}
    assert [round(logits[name]["in_the_end"]) for name in ("Muon, clip", "Muon", "AdamW")] == [36, 85, 426]
    assert logits["Muon, weight decay"]["loss"][0] < logits["Muon, clip"]["loss"][0]
    assert logits["Muon, 1/3 of the rate"]["loss"][0] == min(row["loss"][0] for row in logits.values())


def test_the_stored_muons_were_tested_with_all_programs_and_the_page_says_how_many() -> None:
    checks = [one["check"] for one in results.load("conformance")["muons"]["ours: MuonW"]["checks"]]
    programs = sum(check.startswith(conformance_table.PROGRAM) for check in checks)
    assert programs == len(PROGRAMS)  # else: make bench NAMES=conformance PEERS=...
    said = (worlds.ROOT / "notebooks" / "17_muonw.ipynb").read_text(encoding="utf-8")
    assert f"short trainings like those that you write, {programs} of them." in said


def test_of_a_transposed_matrix_each_rank_keeps_its_part_of_the_gram_matrix() -> None:
    """What the page answers to its exercise: 1, 0, 1, 1."""
    cell = stored_pages.cell_with("17_muonw", "def counted").source
    shapes = stored_pages.cell_with("17_muonw", "FakeStore").source.partition("for rows, columns in")[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(shapes + cell.replace("by_rows(64, 64)", "by_rows(256, 64).T"), {})
    assert re.findall(r"(\d)$", printed.getvalue(), re.M) == ["1", "0", "1", "1"]


def test_in_each_iteration_a_rank_fetches_x_twice_and_s_once() -> None:
    """The page's own lines, for a matrix of which X and S differ in size."""
    cell = stored_pages.cell_with("17_muonw", "def counted").source.replace("by_rows(64, 64)", "by_rows(64, 256)")
    shapes = stored_pages.cell_with("17_muonw", "FakeStore").source.partition("for rows, columns in")[0]
    counter = CollectiveCounter()
    with contextlib.redirect_stdout(io.StringIO()), mock.patch.object(counter.ledger, "record") as record, counter:
        exec(shapes + cell, {})
    gathered = [size // 4 for op, _, _, size, _ in (call.args for call in record.mock_calls) if op == "all_gather"]
    x, s = 64 * 256, 64 * 64
    assert gathered == [x, s, x]


def test_momentum_and_updates_travel_in_bf16() -> None:
    """And are rounded to it on one device too, between which Newton–Schulz computes in float32."""
    matrix = torch.randn(8, 8)
    assert four_steps.OPTIONS["compute_dtype"] == torch.float32
    assert four_steps.polar(matrix.bfloat16()).dtype == torch.bfloat16
    assert default_gather_dtype(torch.float32) == torch.bfloat16
