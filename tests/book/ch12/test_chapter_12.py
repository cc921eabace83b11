"""Chapter 12's worker as its readers run it, its rows for figures, and the reader of profiler traces."""

import json
import re
from fractions import Fraction
from typing import Any

import pytest
import stored_pages
import worlds

from distmuon.optim import strategies
from distmuon.verify.prediction import predict_step
from muonbook.ch12 import (
    byte_counts,
    figures,
    planned_bytes,
)
from muonbook.ch12.four_counts import COUNTED, GRIDS, LAYOUTS
from muonbook.measure import formulas, profiler, reported, results
from muonbook.measure.workload import SHAPES
from muonbook.planner.parts.fsdp_worlds import Dtypes, FsdpPart
from muonbook.planner.stages import units_of
from muonbook.runnable_baselines import RUNNABLE, admitted

WORKER = str(worlds.ROOT / "scripts" / "12_bytes.py")


# ---- The worker -------------------------------------------------------------------------------------------


def test_all_counts_of_a_step_are_printed_and_agree() -> None:
    out = stored_pages.printed("12_bytes", "python ../scripts/12_bytes.py --dp 4 --tp 1 --shape odd")
    rows = re.findall(r"^ *([\d,]+) +([\d,]+) +[\d.]+  (.+)$", out, re.MULTILINE)
    assert [title for *_, title in rows] == [RUNNABLE[name].title for name in COUNTED if name != "muon_fsdp2"]
    assert all(planned == counted for planned, counted, _ in rows)
    assert max(map(len, out.splitlines())) <= 60
    assert out.endswith("all counts agree: True.\n")


def test_what_was_counted_is_what_the_formulas_say() -> None:
    out = stored_pages.printed("12_bytes", "python ../scripts/12_bytes.py --ratios --dp 4 --tp 1")
    baselines = re.findall(r"^ +(\d\.\d{3}) +(\d\.\d{3})  (.+)$", out, re.MULTILINE)
    assert [name for *_, name in baselines] == ["gather all, bucketed", "gather all, flat", "gather cut", "owner"]
    by_formula = [float(formula) for formula, *_ in baselines]
    assert by_formula[:2] == [1.25, 1.25]
    assert 1 < by_formula[2] < 1.25
    assert by_formula[3] == 1
    assert out.endswith("Formula + padding + AdamW's + norms = counted: True.\n")


def test_other_dtypes_send_what_the_formula_says_too() -> None:
    rows = byte_counts.ratios_on(2, 1, "odd")
    assert [f"{row['matrices']:.3f}" for row in rows] == ["1.250", "1.333", "1.500"]
    assert all(row["matrices"] == pytest.approx(row["formula"], abs=1e-12) for row in rows)


WIRE = """import json
from muonbook import network_emulation
network_emulation.setup_bridge()  # before torch is here: a process with threads cannot
from muonbook.ch12 import byte_counts
print(json.dumps(byte_counts.wire_on(2, 1, "odd")))"""
BROADCASTS = ("torch_zero",)  # along a tree: only all ranks together send what the ring formula says


def assert_the_wire_is_near_the_formula(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        keys = ("on_gloo",) if row["baseline"] in BROADCASTS else ("on_gloo", "least_rank", "greatest_rank")
        if RUNNABLE[row["baseline"]].predicted:
            assert [row[key] for key in keys] == pytest.approx([1] * len(keys), abs=0.03), row["baseline"]


@pytest.mark.usefixtures("permitted")
def test_the_operating_system_counts_what_the_ring_formula_says() -> None:
    ending = worlds.finish("-c", WIRE)
    assert (ending.code, ending.err) == (0, "")
    assert_the_wire_is_near_the_formula(json.loads(ending.out))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "round"], "--shape round: choose one of even, tall, odd."),
        (["--tp", "3"], "--tp 3 does not divide the model's 8 heads"),
        (["--ratios", "--dp", "1"], "--ratios --dp 1: with one DP rank AdamW sends nothing"),
        (["--dp", "0"], "--dp 0 --tp 2: both must be at least 1"),
    ],
)
def test_what_does_not_fit_is_answered_in_a_sentence(arguments: list[str], words: str) -> None:
    ending = worlds.answer(WORKER, *arguments)
    assert (ending.code, ending.out) == (2, "")
    assert words in ending.err


