"""Chapter 6's worker as its readers run it, and the comparison of ZeRO-1 with other variants of data parallelism."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stored_pages
import torch
import worlds

from distmuon.models.networks import MLP
from distmuon.sharding.gradients import statistics_bytes
from distmuon.sharding.layout import ParamSpec, plan
from distmuon.sharding.ledger import ring_bytes
from distmuon.verify import model_states
from muonbook.ch06 import experiments, figures, small_puzzles

PAGE = stored_pages.every_cell("06_zero1")
WORKER = str(worlds.ROOT / "scripts" / "06_zero1.py")


def test_zero1_is_certified_and_its_bytes_are_those_predicted() -> None:
    ending = worlds.perform(WORKER, "--dp", "2", "--steps", "2", "--dtype", "bfloat16")
    assert (ending.code, ending.err) == (0, "")
    assert ending.out.count(": True.") == 4
    ranks = re.findall(r"^  DP rank (\d)" + r" +([\d,]+)" * 5 + "$", ending.out, re.MULTILINE)
    kept = [[int(number.replace(",", "")) for number in row] for row in ranks]
    assert [row[:4] for row in kept] == [[rank, 2 * 67_338, 4 * 67_338, 2 * 67_338] for rank in range(2)]
    sent = dict(re.findall(r"(gradients|parameters) +4 +([\d,]+) ", ending.out))
    assert sent == {"gradients": f"{2 * 67_338:,}", "parameters": f"{67_338:,}"}


def test_all_that_the_variants_keep_and_send_is_predicted(tmp_path: Path) -> None:
    """On three ranks: rows of 10, 128 and 256 do not divide, so shards, rows and buckets are padded."""
    ending = worlds.perform(WORKER, "--compare", "--dp", "3", "--json", f"{tmp_path}/compare.json")
    assert (ending.code, ending.err) == (0, "")
    assert "counted = predicted to the byte: True." in ending.out
    table = {(line[:9].strip(), line[10:26].strip()): line[26:].split() for line in ending.out.splitlines()[2:-1]}
    assert list(table) == list(experiments.BASELINES)
    assert table["float32", "DDP"] == ["4.00", "4.00", "0.00", "8.00", "16.00", "5.33"]
    assert table["bfloat16", "plain, masters"] == ["2.00", "4.00", "4.00", "8.00", "18.00", "5.33"]
    assert table["bfloat16", "ZeRO-1"] == ["2.00", "4.00", "1.33", "2.67", "10.00", "4.00"]
    counted = {
        row["baseline"]: row for row in json.loads((tmp_path / "compare.json").read_text()) if row["dtype"] != "float32"
    }
    for stage, way in (("plain", "plain, masters"), ("ZeRO-1", "ZeRO-1"), ("ZeRO-3", "FSDP2")):
        (kept,) = (sum(row.values()) for name, row in figures.kept_by_stage(3).items() if name.startswith(stage))
        assert sum(counted[way]["kept"].values()) == pytest.approx(kept, abs=0.1), "rows do not divide by three"
        assert counted[way]["sent"] == pytest.approx(sent_by_stage()(3, 1)[stage], abs=0.1)


def sent_by_stage() -> Callable[..., dict[str, float]]:
    """Return the function with which the chapter's reader computes what each stage sends."""
    space: dict[str, Any] = {}
    exec(stored_pages.cell_with("06_zero1", "def sent_by_stage").source.partition("\n\n\n")[0], space)
    return space["sent_by_stage"]


def test_zero3_sends_more_from_the_first_micro_batch_on_and_zero2_from_the_second() -> None:
    one, two = (sent_by_stage()(4, k) for k in (1, 2))
    assert one["ZeRO-1"] == one["ZeRO-2"] < one["ZeRO-3"]
    assert two["ZeRO-1"] < two["ZeRO-2"]
    assert any("and ZeRO-2 from the second one on" in cell.source for cell in PAGE)


def test_the_stages_keep_what_the_puzzle_asks_for() -> None:
    for D in (4, 64):
        kept = [sum(row.values()) for row in figures.kept_by_stage(D).values()]
        assert kept == [small_puzzles.kept_bytes(stage, D) for stage in range(4)]


