"""Chapter 8: its worker as readers run it, and the code and the numbers on its page."""

import re
from typing import Any

import pytest
import stored_pages
import torch
import worlds

from distmuon.sharding.layout import ParamSpec, plan
from muonbook.ch08 import figures
from muonbook.ch08.experiments import SMALL
from muonbook.measure import coalescing, formulas
from muonbook.planner import fabrics

WORKER = str(worlds.ROOT / "scripts" / "08_muon_over_dp.py")
# elements of B on each rank: momentum, after dp_gather, after Newton–Schulz, after dp_shard
HELD = [[0, 0, 0, 0], [6, 20, 20, 6], [9, 20, 20, 9], [5, 20, 20, 5]]


def page_of(options: str) -> str:
    """Return what the worker prints on the page."""
    return stored_pages.printed("08_muon_over_dp", f"python ../scripts/08_muon_over_dp.py {options}")


def test_muon_is_certified_on_ranks_that_do_not_divide_eight_and_its_bytes_are_those_predicted() -> None:
    ending = worlds.perform(WORKER, "--dp", "3", "--steps", "2")
    assert (ending.code, ending.err) == (0, "")
    assert "Muon on 3 DP ranks, float32, 2 steps" in ending.out
    assert ending.out.count("True.") == 5


def test_momentum_is_a_quarter_of_what_the_page_has_sent() -> None:
    (shown,) = (
        cell.printed for cell in stored_pages.every_cell("08_muon_over_dp") if "Muon / ZeRO-1 AdamW" in cell.printed
    )
    rows = re.findall(r"^  (gradients|momentum|parameters|all) +[\d,]+ +([\d,]+)$", shown, re.MULTILINE)
    sent = {kind: int(number.replace(",", "")) for kind, number in rows}
    assert sent["gradients"] == sent["parameters"]
    assert sent["momentum"] == 98_304  # three quarters of the hidden matrices' elements, in bf16


def test_following_a_matrix_tells_what_every_rank_held_and_kept() -> None:
    out = page_of("--follow --dp {D} --json out/08_follow.json")
    assert "bit for bit: True." in out
    rows = re.findall(r"^  DP rank \d" + r" +(\d+)" * 4 + "$", out, re.MULTILINE)
    assert [[int(number) for number in row] for row in rows] == HELD
    assert "Each rank sent 54 bytes" in out


def test_the_moving_gather_holds_what_the_ranks_of_a_run_hold() -> None:
    frames = figures.frames_of_gather(plan(SMALL, 4), muon=(0, 1), followed=1)
    held = [[int(n) for n in re.findall(r"\d+", frame.alt.rpartition(" hold ")[2])] for frame in frames]
    before, _, whole, kept = map(list, zip(*HELD, strict=True))  # as the worker counts
    assert [held[0], held[1], held[4], held[5], held[6], held[7]] == [before, before, [20] * 4, whole, whole, kept]
    assert held[2] == [5, 6, 15, 14]  # each shard, and its left neighbour's
    assert "Each has sent 54 bytes" in frames[4].caption  # as the worker counts, too


def test_both_ways_to_gather_give_the_same_matrices() -> None:
    out = page_of("--ways")
    assert out.count("True.") == 2
    rows = re.findall(r"^(\w[^0-9]+?) +(\d+) +([\d,]+) +[\d.]+%$", out, re.MULTILINE)
    assert [(name, int(calls)) for name, calls, _ in rows] == [("each matrix", 40), ("each bucket", 3)]
    assert [name for name, *_ in rows] == list(coalescing.WAYS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--ways", "--dp", "1"], "one rank has nothing to gather"), (["--tp", "2"], "--tp 2: this chapter has DP ranks")],
)
def test_what_does_not_fit_is_answered_in_a_sentence(arguments: list[str], words: str) -> None:
    ending = worlds.answer(WORKER, *arguments)
    assert ending.code == 2
    assert words in ending.err


def test_shards_put_together_are_the_padded_bucket() -> None:
    specs = [ParamSpec("a", (3, 3), "float32"), ParamSpec("b", (2, 4), "float32")]
    layout = plan(specs, dp=5)
    whole = [torch.arange(1.0, 10.0), torch.arange(10.0, 18.0)]
    shards = [coalescing.shards_of(layout, whole, rank) for rank in range(5)]
    assert [len(shard) for (shard,) in shards] == [4] * 5
    assert torch.cat([shard for (shard,) in shards]).tolist() == [*range(1, 18), 0, 0, 0]
    assert torch.equal(coalescing.cut_out(layout, [torch.cat([shard for (shard,) in shards])])[1], whole[1])


# ---- What stands on the page ------------------------------------------------------------------------------

CODE = [
    (cell.source, cell.printed)
    for cell in stored_pages.cells("08_muon_over_dp")
    if cell.kind == "code" and not cell.tags
]  # of every cell that a reader sees