def test_the_stored_results_hold_what_the_chapter_says() -> None:
    found = json.loads((worlds.ROOT / "book" / "results" / "bytes.json").read_text())
    assert {(row["dp"], row["tp"]) for row in found["counted"]["grids"]} == set(GRIDS)
    assert found["counted"]["equal"]
    assert {(row["dp"], row["tp"]) for row in found["ratios"]} == set(byte_counts.RATIO_GRIDS)
    assert all(abs(row["formula"] - row["matrices"]) < 1e-12 for row in found["ratios"])
    assert {(row["dp"], row["tp"]) for row in found["compared"]} == set(byte_counts.RATIO_GRIDS)
    assert all(row["closed"] for row in found["compared"] if row["baseline"] in LAYOUTS)
    assert_the_wire_is_near_the_formula(found["wire"] or [])


def test_what_is_stored_of_muon_over_adamw_is_what_is_predicted() -> None:
    """To the last byte, without a process: a layout that changes turns this red, and `make bench` mends it."""
    for dp, tp in byte_counts.RATIO_GRIDS:
        rows = results.load("bytes")["compared"]
        stored = {row["baseline"]: row["sent"] for row in rows if (row["dp"], row["tp"]) == (dp, tp)}
        workload = SHAPES["even"].shared_by(dp)
        assert list(stored) == admitted(workload, dp, tp, byte_counts.COMPARED)
        planned = figures.step_rows(workload, dp, tp, list(stored))
        assert list(stored.values()) == pytest.approx(
            [sum(row.values()) for row in planned.values()], abs=0.5 / dp / tp
        )


def test_a_count_that_is_not_the_formula_s_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"dp": 2, "tp": 1, "baseline": "muon_cut", "over_zero1": 1.05, "ratio": 1.0625, "closed": True}
    assert byte_counts.report_ratios([row])
    assert not byte_counts.report_ratios([row, row | {"closed": False}])
    assert capsys.readouterr().out.splitlines()[-1].endswith("= counted: False.")


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
    assert profiler.count_once([]) == {}


def test_on_nccl_the_dtype_is_its_annotations_and_not_that_of_its_shadow_on_the_gpu() -> None:
    shadow = {"name": "nccl:all_reduce", "cat": "gpu_user_annotation", "args": {"External id": 7}}
    there = [shadow, *(event | {"name": event["name"].replace("gloo:", "nccl:")} for event in TRACE)]
    assert profiler.count_once(there) == profiler.count_once(TRACE)
    with pytest.raises(ValueError, match=r"annotate no dtype for the all_reduce of \[3\]"):
        profiler.count_once([operator("c10d::allreduce_", [[[3]], []], ["TensorList", ""]), shadow])


def test_of_two_dtypes_of_one_shape_none_is_guessed() -> None:
    call = operator("c10d::allreduce_", [[[3]], []], ["TensorList", ""])
    half, whole = (annotation("gloo:all_reduce", [3], dtype) for dtype in ("c10::BFloat16", "float"))
    assert profiler.count_once([call, whole, call, whole]) == {"all_reduce": 24}
    with pytest.raises(ValueError, match="annotate 2 dtypes for the all_reduce"):
        profiler.count_once([call, half, call, whole])


def test_a_send_is_read_where_nccl_names_both_ends() -> None:
    sent = [operator("c10d::send", [[[6]], []], ["TensorList", ""]), annotation("nccl:send 0->1", [6], "float")]
    assert profiler.seen(sent) == {"send": profiler.Seen(calls=1, payload_bytes=24)}


def test_a_collective_that_the_reader_does_not_know_is_no_silent_gap() -> None:
    with pytest.raises(ValueError, match="c10d::gather_ is a collective that this reader does not know"):
        profiler.count_once([operator("c10d::gather_", [], [])])