@pytest.mark.parametrize(
    ("said", "printed"),
    [
        ("needs 126 GB", "18 bytes   126 GB"),
        ("all 18 bytes, and 12 of them", "together          18 bytes"),
        ("With three cards all of this fits, and 10 GB are left", " 3 cards: 10.00 bytes    70 GB"),
        ("stops at 256", "in bf16:    256"),
        ("6 elements of state", "[6, 6, 6, 6]"),
        ("AdamW has 20", "in AdamW: 20"),
        ("sends a quarter *less*", "torch.bfloat16  {'reduce_scatter': 3000, 'all_gather': 1500}, together 4500"),
        ("which is 228 bytes", "gradient summary      1         228         228"),
        ("slice of every matrix", "4 bucket(s): the matrices have [4, 4, 4] owners"),
    ],
)
def test_numbers_of_the_prose_are_printed(said: str, printed: str) -> None:
    assert any(said in cell.source for cell in PAGE if cell.kind == "markdown")
    assert any(printed in cell.printed for cell in PAGE)


def test_numbers_of_the_answers_follow_from_the_formulas() -> None:
    assert [10 * small_puzzles.kept_bytes(1, cards) for cards in (3, 8)] == [100, 75]
    assert 30 * min(small_puzzles.kept_bytes(1, cards) for cards in (64, 10**9)) == pytest.approx(180)
    parameters = len(list(MLP((64, 256, 128, 128, 10)).parameters()))
    assert (parameters, statistics_bytes(parameters)) == (8, 8 * 19)
    assert ring_bytes("all_reduce", 8 * 19, 4) == 228


def test_the_control_is_larger_than_what_the_run_differs_by() -> None:
    (printed,) = (cell.printed for cell in PAGE if "at most 4 x the control" in cell.printed)
    difference, control = map(float, re.findall(r"(?:difference|, control) ([\d.e-]+)", printed))
    assert difference < control
    assert any("the control happens to be the larger one" in cell.source for cell in PAGE)


def test_the_planner_counts_the_activations_of_which_the_chapter_speaks() -> None:
    (said,) = (cell.source for cell in PAGE if "scripts/plan.py" in cell.source)
    command = re.findall(r"`scripts/(plan\.py [^`]+)`", said)[0].split()
    ending = worlds.answer(str(worlds.ROOT / "scripts" / command[0]), *command[1:])
    assert f"{re.findall(r'tokens take ([0-9]+) GB', said)[0]} GB" == f"{activations(ending.out):.0f} GB"


def activations(plan: str) -> float:
    """Return the gigabytes of activations that a printed plan has."""
    return float(re.findall(r"^  activations +([\d.]+) GB", plan, re.MULTILINE)[0])


def test_whatever_the_chapter_compares_is_equal() -> None:
    lines = [line for cell in PAGE for line in cell.printed.splitlines()]
    compared = [
        line for line in lines if "bit for bit" in line or "bitwise" in line or "= gradient of the batch" in line
    ]
    assert len(compared) == 6
    assert all(line.rstrip(".").endswith(": True") for line in compared)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--compare", "--dp", "1"], "one rank has nobody to share with"),
        (["--tp", "2"], "--tp 2: this chapter has DP ranks"),
    ],
)
def test_what_does_not_fit_is_answered_in_a_sentence(arguments: list[str], words: str) -> None:
    ending = worlds.answer(WORKER, *arguments)
    assert ending.code == 2
    assert words in ending.err


def test_a_storage_counts_once_and_whole() -> None:
    flat = torch.zeros(10)
    states = model_states.count({
        "parameters": [flat[:4], flat[4:]], "gradients": [torch.zeros(3)], "masters": [flat[:2]], "momentum": []
    })  # fmt: skip
    assert states == {"parameters": 40, "gradients": 12, "masters": 0, "momentum": 0}


def test_moments_and_masters_are_kept_for_the_shard_alone() -> None:
    layout = plan([ParamSpec("a", (3, 3), "bfloat16"), ParamSpec("b", (2,), "float32")], dp=4)
    states = [model_states.predict_shards(layout, rank) for rank in range(4)]
    assert [row["masters"] for row in states] == [4 * 3] * 4  # a is padded to 12; b, float32, is its own master
    assert [row["exp_avg"] for row in states] == [4 * (3 + 1), 4 * (3 + 1), 4 * 3, 0]
    assert [row["counters"] for row in states] == [8, 8, 4, 0]
