"""Reading traces: intervals, and hand-made traces whose answers are known."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import worlds
from hypothesis import given
from hypothesis import strategies as some
from trace_cases import event, gloo, kernel, merged, nccl, trace

from distmuon.launch.cli import UsageError
from muonbook.measure import results, trace_report
from muonbook.measure.trace import RankTrace, parse, read
from muonbook.measure.trace_report import (
    clocks_disagree,
    matched_by_name,
    meetings,
    optimizer_times,
    range_times,
    runs,
    summarize,
)
from tools import read_trace

MANY = some.lists(some.tuples(some.integers(0, 30), some.integers(0, 30)), max_size=8)


def moments(found: Any) -> set[int]:
    return {moment for start, end in found for moment in range(int(start), int(end))}


def one(*events: Any) -> RankTrace:
    (found,) = parse(trace(*events))
    return found


# Intervals


@given(MANY, MANY)
def test_intervals_are_sets_of_moments(a: Any, b: Any) -> None:
    assert moments(trace_report.union(a)) == moments(a)
    assert moments(trace_report.intersection(a, b)) == moments(a) & moments(b)
    assert trace_report.length(a) == len(moments(a))
    low, high = trace_report.hull(a)
    assert (low, high) == ((min(moments(a)), max(moments(a)) + 1) if moments(a) else (0, 0))
    for found in (trace_report.union(a), trace_report.intersection(a, b)):
        assert all(start < end for start, end in found)
        assert all(before[1] <= after[0] for before, after in pairwise(found))
    both = trace_report.length(trace_report.intersection(a, b))
    assert trace_report.length([*a, *b]) == trace_report.length(a) + trace_report.length(b) - both


# One rank on a GPU. Times in the events are microseconds, in the report milliseconds.


def test_overlap_on_two_streams() -> None:
    found = summarize(one(kernel("gemm", 0, 4000), nccl(3000, 3000, 20), kernel("add", 8000, 1000)))
    assert found == pytest.approx((1, 3.0, 3.0, 5.0, 1.0, 7.0, 9.0, 2.0))
    assert (found.exposed, found.idle, found.span_without_pause) == pytest.approx((2.0, 2.0, 7.0))


def test_durations_of_collectives_that_run_together_are_not_a_total() -> None:
    found = summarize(one(nccl(0, 4000, 20), nccl(1000, 4000, 21), kernel("gemm", 1000, 2000)))
    assert (found.collectives, found.communication, found.communication_sum, found.overlap) == (2, 5.0, 8.0, 2.0)
    assert found.exposed == 3.0


def test_a_collective_seen_five_times_is_one() -> None:
    found = one(
        event("cpu_op", "c10d::_allgather_base_", 0, 100, "main"),
        event("cpu_op", "record_param_comms", 10, 50, "main"),
        event("user_annotation", "nccl:_all_gather_base", 20, 30, "main"),
        event("gpu_user_annotation", "nccl:_all_gather_base", 500, 3000, 7),
        nccl(500, 3000),
    )
    assert summarize(found)[:4] == pytest.approx((1, 3.0, 3.0, 0.0))
    parts = matched_by_name(found)
    assert [round(time, 3) for _, time in parts] == [3.0, 3.0, 0.1, 0.03]
    assert {name.split(":")[0] for name, _ in parts} == {"kernel", "gpu_user_annotation", "cpu_op", "user_annotation"}


def test_copies_and_memsets_are_work_and_the_hosts_calls_are_not() -> None:
    found = one(
        event("gpu_memcpy", "Memcpy DtoD", 0, 1000, 7),
        event("gpu_memset", "Memset", 1000, 500, 7),
        event("cuda_runtime", "cudaLaunchKernel", 0, 9000, "main"),
        event("gpu_user_annotation", "FWD_BWD", 0, 5000, 7),
    )
    assert summarize(found) == pytest.approx((0, 0, 0, 1.5, 0, 1.5, 1.5, 0))


def test_ranges_on_host_and_gpu_and_nested_ones_once() -> None:
    found = one(
        event("user_annotation", "Muon_Step", 0, 120, "main"),
        event("user_annotation", "Optimizer.step#Muon.step", 10, 100, "main"),
        event("user_annotation", "Optimizer.step#AdamW.step", 20, 30, "main"),
        event("gpu_user_annotation", "Optimizer.step#Muon.step", 500, 8000, 7),
        kernel("gemm", 500, 7000),
        nccl(7600, 500),
    )
    assert optimizer_times(found) == pytest.approx((3, 0.12, 8.0, 7.0))
    times = range_times(found)
    assert times["Muon_Step"] == (1, pytest.approx(0.12), None, None)
    assert times["Optimizer.step#Muon.step"] == pytest.approx((1, 0.1, 8.0, 7.0))


def test_nccl_names_its_group_and_the_place_in_its_queue() -> None:
    found = one(nccl(0, 10), nccl(20, 10, ranks="[0, 2]"), nccl(40, 10))
    assert [(c.group, c.sequence) for c in found.collectives] == [((0, 1), 0), ((0, 2), 0), ((0, 1), 1)]


# One rank on a CPU


def test_on_a_cpu_operators_that_call_a_collective_are_no_computation() -> None:
    found = one(
        event("user_annotation", "dp_gather", 0, 1000),
        event("cpu_op", "aten::linear", 0, 100),
        event("cpu_op", "aten::mm", 10, 80),
        event("cpu_op", "CopyToBackward", 200, 500),
        event("cpu_op", "aten::clone", 210, 20),
        event("cpu_op", "c10d::allreduce_", 240, 10),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 800, 100),
        event("cpu_op", "MmBackward0", 810, 50),
        event("user_annotation", "gloo:all_reduce", 250, 400, tid=9),
        event("cpu_op", "aten::add_", 300, 50, tid=9),
    )
    assert [activity.name for activity in found.computation] == ["aten::linear", "aten::clone", "MmBackward0"]
    assert summarize(found) == pytest.approx((1, 0.4, 0.4, 0.17, 0.0, 0.57, 0.86, 0.16))
    assert found.collectives[0].group is None
    assert meetings([found]) == []


# Several ranks


def test_waiting_ends_when_the_last_rank_arrives() -> None:
    ranks = parse(merged([gloo(10_000, 9_000, 0, 0)], [gloo(15_000, 4_500, 1, 0)]))
    (met,) = meetings(ranks)
    assert met.waiting == pytest.approx({0: 5.0, 1: 0.0})
    assert met.transfer == pytest.approx({0: 4.0, 1: 4.5})
    assert (met.collective.label, met.collective.bytes) == ("momentum, bucket 0", 8)
    assert clocks_disagree([met]) == 0
    assert [rank.place for rank in ranks] == [(0, 0), (1, 0)]


def test_collectives_meet_by_their_place_in_the_groups_queue() -> None:
    first = [gloo(10, 5, 0, 1), gloo(11, 20, 0, 0, tid=3)]  # two threads began them in the other order
    second = [gloo(12, 5, 1, 0), gloo(30, 5, 1, 1)]
    met = meetings(parse(merged(first, second)))
    assert [(m.collective.sequence, m.arrivals) for m in met] == [(1, {0: 10, 1: 30}), (0, {0: 11, 1: 12})]


def test_a_rank_that_leaves_too_early_gives_the_clocks_away() -> None:
    met = meetings(parse(merged([gloo(0, 1_000, 0, 0)], [gloo(3_000, 1_000, 1, 0)])))
    assert clocks_disagree(met) == pytest.approx(2.0)
    assert met[0].waiting == pytest.approx({0: 1.0, 1: 0.0})
    assert met[0].transfer == pytest.approx({0: 0.0, 1: 1.0})


def test_nothing_is_guessed_of_an_incomplete_group() -> None:
    (alone,) = parse(trace(nccl(0, 10)))
    (other,) = parse(trace(nccl(0, 10), nccl(20, 10), rank=1))
    assert meetings([alone]) == []
    assert meetings([alone, other]) == []


def test_files_of_one_run_belong_together() -> None:
    zero, one_, late = (parse(trace(nccl(start, 10), rank=rank))[0] for start, rank in ((0, 0), (5, 1), (5_000, 1)))
    both = parse(merged([gloo(0, 5, 0, 0)], [gloo(0, 5, 1, 0)]))
    assert runs([[zero], both, [one_], [late]]) == [both, [zero, one_], [late]]


# Files, and the command


def write(path: Path, content: Any) -> Path:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


BROKEN = {
    "not JSON": b'{"traceEvents": [',
    "no trace": b'{"events": []}',
    "it has no list": b'{"traceEvents": {}}',
    "malformed event": b'{"traceEvents": [{"ph": "X", "dur": 1, "ts": "soon"}]}',
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_broken_file_is_one_sentence(tmp_path: Path, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        read(write(tmp_path / "t.json", BROKEN[reason]))


def test_half_a_gzipped_file_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace(nccl(0, 10))).encode())[:-9])
    for what in (path, tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            read(what)


def command(*arguments: Any) -> worlds.Ending:
    return worlds.finish(str(worlds.ROOT / "scripts" / "tools"), "read_trace", *map(str, arguments))


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    first = write(tmp_path / "a.json", trace(nccl(0, 3000), kernel("gemm", 3000, 1000)))
    second = write(tmp_path / "b.json.gz", trace(nccl(2000, 1000), rank=1))
    done = command(first, second, "--json", tmp_path / "out.json")
    assert (done.code, done.err) == (0, "")
    assert "dp [0, 1]                1     0       3.00       2.00       1.00" in done.out
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["traces"]["a"]["communication_ms"] == 3.0
    assert found["traces"]["a"]["timeline"] == {"work": [[3.0, 4.0]], "collectives": [[0.0, 3.0, [0, 1]]]}
    assert [rank["waiting_ms"] for rank in found["waiting"][0]["ranks"]] == [2.0, 0.0]
    (run,) = found["runs"]
    assert run["ranks"] == [0, 1]
    assert (run["communication_ms"], run["waiting_ms"], run["transfer_ms"]) == (2.0, 1.0, 1.0)
    assert str(tmp_path) not in json.dumps(found)


def test_the_command_says_that_one_rank_cannot_tell_waiting() -> None:
    alone = [one(nccl(0, 3000))]
    (said,) = read_trace.waiting_lines({0: "a"}, alone)
    assert said.startswith("Waiting, a: not known; one rank's trace cannot tell. The time of a kernel is not waiting")


def test_the_results_file_is_the_public_reports_and_names_no_folder() -> None:
    text = (results.FOLDER / "report_traces.json").read_text()
    found = json.loads(text)
    assert len(found["traces"]) == 10
    assert {run["run"]: run["ranks"] for run in found["runs"]} == {
        "trace_muon_FULLSTEP_dp2_tp2": [0, 1, 2, 3],
        "trace_adamw_FULLSTEP": [0, 1, 2, 3],
    }
    assert "/" not in found["command"]
    assert "/work" not in text
