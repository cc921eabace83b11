"""Chapter 14's worker as its readers run it, the race of schedules, and what its stored results hold."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import stored_pages
import torch
import worlds
from once import once
from PIL import Image
from torch.distributed import distributed_c10d
from trace_cases import event, gloo, merged

from distmuon import launch
from distmuon.optim import strategies
from distmuon.optim.overlap import OVERLAPS, Gathering, NaiveMuon, PipelinedMuon, Publishing, Worked
from distmuon.sharding.collectives import PendingWork
from distmuon.sharding.grid import Grid
from muonbook.ch14 import experiments, recording
from muonbook.measure import coalescing, results, trace, trace_report
from muonbook.measure.workload import Workload
from tools import trace_viewer

WORKER = str(worlds.ROOT / "scripts" / "14_traces.py")
TINY = Workload(width=32, layers=1, heads=2, context=8, bucket_size=4_000)


def test_of_several_recordings_the_quickest_is_kept() -> None:
    steps = [experiments.RecordedStep(merged([event("user_annotation", "step 0", 0, dur)]), []) for dur in (30, 10, 20)]
    assert experiments.quickest(steps) == steps[1]


def test_recorded_steps_hold_every_collective_of_their_ledgers(tmp_path: Path) -> None:
    ending = worlds.finish(WORKER, "--dp", "2", "--tp", "2", "--traces", str(tmp_path / "new"))
    assert (ending.code, ending.err) == (0, "")
    assert "labels and bytes included: True" in ending.out
    for name in ("adamw", "muon"):
        ranks = trace.read(tmp_path / "new" / f"step_{name}.json.gz")
        assert [rank.title for rank in ranks] == [f"rank {2 * d + t} (dp {d}, tp {t})" for d in (0, 1) for t in (0, 1)]
        assert {c.name for rank in ranks for c in rank.collectives} == {"dp", "tp", "world"}
        moves = dict.fromkeys(each.name for each in sorted(ranks[0].ranges, key=lambda each: each.start))
        momentum = ["momentum", *strategies.MOVES, "apply"] if name == "muon" else []
        order = ["reduce_scatter", "norms", "adamw", *momentum, "all_gather"]
        assert [move for move in moves if move in trace.MOVES] == order
        counted = ", ".join(str(trace_report.summarize(rank).collectives) for rank in ranks)
        assert f"collectives by rank: {counted}\n" in ending.out


def test_all_schedules_do_the_same_and_take_more_memory() -> None:
    lines = stored_pages.printed("14_traces", "python ../scripts/14_traces.py --schedules --dp 2 --tp 2").splitlines()
    assert lines[-1].endswith("same bytes: True")
    assert [line.split()[0] for line in lines[1:4]] == list(OVERLAPS)
    synchronous, naive, pipelined = (float(line.split()[-2]) for line in lines[1:4])
    assert synchronous == 1 <= pipelined < naive


def test_with_all_hidden_the_same_is_trained_and_most_gradients_leave_early() -> None:
    lines = stored_pages.printed("14_traces", "python ../scripts/14_traces.py --hiding --dp 2 --tp 2").splitlines()
    assert lines[-1] == "On every rank same parameters, same bytes: True"
    first, *later = (int(count) for count in lines[1].split()[-3:])
    assert first == 0
    assert all(count > 0.6 * int(lines[0].split(",")[1].split()[0]) for count in later)
    assert set(lines[2].split()[-3:]) == {lines[0].split(",")[1].split()[0]}


@pytest.mark.parametrize("key", ["equal", "same bytes"])
def test_a_hiding_that_changes_something_is_said(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    rank = {"buckets": 2, "sent": [0, 1], "arriving": [2, 2], "equal": True, "same bytes": True}
    assert experiments.report_hiding([rank, rank])[0]
    assert not experiments.report_hiding([rank, rank | {key: False}])[0]
    assert capsys.readouterr().out.count("same bytes: True") == 1


def gathered_twice(world: launch.World) -> Any:
    """Return when a group's second gather ran beside its first, both started at once; None on other ranks than 0."""
    with experiments.one_at_a_time():
        grid = Grid.of(world)
    shards = [torch.ones(1 << 20) for _ in range(2)]

    def step() -> None:
        with grid.dp.async_collectives() as pending:
            for shard in shards:
                grid.dp.all_gather(shard, "a shard")
        pending.wait()

    step()
    ranks = world.gather(recording.record(world, step, 1, grid))
    if ranks is None:
        return None
    first, second = (c.when.interval for c in trace.parse(recording.merge(ranks))[0].collectives)
    return trace_report.intersection([first], [second])