# ---- The rows of the figures ------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "tp"), [(4, 2), (8, 1)])
def test_every_predicted_byte_has_a_purpose(dp: int, tp: int) -> None:
    workload = SHAPES["even"].shared_by(dp)
    for name in byte_counts.COMPARED:
        ledger = RUNNABLE[name].predict(workload, dp, tp, (dp - 1, 0))
        purposes = figures.sent_by_purpose(ledger)
        assert sum(purposes.values()) == ledger.total().sent_bytes
        assert purposes["activations"] == ledger.total(op="all_reduce", group="tp").sent_bytes
    rows = figures.step_rows(workload, dp, tp, byte_counts.COMPARED)
    over_tp = {title for title, row in rows.items() if row["momentum over TP or mesh"]}
    assert over_tp - {"MuonW"} == {baseline.title for baseline in LAYOUTS.values() if tp > 1}
    assert rows["owner"]["momentum over DP"] == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_the_picture_calls_received_is_what_a_step_sends(name: str) -> None:
    layout, strategy = figures.laid_out(name), LAYOUTS[name].strategy
    sent = 0
    for rank in range(figures.D):
        ledger = predict_step(layout, 1, rank, range(len(layout.specs)), strategy, "float32", 0)
        sent += sum(t.sent_bytes for e, t in ledger if figures.purpose(e) == figures.PURPOSES[2])
    held = sum(piece.where.size for piece in figures.pieces(name) if piece.received)
    assert 4 * held == sent
    assert figures.received(name) == held / (figures.D * sum(s.numel for s in layout.specs))


def test_a_planned_model_is_within_the_published_interval_where_only_what_is_cut_travels() -> None:
    without_tp, with_tp = (planned_bytes.growth("llama3_70b", tp, [8, 1024]) for tp in (1, 8))
    assert all(1 < added.ratio < 1.001 for added in without_tp["gather cut"].values())
    assert all(
        1.24 < added.ratio <= 1.25
        for name in ("gather all, bucketed", "gather all, flat")
        for added in without_tp[name].values()
    )
    assert all(added.tp == 0 for of in without_tp.values() for added in of.values())
    for name, of in with_tp.items():
        if name != "owner":
            assert of[8].ratio > of[1024].ratio
    assert without_tp["owner"][8].ratio < 1.001
    assert without_tp["owner"][1024].ratio > 3  # more ranks than matrices: shards as long as the largest of them


def test_equal_matrices_stand_at_one_plus_a_quarter_over_their_number() -> None:
    for size in (1, 3, 11, 43):
        found = figures.strip(size)
        assert found.ratio == 1 + Fraction(1, 4 * size)
        assert sum(ranks - 1 for ranks in found.spread) == figures.STRIP_D - 1  # a boundary, a journey


ON_FSDP2 = ("adamw_fsdp2", "muonw", "muon_fsdp2")


def test_what_a_reduce_scatter_of_gloo_adds_is_what_the_operating_system_counts_more() -> None:
    """FSDP2's is carried out as an all-reduce, which sends twice as much: a third more in all."""
    rows = results.load("bytes")["wire"]
    (row,) = (row for row in rows if (row["baseline"], row["dp"], row["tp"]) == ("adamw_fsdp2", 4, 1))
    called, on_gloo = row["ring"], row["ring"] + row["reduce_scatter"]
    assert row["payload"] / on_gloo == pytest.approx(1, abs=0.01)
    assert f"{on_gloo / called:.2f}" == "1.34"
    assert all(other["ratio"] < 1.01 for other in rows if other["baseline"] not in ON_FSDP2)
    assert results.load("bytes")["header_bytes"] == 66
    torchs = [row for row in rows if row["baseline"] == "muon_fsdp2"]
    assert all(abs(row["ratio"] - 8 / 7) < 0.03 and 1.01 < row["on_gloo"] < 1.035 for row in torchs)
    beyond = {name: (other["payload"] - other["ring"] - other["reduce_scatter"]) / other["packets"]
              for name in ("muon_fsdp2", "adamw_fsdp2") for other in rows
              if (other["baseline"], other["dp"], other["tp"]) == (name, 4, 1)}  # fmt: skip
    assert beyond["muon_fsdp2"] < 1.25 * beyond["adamw_fsdp2"]  # alike for each packet, of which there are more


