"""The table that puts steps that overlap beside each other: ours and the report's, by one definition."""

from typing import Any

import pytest
from trace_cases import event, gloo, merged

from distmuon.optim.schedules import SCHEDULES
from muonbook.ch14 import trace_tables
from muonbook.ch14.callouts import after_the_gradients
from muonbook.measure import results, trace


def row(total: float, union: float, span: float, computing: float, overlap: float) -> dict[str, Any]:
    values = {"communication_sum": total, "communication": union, "span": span, "computation": computing}
    return {**values, "overlap": overlap}


def test_every_column_is_over_its_own_synchronous_step() -> None:
    ours = {"synchronous": row(4, 4, 8, 4, 0), "naive": row(5, 4, 8, 4, 1), "pipelined": row(8, 4, 6, 5, 4)}
    before, after = row(10, 10, 50, 40, 0), row(30, 20, 40, 50, 15)
    assert trace_tables.overlap_lines(ours, before, after)[1:] == [
        "naive  pipelined    async",
        " 1.25       2.00     3.00  durations, summed",
        " 1.00       1.00     2.00  the same, as a union",
        " 1.00       0.75     0.80  first start to last end",
        "  25%        80%      30%  of computing, under a collective",
        "  25%       100%      75%  of collectives, over computing",
    ]


def test_in_the_stored_traces_sums_grow_and_spans_shrink_here_and_there() -> None:
    report = results.load("report_traces")["traces"]
    theirs = (report[f"trace_muon_FULLSTEP_dp2_tp2{kind}_rank0"] for kind in ("", "_async"))
    sync, asynchronous = map(trace_tables.in_ms, theirs)
    lines = trace_tables.overlap_lines(results.load("traces")["limited_link"]["recorded"], sync, asynchronous)
    assert max(map(len, lines)) <= 60
    summed, _, span = ([float(number) for number in line.split()[:3]] for line in lines[2:5])
    assert min(summed) > 1 > max(span)


def test_a_public_trace_has_the_names_of_a_recorded_step_and_the_same_time_with_no_work_beside() -> None:
    for public in results.load("report_traces")["traces"].values():
        renamed = trace_tables.in_ms(public)
        assert not [name for name in renamed if name.endswith("_ms")]
        assert renamed["exposed"] == pytest.approx(renamed["communication"] - renamed["overlap"], abs=2e-3)


def test_four_readings_of_two_runs_are_each_over_the_synchronous_one() -> None:
    before, after = row(10, 10, 50, 40, 0), row(30, 20, 40, 50, 15)
    assert list(trace_tables.readings(before, after).values()) == [3.0, 2.0, 0.5, 0.8]


def test_in_the_stored_traces_naive_shortens_the_wire_and_the_pipeline_hides_work_besides() -> None:
    recorded = results.load("traces")["limited_link"]["recorded"]
    synchronous, naive, pipelined = (recorded[name] for name in SCHEDULES)
    assert naive["communication"] < pipelined["communication"] < synchronous["communication"]
    assert synchronous["overlap"] == 0 < naive["overlap"] < pipelined["overlap"]
    assert pipelined["span"] < naive["span"] < synchronous["span"]


def test_times_are_those_of_the_part_alone_and_add_up_to_it() -> None:
    def moved(name: str, start: float, dur: float) -> Any:
        return event("user_annotation", name, start, dur, 1, 0)

    moves = [("reduce_scatter", 0, 30), ("momentum", 30, 2), ("dp_gather", 32, 8), ("newton_schulz", 40, 5)]
    (rank,) = trace.parse(merged([*(moved(*move) for move in moves), gloo(10, 25, 0, 0), gloo(33, 6, 0, 0)]))
    parts = ("work", "work under the wire", "wire", "neither")
    assert trace_tables.times(rank, (30, 50)) == dict(zip(parts, (5, 2, 7, 6), strict=True))
    assert trace_tables.times(rank, (31, 42)) == dict(zip(parts, (2, 1, 7, 1), strict=True))


def test_savings_add_up_to_what_is_shorter_after_the_gradients() -> None:
    runs = {name: trace.read(results.FOLDER / f"schedule_{name}.json.gz") for name in SCHEDULES}
    saved = trace_tables.savings(runs)
    assert list(saved) == ["naive", "pipelined"]
    ends = {name: after_the_gradients(ranks[0]) for name, ranks in runs.items()}
    spans = {name: end - start for name, (start, end) in ends.items()}
    for name, parts in saved.items():
        assert sum(parts.values()) == pytest.approx(100 * (1 - spans[name] / spans["synchronous"]))
        assert min(parts.values()) >= 0
    assert 0 < saved["naive"]["work hidden"] < saved["pipelined"]["work hidden"]