def naps(world: launch.World) -> Any:
    """Return whether a schedule asleep kept its matrices, how many waves naps were timed for, and how often."""
    models = {name: experiments.ScheduledModel(TINY, Grid.of(world), name) for name in OVERLAPS}
    experiments.simulate(models)
    strategy = models["naive"].optimizer.strategy
    asleep: Any = strategy.newton_schulz
    taken = asleep.__self__.taken
    matrices = dict.fromkeys(next(iter(taken)), torch.ones(2, 3))
    kept = all(asleep(matrices)[index] is matrix for index, matrix in matrices.items())
    return kept, len(taken) == len(strategy.bucket_groups()), {*map(len, taken.values())}


def race_all(world: launch.World) -> dict[str, Any]:
    """Race everything once, in one world."""
    return {
        "awake": experiments.race_schedules(world, TINY, 2, 1),
        "asleep": experiments.race_schedules(world, TINY, 2, 1, asleep=True),
        "hiding": experiments.race_hiding(world, replace(TINY, sequences=2), 2),
        "naps": naps(world),
        "overlap": gathered_twice(world),
    }


@once
def raced() -> dict[str, Any]:
    found, other = launch.run(race_all, dp=2)
    assert (other["awake"], other["asleep"], other["hiding"]) == (None, None, None)
    assert found["naps"] == other["naps"]
    return found


def test_a_race_ends_with_equal_parameters_and_says_what_was_recorded() -> None:
    found = raced()["awake"]
    assert found["equal_parameters"]
    assert found["waves"] > 2
    assert found["ratio_to_synchronous"]["synchronous"] == {"median": 1, "quartiles": [1, 1], "count": 2}
    for name in OVERLAPS:
        row = found["recorded"][name]
        assert row["collectives"] == found["recorded"]["synchronous"]["collectives"] > 2 * found["waves"]
        assert 0 < row["communication"] <= row["communication_sum"] + 1e-3
        assert row["overlap"] <= min(row["communication"], row["computation"]) + 1e-3
        assert trace.parse(found["traces"][name])[1].rank == 1


def test_one_lane_takes_one_collective_after_the_other() -> None:
    assert raced()["overlap"] == []
    assert torch.distributed.ProcessGroupGloo is distributed_c10d.ProcessGroupGloo  # as before


def test_asleep_every_schedule_makes_the_same_calls_and_sleeps_as_long_as_a_synchronous_step_works() -> None:
    assert raced()["naps"] == (True, True, {experiments.TRIALS})
    found, awake = raced()["asleep"], raced()["awake"]
    assert found["equal_parameters"]
    for name in OVERLAPS:
        assert found["recorded"][name]["collectives"] == awake["recorded"][name]["collectives"]
        shown = trace.parse(found["traces"][name])
        assert {a.name for rank in shown for a in rank.ranges} >= {"momentum", "newton_schulz", "apply"}
        naps = [a.interval for a in shown[0].ranges if a.name == "newton_schulz"]
        assert not trace_report.intersection(naps, [a.interval for a in shown[0].computation])


def test_steps_that_hide_take_turns_with_those_that_do_not_and_end_alike() -> None:
    found = raced()["hiding"]
    assert found["equal_parameters"]
    assert {name: row["nothing"]["median"] for name, row in found["ratio_to_nothing_hidden"].items()} == {
        "adamw": 1, "muon": 1,
    }  # fmt: skip


def test_models_that_differ_in_one_bit_are_not_alike() -> None:
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    other.load_state_dict(one.state_dict())
    assert experiments.alike(one, other)
    with torch.no_grad():
        other.bias[0] = torch.nextafter(other.bias[0], torch.tensor(math.inf))
    assert not experiments.alike(one, other)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dp", "1", "--tp", "1"], "one rank sends nothing; choose 2 or more"),
        (["--dp", "1", "--tp", "3"], "--tp 3 does not divide the model's 8 heads"),
        (["--traces", "/proc/nowhere"], "--traces /proc/nowhere/step_adamw.json.gz: cannot be written"),
    ],
)
def test_what_does_not_fit_is_answered_in_a_sentence(arguments: list[str], words: str) -> None:
    ending = worlds.answer(WORKER, *arguments)
    assert ending.code == 2
    assert words in ending.err


