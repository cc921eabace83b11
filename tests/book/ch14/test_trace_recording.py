"""Recording traces: every collective of the ledger in the trace, every move a range, and nothing left behind."""

import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import trace_workers
from trace_cases import event, nccl

from distmuon import launch
from distmuon.optim import strategies
from distmuon.sharding.ledger import Ledger
from muonbook.ch14 import recording
from muonbook.ch14.recording import mark, trim
from muonbook.measure import trace
from muonbook.measure.trace_report import clocks_disagree, meetings

MOVES = [*strategies.MOVES, "reduce_scatter", "momentum", "apply", "all_gather"]
CASES = [("synchronous", 2, 2), ("pipelined", 2, 1)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[0])
def recorded(request: pytest.FixtureRequest) -> Any:
    """Return (schedule, what every rank handed over, the merged trace) of a small world."""
    schedule, dp, tp = request.param
    found = launch.run(trace_workers.record, (schedule,), dp=dp, tp=tp)
    return schedule, found, recording.merge([mine for mine, _, _ in found])


def test_the_trace_holds_what_the_ledger_counted(recorded: Any) -> None:
    _, found, merged = recorded
    for rank, (_, ledger, _) in zip(trace.parse(merged), found, strict=True):
        seen = Ledger()
        for collective in rank.collectives:
            assert collective.bytes is not None
            assert collective.group is not None
            assert rank.rank in collective.group
            seen.record(collective.op, collective.name, len(collective.group), collective.bytes, collective.label)
        assert seen.differences(ledger) == []


def test_every_collective_meets_its_peers_on_one_clock(recorded: Any) -> None:
    ranks = trace.parse(recorded[2])
    met = meetings(ranks)
    assert sum(len(m.arrivals) for m in met) == sum(len(rank.collectives) for rank in ranks)
    assert len({m.collective.key for m in met}) == len(met)
    assert all(min(m.waiting.values()) == 0 for m in met)
    assert clocks_disagree(met) < 1  # ms: a profiler's clock is good to microseconds