def test_fsdp2_gathers_what_lies_outside_the_blocks_once_and_pads() -> None:
    workload = SHAPES["odd"].shared_by(4)
    layout, _, _ = workload.plan(4, 1)
    outside = {spec.name: spec.numel for spec in layout.specs if not spec.name.startswith("blocks.")}
    assert set(outside) == {"tokens.weight", "positions.weight", "norm.weight", "norm.bias", "head.weight"}
    zero1, all_twice = (3 / 4 * each * sum(spec.numel for spec in layout.specs) for each in (4 + 4, 4 + 2 * 4))
    assert all_twice / zero1 == 1.5
    unpadded = all_twice - 3 / 4 * 4 * sum(outside.values())
    sent = RUNNABLE["adamw_fsdp2"].predict(workload, 4, 1, (0, 0)).total().sent_bytes
    assert unpadded < sent < all_twice
    assert f"{sent / RUNNABLE['zero1'].predict(workload, 4, 1, (0, 0)).total().sent_bytes:.3f}" == "1.462"


def test_the_price_of_tp_in_the_picture_is_the_formula_s() -> None:
    for holders, frame in enumerate(figures.frames_of_parts()):
        by_formula = float(formulas.ratio("gather_cut", figures.PARTS_D, figures.PARTS_T, 4, 4, 2, max(holders, 1)))
        assert (f"in all {by_formula:.2f} ×" in frame.alt) == (holders > 0)


def test_one_matrix_is_most_of_the_reports_model() -> None:
    """As the page of claims says, beside the ratios of that model."""
    sizes = [rows * columns for (rows, columns), _ in reported.MATRICES]
    assert max(sizes) / sum(sizes) > 0.9


def test_the_page_s_formula_is_that_of_the_plans() -> None:
    names: dict[str, Any] = {}
    for start in ("from distmuon.sharding.layout import ParamSpec", "from muonbook.ch12 import own_model\n"):
        (source,) = (cell.source for cell in stored_pages.cells("12_bytes") if cell.source.startswith(start))
        exec(source.partition("\nfor n in ")[0].partition("\nfor w, ")[0], names)
    for w, dtype in ((4, "float32"), (2, "bfloat16")):
        for dp, tp in ((4, 1), (4, 2), (16, 4)):
            bucket, block = names["megatron"](dp), names["block"]
            found, specs = names["ratios"](block, dp, tp, w, bucket), names["matrices"](block, names["blocks"], tp)
            assert all(spec.tp_gather_dim == (0 if tp > 1 else None) for spec in specs)  # or owners go by wrong costs
            everything = range(len(specs))
            for baseline in LAYOUTS.values():
                lay_out = strategies.planner(baseline.strategy)
                size = baseline.elements or bucket
                layout = lay_out(specs, muon=everything, dp=dp, tp=tp, bucket_size=size)
                s = formulas.mean_owners(layout, everything)
                expected = float(formulas.ratio(baseline.strategy, dp, tp, 4, w, 2, s))
                if baseline.strategy == "owner":  # nothing else pads here
                    expected += layout.buffers[0].size / sum(spec.numel for spec in specs) - 1
                assert found[baseline.title] == pytest.approx(expected, rel=1e-12)
            specs = [spec._replace(name=f"blocks.{spec.name}", tp_split_dim=0) for spec in specs]
            dtypes = Dtypes("float32", dtype, "float32")
            part = FsdpPart(specs, frozenset(everything), dp, tp, units_of(specs), dtypes=dtypes)
            adamw = sum(sent for *_, sent in part.gathers().values())
            muon = sum(float(each.mean()) for each in part.exchanged())
            zero1 = float(formulas.zero1_adamw(dp, sum(spec.numel for spec in specs), 4, w))
            assert found["AdamW, FSDP2"] == pytest.approx(adamw / zero1, rel=1e-3)
            assert found["MuonW"] == pytest.approx((adamw + muon) / zero1, rel=1e-3)