def test_the_stored_races_hold_what_the_chapter_reads() -> None:
    found, hiding = results.load("traces"), results.load("hiding")["links"]
    kinds = ("", "_asleep")
    alone = [race for kind in kinds for race in (*found[f"links{kind}"].values(), found[f"loopback{kind}"])]
    assert len(alone) == 12
    for race in (*alone, found["loopback_2x2"]):
        assert race["equal_parameters"]
        assert race["waves"] >= 6
        assert race["ratio_to_synchronous"].keys() == OVERLAPS.keys()
    assert all(race["recorded"].keys() == OVERLAPS.keys() for race in alone)
    assert list(hiding) == ["500 Mbit/s", "1,000 Mbit/s", "2,000 Mbit/s", "4,000 Mbit/s", "no limit"]
    assert all(race["equal_parameters"] for race in hiding.values())
    for race in found["links"].values():  # on a limited link the rest of a step is mostly the reduction of gradients
        step = race["recorded"]["synchronous"]
        rest = step["span"] - step["computation"] - step["hideable"]
        assert (step["communication"] - step["hideable"]) / rest > 0.5


STORED = [
    *(f"step_{name}" for name in experiments.MAKERS),
    *(f"schedule_{name}{how}" for name in OVERLAPS for how in ("", "_asleep")),
]


@pytest.mark.parametrize("name", STORED)
def test_the_stored_traces_are_small_and_name_ranks_and_groups_wherever_a_reader_may_click(name: str) -> None:
    file = results.FOLDER / f"{name}.json.gz"
    assert file.stat().st_size < 300_000
    found = trace.load(file)
    whole = trace.parse(found)
    assert len(whole) == (4 if name.startswith("step") else 2)
    assert len(trace_report.meetings(whole)) > 10
    groups = {(group["pg_desc"], tuple(group["ranks"])) for group in found["distributedInfo"]["pg_config"]}
    clicked = [e for e in found["traceEvents"] if e["ph"] == "X" and e["name"].startswith(("gloo:", "c10d::"))]
    assert len(clicked) > 40
    for one in clicked:
        ranks = tuple(one["args"]["Process Group Ranks"])
        assert (one["args"]["Process Group Description"], ranks) in groups
        assert one["pid"] in ranks
        assert one["args"]["Bytes"] > 0
        assert one["args"]["Label"]


# ---- What the page computes, and what its sentences say ----------------------------------------------------


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Return what cells of the page define: schedules, `divide`, `union_length`."""
    wanted = ("def divide", "def union_length", "class Model", "def synchronous", "def naive", "def pipelined")
    found: dict[str, Any] = {}
    for cell in stored_pages.every_cell("14_traces"):
        if cell.kind == "code" and cell.source.startswith(wanted):
            exec(cell.source, found)
    return found


def shown(beginning: str) -> list[str]:
    """Return the lines that the page's cell with this line of code prints."""
    return stored_pages.cell_with("14_traces", beginning).printed.splitlines()


class Noting:
    """Moves no bucket group, and notes in which order a schedule would."""

    returns_late = False  # as with gather_all

    def __init__(self) -> None:
        self.noted: list[str] = []

    def step_adamw(self) -> None:
        pass

    def start(self, buckets: Any) -> Gathering:
        self.noted.append(f"gather {buckets}")
        return Gathering(buckets, {}, PendingWork())

    def work(self, gathering: Gathering) -> Worked:
        self.noted.append(f"work {gathering.buckets}")
        return Worked(gathering.buckets, {}, PendingWork())

    def start_publication(self, worked: Worked) -> Publishing:
        self.noted.append(f"publish {worked.buckets}")
        return Publishing({}, PendingWork())

    def take(self, publishing: Publishing) -> None:
        pass


class NotingNaive(Noting, NaiveMuon):
    pass


class NotingPipelined(Noting, PipelinedMuon):
    pass