def test_every_move_is_a_range_on_the_main_thread(recorded: Any) -> None:
    schedule, _, merged = recorded
    layout = trace_workers.TINY.plan(2, len(recorded[1]) // 2)[0]
    for rank in trace.parse(merged):
        calls = Counter(activity.name for activity in rank.ranges)
        assert {calls[move] for move in MOVES} == {trace_workers.STEPS * len(layout.buckets)}
        assert calls["forward_backward"] == calls["norms"] == calls["adamw"] == trace_workers.STEPS
        assert (calls["wait"] > 0) == (schedule != "synchronous")
        assert {activity.lane for activity in rank.ranges} == {"main"}
        assert calls["step 0"] == calls["step 1"] == 1


def test_the_engine_is_as_it_was(recorded: Any) -> None:
    assert [left for _, _, left in recorded[1]] == [[] for _ in recorded[1]]


def test_the_merged_file_is_sorted_small_and_the_same_every_time(recorded: Any, tmp_path: Path) -> None:
    _, found, merged = recorded
    events = [e for e in merged["traceEvents"] if e["ph"] == "X"]
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    assert events[0]["ts"] == 0
    assert {e["cat"] for e in events} == {"cpu_op", "user_annotation"}
    again = recording.merge([mine for mine, _, _ in reversed(found)])
    trace.save(merged, tmp_path / "new" / "a.json.gz")
    trace.save(again, tmp_path / "b.json.gz")
    trace.save(merged, tmp_path / "c.json")
    assert (tmp_path / "new" / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress((tmp_path / "b.json.gz").read_bytes()) == (tmp_path / "c.json").read_bytes()
    assert len(trace.read(tmp_path / "b.json.gz")) == len(found)
    named = [e["args"]["name"] for e in merged["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"]
    assert named[:2] == ["rank 0 (dp 0, tp 0)", f"rank 1 (dp {1 if len(found) == 2 else 0}, tp {len(found) // 4})"]


def test_groups_and_their_ranks_stand_in_the_file_and_at_every_call(recorded: Any) -> None:
    _, found, merged = recorded
    world = merged["distributedInfo"]
    assert world["world_size"] == len(found)
    groups = {(group["pg_desc"], tuple(group["ranks"])) for group in world["pg_config"]}
    over_dp = {(0, 2), (1, 3)} if len(found) == 4 else {(0, 1)}
    assert {ranks for name, ranks in groups if name == "dp"} == over_dp
    calls = [e for e in merged["traceEvents"] if e["name"].startswith("c10d::")]
    executed = [e for e in merged["traceEvents"] if e["ph"] == "X" and e["name"].startswith("gloo:")]
    told = [
        Counter((e["pid"], e["args"]["Label"], e["args"]["Bytes"], *e["args"]["Process Group Ranks"]) for e in some)
        for some in (calls, executed)
    ]
    assert told[0] == told[1]
    assert {(e["args"]["Process Group Description"], tuple(e["args"]["Process Group Ranks"])) for e in calls} == groups


# Which gloo thread works for which group: traces made by hand


def asked(start: float, group: str, size: int, label: str = "x") -> list[Any]:
    name = mark("all_gather", group, 2 * size, label)
    return [
        event("user_annotation", name, start, 1),
        event("cpu_op", "c10d::_allgather_base_", start + 1, 2, **{"Input Dims": [[2 * size], [size], []]}),
    ]


def done(start: float, size: int, tid: int) -> Any:
    return event("user_annotation", "gloo:all_gather", start, 10, tid, **{"Input Dims": [[size]]})


def trimmed(*events: Any) -> list[Any]:
    whole = [event("user_annotation", "step 0", 0, 1000), *events]
    (rank,) = trace.parse(recording.merge([trim({"traceEvents": whole}, 0, "rank 0", {"dp": [0, 2], "tp": [0, 1]})]))
    return [(c.name, c.group, c.sequence, c.label, c.when.lane) for c in rank.collectives]


def test_threads_are_dealt_out_so_that_all_is_explained() -> None:
    found = trimmed(
        *asked(10, "dp", 8, "a"), *asked(20, "tp", 8, "b"), *asked(30, "tp", 6, "c"), *asked(40, "dp", 5, "d"),
        done(25, 8, 71), done(26, 8, 72), done(36, 6, 73), done(46, 5, 72),
    )  # fmt: skip
    assert found == [
        ("tp", (0, 1), 0, "b", "gloo tp: ranks 0, 1"),
        ("dp", (0, 2), 0, "a", "gloo dp: ranks 0, 2"),
        ("tp", (0, 1), 1, "c", "gloo tp: ranks 0, 1"),
        ("dp", (0, 2), 1, "d", "gloo dp: ranks 0, 2"),
    ]


def test_two_threads_that_began_in_the_other_order_are_told_by_size() -> None:
    found = trimmed(*asked(10, "dp", 8, "a"), *asked(20, "dp", 6, "b"), done(30, 6, 71), done(31, 8, 72))
    assert [(sequence, label) for _, _, sequence, label, _ in found] == [(1, "b"), (0, "a")]


def test_what_nobody_asked_for_has_no_group() -> None:
    found = trimmed(done(5, 8, 71), *asked(10, "dp", 8, "a"), done(30, 8, 71), done(50, 9, 71))
    assert [(name, label) for name, _, _, label, _ in found] == [("", ""), ("dp", "a"), ("", "")]


def test_what_began_before_the_first_step_is_left_out() -> None:
    early = event("user_annotation", "gloo:barrier", -50, 20, 71)
    assert trimmed(early, *asked(10, "dp", 8), done(30, 8, 71))[0][2] == 0


def test_a_gpus_work_keeps_its_streams() -> None:
    whole = [
        event("user_annotation", "step 0", 0, 1000, 55, 900),
        event("cpu_op", "aten::mm", 10, 5, 55, 900),
        event("cuda_runtime", "cudaLaunchKernel", 12, 2, 55, 900),
        event("kernel", "gemm", 40, 30, 7, 0),
        nccl(60, 40, 20),
    ]
    (rank,) = trace.parse(recording.merge([trim({"traceEvents": whole}, 1, "rank 1 (dp 1, tp 0)", {"dp": [0, 1]})]))
    assert (rank.rank, rank.device) == (1, "gpu")
    assert [(a.name, a.lane) for a in rank.computation] == [("gemm", "stream 7")]
    assert [(c.group, c.name, c.when.lane) for c in rank.collectives] == [((0, 1), "dp", "stream 20")]


def of_nccl(start: float, group: str, stream: int) -> Any:
    about = {"Process Group Description": group, "Process Group Ranks": "[0, 2]", "Collective name": "_all_gather_base"}
    return event("kernel", "ncclDevKernel_AllGather_RING_LL", start, 10, stream, **about)


def test_nccls_kernels_are_what_each_group_was_asked_for_in_turn() -> None:
    found = trimmed(
        *asked(10, "dp", 8, "a"), *asked(20, "world", 4, "b"), *asked(30, "dp", 6, "c"),
        of_nccl(40, "dp", 20), of_nccl(41, "default_pg", 21), of_nccl(60, "dp", 20), of_nccl(80, "dp", 20),
    )  # fmt: skip
    assert [(name, sequence, label) for name, _, sequence, label, _ in found] == [
        ("dp", 0, "a"), ("world", 0, "b"), ("dp", 1, "c"), ("dp", 2, ""),
    ]  # fmt: skip


def test_gloo_carries_a_gpus_collectives_too() -> None:
    found = trimmed(*asked(10, "dp", 8, "a"), done(25, 8, 71), event("kernel", "gemm", 40, 30, 7, 0))
    assert [(name, label, lane) for name, _, _, label, lane in found] == [("dp", "a", "gloo dp: ranks 0, 2")]


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="record it with"):
        trim({"traceEvents": []}, 0, "rank 0", {})
