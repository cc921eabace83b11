"""The page of chapter 0 takes the steps of the engine, to the bit; it runs, judges and refuses as it says."""

import importlib
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import stored_pages
import torch
import worlds
from torch import Tensor

from distmuon import launch
from distmuon.launch import World
from distmuon.models.digits import scanned
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.sharding.grid import Grid
from distmuon.sharding.tensor_parallel import mark

page: Any = importlib.import_module("00_one_page")

PAGE = str(worlds.ROOT / "scripts" / "00_one_page.py")
STEPS = 4


def beside_the_engine(world: World) -> list[bool]:
    """Train by the page and by the engine, on the page's gradients; return whether they are equal after every step."""
    table = scanned()
    x, labels = table[:, :-1] / 16, table[:, -1].long()
    mine = page.Rank(world.rank, world.dp, world.tp, torch.device("cpu"))
    copies = [torch.nn.Parameter(weight.clone()) for weight in mine.weights]
    if world.tp > 1:
        for copy, cut in zip(copies, page.CUTS, strict=True):
            mark(copy, cut)
    options = {"lr": page.LR, "momentum": page.MU, "weight_decay": page.DECAY, "batched": False}
    engine = DistributedMuon(copies, Grid.of(world), bucket_size=10_000, **options)  # its own buckets: several
    equal = []
    for n in range(STEPS):
        rows = (torch.arange(n * page.BATCH, (n + 1) * page.BATCH) % len(x)).chunk(world.dp)[mine.dp]
        _, gradients = page.gradients(mine.weights, x[rows], labels[rows], mine.tp_group)
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient.clone()
        mine.step(gradients)
        engine.step()
        equal.append(all(torch.equal(a, b) for a, b in zip(mine.weights, copies, strict=True)))
    return equal


def test_the_page_takes_the_engines_steps_to_the_bit() -> None:
    assert (
        launch.run(beside_the_engine, dp=5, tp=2) == [[True] * STEPS] * 10
    )  # five shards cut matrices and need padding


def test_eight_processes_are_one() -> None:
    *kept, eight, alone, verdict = stored_pages.printed("00_one_page", "python ../scripts/00_one_page.py").splitlines()
    assert kept[0] == "rank 0 (dp 0, tp 0) keeps momentum for 4,608 of gate"
    assert kept[3] == "rank 3 (dp 1, tp 1) keeps momentum for 1,536 of gate and 3,072 of up"  # across a boundary
    owned = sum(int(n.replace(",", "")) for line in kept for n in re.findall(r"([\d,]+) of", line))
    assert len(kept) == 8
    assert owned == sum(a * b for a, b in page.MATRICES.values())  # every number has one owner
    assert re.fullmatch(r"8 processes: loss 2\.\d\d -> 0\.\d\d", eight)
    assert alone.split()[2:] == eight.split()[2:]
    assert verdict == "They end with the same weights: apart by less than a ten-billionth of the way that they moved."


@pytest.mark.parametrize(
    ("line", "mine", "code", "dp"),
    [
        ("g /= self.D", "pass", 0, 2),
        ("o.chunk(self.T, CUTS[i])[self.tp]", "o.chunk(self.T, CUTS[i])[0]", 1, 1),
        ("self.bucket.copy_(torch.cat(all_gather(self.bucket[self.shard], self.dp_group)))", "pass", 1, 2),
    ],
)
def test_the_lines_that_the_reader_may_change_do_what_the_answer_says(
    line: str, mine: str, code: int, dp: int, tmp_path: Path
) -> None:
    (prose,) = (c for c in cells("markdown") if "**Your turn.**" in c)
    assert f"`{line}` becomes `{mine}`" in prose
    text = Path(PAGE).read_text(encoding="utf-8")
    assert text.count(line) == 1
    (tmp_path / "mine.py").write_text(text.replace(line, mine), encoding="utf-8")
    ending = worlds.finish(str(tmp_path / "mine.py"), "--dp", str(dp), "--tp", str(3 - dp), "--steps", "3")
    assert ending.code == code, ending
    apart = r"They end apart by 0?\.?\d+ of the way that they moved: it is not the same optimizer\.\n"
    assert re.fullmatch(apart, ending.err) if code else "They end with the same weights" in ending.out


# ---- The same step on the page, in one process ------------------------------------------------------------


def cells(kind: str) -> list[str]:
    return [cell.source for cell in stored_pages.every_cell("00_one_page") if cell.kind == kind]


def played() -> str:
    """Return the cells in which one process plays all ranks."""
    code = "\n\n".join(cells("code"))
    return "import torch\n" + code[code.index("T = 2  #") : code.index("notebook.source(page.Rank.step")]


@pytest.mark.parametrize(("D", "T"), [(5, 2), (2, 3), (1, 1)])
def test_the_cells_step_as_one_process_whatever_the_reader_sets(
    D: int, T: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code = played().replace("T = 2  #", f"T = {T}  #").replace("D = 3  #", f"D = {D}  #")
    code = code.replace("summands[1] =", f"summands[{T - 1}] =").replace("_parts[1]", f"_parts[{T - 1}]")
    exec(code, {"page": page})
    printed = capsys.readouterr().out
    assert "output: True\nAnd with other images on one of the ranks: False" in printed
    assert "the same two whole matrices: True" in printed
    assert printed.endswith("up    bit for bit the same: True\ndown  bit for bit the same: True\n")
    shards = re.findall(r"keeps the numbers (\d+) to (\d+)", printed)
    assert len(shards) == D
    assert [int(b) + 1 for _, b in shards[:-1]] == [int(a) for a, _ in shards[1:]]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("/ D  # [N / D]", "# [N / D]"),
        ("shard(flat[other, tp], dp)", "shard(flat[dp, tp], other)"),
        ("part = to_bucket(o, tp)", "part = to_bucket(o, 0)"),
        ("pieces[dp, tp] = shard(part, dp)", "pieces[dp, tp] = shard(part, 0)"),
    ],
    ids=("not divided", "own shards", "the first part", "the first shard"),
)
def test_a_wrong_move_on_the_page_is_seen(right: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = played()
    assert code.count(right) == 1
    exec(code.replace(right, wrong), {"page": page})
    assert capsys.readouterr().out.endswith("up    bit for bit the same: False\ndown  bit for bit the same: False\n")


def test_rounding_passes_and_nothing_else() -> None:
    alone: list[Tensor] = [torch.zeros(shape, dtype=torch.float64) for shape in page.MATRICES.values()]
    page.compare([w + 1e-12 for w in alone], alone)
    for wrong in (1e-9, torch.nan):
        with pytest.raises(SystemExit, match="not the same optimizer"):
            page.compare([w + wrong for w in alone], alone)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--dp", "7"), "--dp must divide 480 images"),
        (("--tp", "5"), "--tp 192 neurons"),
        (("--steps", "150"), "--steps from 1 to 100"),
        (("--step", "5"), "unrecognized arguments: --step 5"),
        (("--backend", "nccl", "--dp", "40"), "a GPU for each of 80 ranks"),
    ],
)
def test_a_wrong_argument_is_refused_in_a_sentence(
    arguments: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [PAGE, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(PAGE, run_name="__main__")
    assert ended.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_nothing_of_this_project_is_imported() -> None:
    source = (worlds.ROOT / "scripts" / "00_one_page.py").read_text(encoding="utf-8")
    modules = re.findall(r"^\s*(?:import|from) ([\w.]+)", source, re.MULTILINE)
    assert {name.partition(".")[0] for name in modules} <= {
        "argparse", "math", "os", "sys", "tempfile", "datetime", "torch", "sklearn",
    }  # fmt: skip