@pytest.mark.parametrize(("name", "noting"), [("naive", NotingNaive), ("pipelined", NotingPipelined)])
def test_the_pages_schedules_start_everything_in_the_order_of_the_engines(
    page: dict[str, Any], name: str, noting: type[Noting]
) -> None:
    assert issubclass(noting, OVERLAPS[name])
    real: Any = noting()
    real.make_moves(range(4))
    toy = page["simulate"](page[name], buckets=4, gather=0.5, work=1.0, publish=0.5)
    assert [what for what, _, _ in toy.spans] == real.noted


def test_the_pages_division_and_union_are_those_of_the_tools(page: dict[str, Any]) -> None:
    for name in ("step_muon", "schedule_pipelined"):
        ranks = trace.read(results.FOLDER / f"{name}.json.gz")
        for met in trace_report.meetings(ranks):
            parts = page["divide"](met.arrivals, met.ends)
            assert {rank: waiting for rank, (waiting, _) in parts.items()} == {
                rank: pytest.approx(waiting / trace_report.MS) for rank, waiting in met.waiting.items()
            }
        for rank in ranks:
            spans = [c.when.interval for c in rank.collectives]
            assert page["union_length"](spans) == pytest.approx(trace_report.length(spans))


def test_a_rank_of_the_recorded_step_is_in_collectives_for_almost_half_of_it() -> None:
    summary = trace_report.summarize(trace.read(results.FOLDER / "step_muon.json.gz")[0])
    assert 0.4 < summary.communication / summary.span < 0.5


def test_asleep_the_clock_follows_the_model_and_at_work_it_does_not() -> None:
    rows = [[float(cell) for cell in line.split()[-6:]] for line in shown("experiments.stored_races()")[2:]]
    assert len(rows) == 6
    assert rows[-1][0] == 0.24  # without a limit: "a quarter of the time of the work"
    rows = [row[1:] for row in rows]
    assert all(abs(model - asleep) < 0.06 for model, asleep, *_ in rows)
    assert all(row[3] >= 0.99 for row in rows)
    assert rows[2][0] == 0.82
    at_work = [row[2] for row in rows]
    assert at_work[2] == 0.83 == min(at_work)  # at 1,000 Mbit/s
    assert at_work[2:] == sorted(at_work[2:])
    assert all(row[2] - row[0] > 0.15 for row in rows[3:])
    assert min(row[4] for row in rows) == 0.89
    assert rows[-1][4] < 1 < rows[-1][2]  # without a limit


def test_over_dp_a_bucket_always_wins_and_over_tp_where_matrices_are_small() -> None:
    rows = {line.split()[0]: [float(cell) for cell in line.split()[1:]] for line in shown("for width, over_dp in")[2:]}
    assert all(over_dp < 0.55 for over_dp, *_ in rows.values())
    assert all(max(over_tp) < 0.6 for width, (_, *over_tp) in rows.items() if int(width) <= 256)
    assert all(min(over_tp) > 1 for width, (_, *over_tp) in rows.items() if int(width) >= 512)


def race_gathers(world: launch.World, wrong: bool) -> Any:
    """Race gathers of one width, in this process, whose way over DP may be wrong; return what is found or said."""
    zeros = dict.fromkeys(range(experiments.MATRICES), torch.zeros(64))
    by_piece = (lambda *_: zeros) if wrong else coalescing.by_piece
    with mock.patch.object(experiments, "WIDTHS", (8,)), mock.patch.object(coalescing, "by_piece", by_piece):
        try:
            return experiments.race_gathers(world, 2)
        except ValueError as error:
            return str(error)


def test_gathers_are_raced_and_wrong_ones_refused() -> None:
    over_tp, _ = launch.run(race_gathers, (False,), tp=2)
    assert {name: [*rows] for name, rows in over_tp.items()} == {"rows": ["8"], "columns": ["8"]}
    assert over_tp["rows"]["8"]["count"] == 2
    assert launch.run(race_gathers, (True,), dp=2) == ["shards of 8 x 8: the gathered matrices are wrong."] * 2


