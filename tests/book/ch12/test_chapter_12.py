"""Chapter 12's worker as its readers run it, its rows for figures, and the reader of profiler traces."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import stored_pages
import worlds

from distmuon.launch import hosts
from muonbook.ch12 import byte_counts, byte_tables, figure_bytes
from muonbook.measure import profiler
from muonbook.measure.baselines import BASELINES
from muonbook.measure.workload import SHAPES

WORKER = str(worlds.ROOT / "scripts" / "12_bytes.py")


# ---- The worker -------------------------------------------------------------------------------------------


def test_all_counts_of_a_step_are_printed_and_agree() -> None:
    out = stored_pages.printed("12_bytes", "python ../scripts/12_bytes.py --dp 4 --tp 1 --shape odd")
    titles = [line for line in out.splitlines() if line in {c.title for c in BASELINES.values()}]
    assert titles == [c.title for name, c in BASELINES.items() if name != "muon_fsdp2"]
    rows = re.findall(r"^ *[\d,]+ +([=-]) += +=  +\d+ \w+$", out, re.MULTILINE)
    assert len(rows) == 10
    assert rows.count("=") == 6  # our own, which the ledger hears of
    assert max(map(len, out.splitlines())) <= 60
    assert out.endswith("all counts agree: True.\n")


def test_ratios_for_matrices_are_those_of_the_formula() -> None:
    out = stored_pages.printed("12_bytes", "python ../scripts/12_bytes.py --ratios --dp 4 --tp 1")
    found = re.findall(r"(\d\.\d{3}) +(\d\.\d{3}) +(\d\.\d{3})  ", out, re.MULTILINE)
    assert [row[:2] for row in found] == [("1.250",) * 2, ("1.333",) * 2, ("1.500",) * 2]
    assert all(1 < float(whole) < float(formula) for formula, _, whole in found)  # what is not a matrix dilutes it
    assert out.endswith("counted = formula: True.\n")


def test_the_operating_system_counts_or_says_why_not() -> None:
    obstacle = hosts.obstacle()
    ending = worlds.finish(WORKER, "--hosts", "--dp", "2", "--tp", "1", "--shape", "odd")
    if obstacle is not None:
        assert (ending.code, ending.out, ending.err) == (2, "", f"error: {obstacle}\n")
        return
    assert (ending.code, ending.err) == (0, "")
    assert ending.out.endswith("(a broadcast's ranks only in sum): True.\n")


def test_what_is_measured_is_written_or_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_counts, "counts_on", lambda grids: {"grids": list(grids), "faults": [], "equal": True})
    monkeypatch.setattr(byte_counts, "ratios_on", lambda dp, tp: [{"dp": dp, "tp": tp}])
    monkeypatch.setattr(byte_counts, "fsdp2_on", lambda dp: {"dp": dp})
    monkeypatch.setattr(byte_counts, "wire_on", lambda dp, tp: [{"dp": dp, "tp": tp}])
    refused = byte_counts.measure(quick=True, obstacle="not here.")
    assert (refused["wire"], refused["obstacle"]) == (None, "not here.")
    full = byte_counts.measure(quick=False, obstacle=None)
    assert len(full["counted"]["grids"]) == 20
    assert [(row["dp"], row["tp"]) for row in full["wire"]] == byte_counts.WIRE_GRIDS
    assert set(refused) == set(full)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "round"], "--shape round is unknown; choose one of even, tall, odd."),
        (["--tp", "3"], "--tp 3 does not divide the model's 8 heads"),
        (["--ratios", "--dp", "1"], "--ratios --dp 1: with one DP rank AdamW sends nothing"),
        (["--hosts", "--dp", "1", "--tp", "1"], "--hosts: one rank has nobody to send to"),
        (["--hosts", "--backend", "nccl"], "--backend does nothing with --hosts"),
        (["--json", "x.json"], "--json does nothing by itself; it goes with --measure"),
        (["--dp", "0"], "--dp 0 --tp 2: both must be at least 1"),
    ],
)
def test_what_does_not_fit_is_answered_in_a_sentence(arguments: list[str], words: str) -> None:
    ending = worlds.finish(WORKER, *arguments)
    assert (ending.code, ending.out) == (2, "")
    assert words in ending.err


def test_the_stored_results_hold_what_the_chapter_says() -> None:
    found = json.loads((worlds.ROOT / "book" / "results" / "bytes.json").read_text())
    assert {(row["dp"], row["tp"]) for row in found["counted"]["grids"]} == set(byte_counts.GRIDS)
    assert found["counted"]["equal"]
    assert {(row["dp"], row["tp"]) for row in found["ratios"]} == set(byte_counts.RATIO_GRIDS)
    assert all(abs(row["formula"] - row["matrices"]) < 1e-12 for row in found["ratios"])
    for row in found["fsdp2"]:
        assert row["stray"] < row["rounding"]
    for row in found["wire"] or []:
        if BASELINES[row["contender"]].predict is not None:
            assert abs(row["ratio"] - 1) < byte_tables.TOLERANCE
            if row["contender"] not in byte_tables.BROADCASTS:
                assert max(abs(row[key] - 1) for key in ("least_rank", "greatest_rank")) < byte_tables.TOLERANCE


def test_tables_say_what_the_rows_say() -> None:
    row: dict[str, Any] = {"dp": 4, "tp": 1, "payload": 300, "ring": 100, "reduce_scatter": 200}
    row |= {"ratio": 1.01, "least_rank": 1.0, "greatest_rank": 1.02}
    wire = [row | {"contender": "zero1"}, row | {"contender": "torch_zero", "least_rank": 0.5}]
    assert byte_tables.wire_lines(wire)[-3:] == [
        "Sum over ranks within 3%, for all that we predict: True.",
        "1.000 to 1.020  single ranks",
        "0.500 to 1.020  with broadcasts",
    ]
    assert byte_tables.doubled_lines([row | {"contender": "muon_fsdp2"}])[1:] == ["      1.010       1.000  4 x 1"]
    assert byte_tables.beside_lines([("odd", 4, 1), ("tall", 2, 2)])[-1] == "Exactly, as fractions: True."


# ---- The reader of traces ---------------------------------------------------------------------------------


def operator(name: str, dims: list[Any], kinds: list[str]) -> dict[str, Any]:
    return {"name": name, "cat": "cpu_op", "args": {"Input Dims": dims, "Input type": kinds}}


def annotation(name: str, dims: list[int], kind: str) -> dict[str, Any]:
    return {"name": name, "cat": "user_annotation", "args": {"Input Dims": [dims], "Input type": [kind]}}


TRACE = [
    {"name": "process_name", "ph": "M"},
    operator("aten::add", [[3], [3]], ["float", "float"]),
    operator("c10d::_allgather_base_", [[8], [4], []], ["c10::BFloat16", "c10::BFloat16", ""]),
    annotation("gloo:all_gather", [4], "c10::BFloat16"),
    operator("c10d::alltoall_base_", [[6], [10]], ["float", "float"]),
    annotation("gloo:all_to_all", [10], "float"),
    operator("c10d::allreduce_", [[[2, 5]], []], ["TensorList", ""]),
    annotation("gloo:all_reduce", [2, 5], "double"),
    operator("c10d::allreduce_", [[[3]], []], ["TensorList", ""]),
    annotation("gloo:all_reduce", [3], "float"),
    operator("c10d::barrier", [], []),
]


def test_every_collective_is_counted_once() -> None:
    assert profiler.count_once(TRACE) == {"all_gather": 16, "all_to_all": 40, "all_reduce": 92}
    assert profiler.seen(TRACE)["all_reduce"] == profiler.Seen(calls=2, payload_bytes=92)
    assert profiler.sounding_right(TRACE) == 8
    assert profiler.count_once([]) == {}


def test_on_nccl_the_dtype_is_its_annotations_and_not_that_of_its_shadow_on_the_gpu() -> None:
    shadow = {"name": "nccl:all_reduce", "cat": "gpu_user_annotation", "args": {"External id": 7}}
    there = [shadow, *(event | {"name": event["name"].replace("gloo:", "nccl:")} for event in TRACE)]
    assert profiler.count_once(there) == profiler.count_once(TRACE)
    with pytest.raises(ValueError, match=r"of what dtype the all_reduce of \[3\] is"):
        profiler.count_once([operator("c10d::allreduce_", [[[3]], []], ["TensorList", ""]), shadow])


def test_a_collective_that_the_reader_does_not_know_is_no_silent_gap() -> None:
    with pytest.raises(ValueError, match="c10d::gather_ is a collective that this reader does not know"):
        profiler.count_once([operator("c10d::gather_", [], [])])


# ---- The rows of the figures ------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "tp"), [(4, 2), (8, 1), (1, 4)])
def test_every_predicted_byte_has_a_purpose(dp: int, tp: int) -> None:
    workload = SHAPES["even"].shared_by(dp)
    rows = figure_bytes.baseline_rows(workload, dp, tp)
    for baseline in BASELINES.values():
        if baseline.predict is not None and baseline.admits(workload, dp, tp):
            assert sum(rows[baseline.title].values()) == baseline.predict(workload, dp, tp, 0).total().sent_bytes
            assert set(rows[baseline.title]) <= set(figure_bytes.PURPOSES)
    assert (rows["Muon, gather_all"]["momentum, TP"] > 0) == (tp > 1)


def test_the_planned_ratios_begin_with_the_published_one() -> None:
    rows = list(figure_bytes.ratio_rows(figure_bytes.LARGE, ranks=64).values())
    assert sum(rows[0].values()) == 1.25
    totals = [sum(row.values()) for row in rows]
    assert totals == sorted(totals)
    assert len(rows) == 5