def shown(words: str) -> tuple[str, str]:
    """Return source and output of the one visible cell that has these words."""
    (cell,) = (cell for cell in CODE if words in cell[0])
    return cell


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The functions that the page defines, with the model that it asks about."""
    names: dict[str, Any] = {"plan": plan}
    for words in ("def transformer", "def received", "def mean_owners"):
        exec(shown(words)[0], names)
    return names


@pytest.mark.parametrize("dp", [2, 7])
def test_the_small_step_of_the_page_works_on_any_number_of_ranks(dp: int) -> None:
    names: dict[str, Any] = {}
    first = next(n for n, (source, _) in enumerate(CODE) if source.startswith("import torch"))
    last = CODE.index(shown("wrong = torch.zeros"))
    for source, _ in CODE[first : last + 1]:
        exec(source.replace("D = 4", f"D = {dp}"), names)
    assert names["D"] == dp == len(names["kept"])
    assert torch.equal(torch.cat(names["U_shards"]), names["U"])
    assert torch.equal(names["gathered"][:32], names["U"][:32].bfloat16())
    assert not names["gathered"][32:].any()
    assert torch.equal(torch.cat(names["kept"]), names["update"].flatten())
    whole, wrong = (torch.linalg.svdvals(names[name].float().view(4, 5)) for name in ("update", "wrong"))
    assert whole[0] < 2 * whole[-1]
    assert wrong[0] > 2 * wrong[-1]
    lengths = [float(names["wrong"][piece].norm()) for piece in names["pieces"] if len(names["wrong"][piece])]
    assert [f"{length:.1f}" for length in lengths] == ["0.7"] * len(lengths)
    assert any("a row of length about 0.7" in cell.source for cell in stored_pages.cells("08_muon_over_dp"))


def test_nothing_that_the_page_compares_differs() -> None:
    assert not any("False" in printed for _, printed in CODE)
    assert shown("kept_there = ")[1].count("True") == 4
    rows = re.findall(r" ([\d,]{6,}) +[\d.]+%", page_of("--ways"))
    predicted = re.findall(r"([\d,]+) bytes", shown("by_matrix = by_bucket")[1])
    assert rows == predicted
    lines = [line.split()[-1] for line in shown("def transformer")[1].splitlines()]
    assert lines == ["1.250", "1.333"]
    assert all(formula == engine for formula, engine, _ in table(shown("def mean_owners")[1], 3))


def table(printed: str, last: int) -> list[list[str]]:
    """Return the last columns of what a cell printed, without the line of titles."""
    return [line.split()[-last:] for line in printed.splitlines()[1:]]


def test_a_rank_receives_every_element_once_and_needs_what_is_cut(page: dict[str, Any]) -> None:
    small = [ParamSpec("A", (3, 4), "float32"), ParamSpec("B", (4, 5), "float32"), ParamSpec("C", (2, 2), "float32")]
    found = [list(page["received"](plan(small, 4), rank).values()) for rank in range(4)]
    assert found == [[12, 0, 24], [32, 0, 4], [20, 0, 16], [20, 4, 12]]  # needed, already here, not used


def test_owners_are_averaged_with_the_sizes_as_weights(page: dict[str, Any]) -> None:
    assert page["mean_owners"](plan(SMALL[:2], 4)) == (12 * 2 + 20 * 3) / 32
    layout = plan(page["model"], 32)
    assert page["mean_owners"](layout) == pytest.approx(float(formulas.mean_owners(layout, range(96))))


def test_what_the_prose_says_of_the_large_model(page: dict[str, Any]) -> None:
    eight = plan(page["model"], 8)
    assert [rank for rank in range(8) if page["received"](eight, rank)["needed"] == 0] == [0, 4]
    assert all(
        [page["model"][i].name[-3:] for i in eight.owned(b, r)] == ["qkv"] for b in eight.buckets for r in (0, 4)
    )
    owners = {D: page["mean_owners"](plan(page["model"], D)) for D in (8, 512)}
    assert owners[8] < 2
    assert round(owners[512]) == 75
    assert round(page["mean_owners"](plan(page["model"], 512, 512_000_000))) == 7
    for dp in (8, 64, 512):
        layout = plan(page["model"], dp)
        every = [page["received"](layout, rank) for rank in range(dp)]
        total = sum(every[0].values())
        assert round(2 * total / 1e6) == 604
        assert sum(row["needed"] for row in every) < 0.2 * total * dp
        assert dp < 64 or not any(row["already here"] for row in every)
    ratios = [(float(engine), float(busiest)) for _, engine, busiest in table(shown("def mean_owners")[1], 3)]
    on_average, busiest = map(max, zip(*ratios, strict=True))
    assert 1 < on_average < 1.04 < busiest < 1.05


def test_a_move_takes_nccl_what_the_page_says() -> None:
    (text,) = (cell.source for cell in stored_pages.cells("08_muon_over_dp") if "NCCL [reckons with]" in cell.source)
    per_move = [f"{link.alpha_seconds * 1e6:g}" for link in (fabrics.NVLINK, fabrics.ADAPTER)]
    assert re.findall(r"\) ([\d.]+) over NVLink and ([\d.]+) over a network", text) == [tuple(per_move)]
    assert re.findall(r"commit (\w+)", fabrics.SOURCES["latency"])[0] in text


def test_the_run_ends_no_further_from_one_process_than_the_control() -> None:
    (shown,) = (cell.printed for cell in stored_pages.every_cell("08_muon_over_dp") if "x the control" in cell.printed)
    difference, control = map(float, re.findall(r"(?:difference|, control) ([\d.e-]+)", shown))
    assert difference <= control