def test_in_the_gap_of_the_screenshot_the_other_ranks_have_the_two_cores() -> None:
    found = trace.load(results.FOLDER / "step_muon.json.gz")
    assert found["machine"]["cores"] == 2
    spans = sorted((one for one in found["traceEvents"] if one["ph"] == "X"), key=lambda one: one["ts"])

    def all_of(rank: int, name: str) -> list[tuple[float, float]]:
        named = (one for one in spans if (one["pid"], one["name"]) == (rank, name))
        return [(one["ts"], one["ts"] + one["dur"]) for one in named]

    def second(rank: int, name: str) -> float:
        """Return when the second span of this name begins within the rank's first tp_gather."""
        (start, end), *_ = all_of(rank, "tp_gather")
        return [begins for begins, _ in all_of(rank, name) if start < begins < end][1]

    gap = second(0, "c10d::_allgather_base_"), second(0, "gloo:all_gather")
    assert gap[1] - gap[0] > 3000  # microseconds
    assert second(1, "gloo:all_gather") > gap[1]
    for rank in (2, 3):
        busy = trace_report.intersection([gap], all_of(rank, "newton_schulz")[:1])
        assert trace_report.length(busy) / (gap[1] - gap[0]) > 0.8


def test_the_screenshot_is_one_of_the_stored_trace() -> None:
    rank = trace.read(results.FOLDER / "step_muon.json.gz")[0]
    with Image.open(trace_viewer.PICTURE) as picture:
        assert picture.info["Description"] == trace_viewer.described(rank, *trace_viewer.first_bucket(rank))
    assert "2 over DP and 5 over TP" in picture.info["Description"]
    assert trace_viewer.PICTURE.stat().st_size < 200_000


def test_what_can_hide_begins_with_muons_first_move() -> None:
    moves = [event("user_annotation", name, start, dur, 1, 0) for name, start, dur in
             (("reduce_scatter", 0, 30_000), ("momentum", 30_000, 2_000))]  # fmt: skip
    (rank,) = trace.parse(merged([*moves, gloo(10_000, 25_000, 0, 0), gloo(33_000, 6_000, 0, 0)]))
    assert experiments.hideable(rank) == pytest.approx(9)  # ms: of the first, what it does not share with the second


def test_what_the_page_says_of_steps_that_overlap_stands_in_its_table() -> None:
    rows = {line[:24].strip(): line[24:].split() for line in shown('hiding = results.load("hiding")')[2:]}
    assert (rows["2,000 Mbit/s"][1], rows["2,000 Mbit/s"][3]) == ("0.86", "0.79")
    assert rows["no limit"][1] == rows["no limit"][3] == "1.00"
    assert rows["no limit"][2] == "1.07"
    stored = results.load("hiding")["links"]["2,000 Mbit/s"]["ratio_to_nothing_hidden"]
    gains = {name: found["gradients"]["median"] - found["both"]["median"] for name, found in stored.items()}
    assert gains["muon"] > 5 * gains["adamw"]  # by late parameters
    assert stored["muon"]["both"]["quartiles"][1] < 0.9


def test_the_reports_run_gathers_over_tp_before_the_dp_gather_has_ended_in_every_asynchronous_step() -> None:
    """And so does its work begin: chapter and claims say that it seems to use what has not arrived."""
    found = results.load("report_traces")
    before, after = (found["traces"][f"trace_muon_FULLSTEP_dp2_tp2{run}_rank0"] for run in ("", "_async"))
    ratios = [after[key] / before[key] for key in ("communication_sum_ms", "communication_ms", "exposed_ms", "span_ms")]
    assert [f"{ratio:.2f}" for ratio in ratios] == ["2.12", "1.74", "0.39", "0.90"]
    sent = {group: [each[:2] for each in after["timeline"]["collectives"] if each[2] == list(group)]
            for group in ((0, 2), (0, 1))}  # fmt: skip
    assert [len(gathers) for gathers in sent.values()] == [5, 5]
    longer = {name: [round(sum(end - start for start, end, ranks in run["timeline"]["collectives"] if ranks == group))
                     for run in (before, after)] for name, group in (("dp", [0, 2]), ("tp", [0, 1]))}  # fmt: skip
    assert longer == {"dp": [43, 119], "tp": [26, 27]}  # ms: the page says that only those over DP last longer
    assert after["overlap_ms"] > after["communication_ms"] / 2
    for (dp_begin, dp_end), (tp_begin, tp_end) in zip(*sent.values(), strict=True):
        worked = min(start for start, _ in after["timeline"]["work"] if start > dp_begin)
        assert abs(tp_begin - dp_begin) < 0.05
        assert tp_end <= worked + 0.2 < dp_end
