"""The table that puts steps that overlap beside each other: ours and the report's, by one definition."""

from typing import Any

import pytest
from figure_helpers import assert_readable, boxes
from trace_cases import event, gloo, merged

from distmuon.optim.overlap import OVERLAPS
from muonbook.ch14 import figure_links, schedule_race, trace_tables
from muonbook.measure import results, trace


def row(total: float, union: float, span: float, computing: float, overlap: float) -> dict[str, Any]:
    values = {"communication_sum": total, "communication": union, "span": span, "computation": computing}
    return {**values, "overlap": overlap, "hideable": union / 2}


def race(**steps: Any) -> dict[str, Any]:
    over = {name: {"median": 0.8, "quartiles": [0.7, 0.9], "count": 3} for name in OVERLAPS}
    return {"recorded": steps, "ratio_to_synchronous": over}


SHORT = race(synchronous=row(4, 4, 8, 4, 0), naive=row(5, 4, 8, 4, 1), pipelined=row(8, 4, 6, 5, 4))
LONG = race(synchronous=row(10, 10, 50, 5, 0), naive=row(5, 4, 8, 4, 1), pipelined=row(20, 10, 40, 5, 4))
STORED: dict[str, Any] = {"links": {"1000": SHORT, "250": LONG}, "loopback": SHORT, "loopback_2x2": SHORT}
STORED |= {"links_asleep": {"1000": LONG, "250": SHORT}, "loopback_asleep": LONG}


def test_links_come_slowest_first_and_one_without_a_limit_last() -> None:
    assert list(trace_tables.on_every_link(STORED)) == ["250 Mbit/s", "1,000 Mbit/s", "no limit"]
    assert list(trace_tables.on_every_link(STORED, asleep=True).values()) == [SHORT, LONG, LONG]
    assert trace_tables.on_every_link({**STORED, "links": {}}) == {"no limit": SHORT}  # where links cannot be limited


def test_every_line_is_a_pipelined_step_over_its_own_synchronous_one() -> None:
    assert trace_tables.reading_lines(STORED, row(10, 10, 50, 40, 0), row(30, 20, 40, 50, 15)) == [
        "summed  union  alone  whole  hidden",
        "  2.00   1.00   0.60   0.80     40%  250 Mbit/s",
        "  2.00   1.00   0.00   0.75    100%  1,000 Mbit/s",
        "  2.00   1.00   0.00   0.75    100%  no limit",
        "  3.00   2.00   0.50   0.80     75%  the report's",
    ]


def test_a_curve_goes_from_little_sending_to_much_with_the_middle_half_around_it() -> None:
    kinds = {"ahead": ("pipelined", False), "rested": ("pipelined", True)}
    curves, bands = trace_tables.gain_curves(STORED, kinds)
    assert curves == dict.fromkeys(kinds, ([0.5, 0.5, 1.0], [0.8] * 3))  # asleep, too, over what the work is awake
    assert bands["rested"] == ([0.5, 0.5, 1.0], (0.7,) * 3, (0.9,) * 3)
    assert trace_tables.gain_lines(STORED)[-1] == "  0.80  0.70 to 0.90    3  pipelined, no limit, sleeping"


def test_in_the_stored_races_more_is_hidden_on_faster_links_and_unions_grow_awake_but_not_asleep() -> None:
    races = trace_tables.on_every_link(results.load("traces"))
    weights = [trace_tables.hideable_over_work(race) for race in races.values()]
    assert weights == sorted(weights, reverse=True)
    steps = [race["recorded"] for race in races.values()]
    hidden = [step["pipelined"]["overlap"] / step["pipelined"]["communication"] for step in steps]
    assert hidden == sorted(hidden)
    asleep = [race["recorded"] for race in trace_tables.on_every_link(results.load("traces"), asleep=True).values()]
    for some, low, high in ((steps, 1.1, 3.0), (asleep, 0.7, 1.15)):
        for step in some[-3:]:
            assert low < step["pipelined"]["communication"] / step["synchronous"]["communication"] < high


def test_a_frame_for_every_link_and_the_report_on_one_scale() -> None:
    frames = figure_links.frames_of_links(STORED, row(10, 10, 50, 40, 0), row(30, 20, 40, 30, 15))
    heads = ["Ours, 250 Mbit/s", "Ours, 1,000 Mbit/s", "Ours, no limit", "The report's GPUs"]
    assert [frame.alt.partition(".")[0] for frame in frames] == heads
    assert frames[-1].caption == "In collectives: 2.00 × as long. The step: 0.80 ×."
    assert frames[0].alt.endswith("pipelined: work 2 %, both 8 %, collectives 12 %, neither 58 %.")
    assert len({tuple(axes.get_xlim()) for frame in frames for axes in frame.figure.axes}) == 1


def test_a_public_trace_has_the_names_of_a_recorded_step_and_the_same_time_with_no_work_beside() -> None:
    for public in results.load("report_traces")["traces"].values():
        renamed = trace_tables.in_ms(public)
        assert not [name for name in renamed if name.endswith("_ms")]
        assert renamed["exposed"] == pytest.approx(renamed["communication"] - renamed["overlap"], abs=2e-3)


def test_four_readings_of_two_runs_are_each_over_the_synchronous_one() -> None:
    before, after = row(10, 10, 50, 40, 0), row(30, 20, 40, 50, 15)
    assert list(trace_tables.readings(before, after).values()) == [3.0, 2.0, 0.5, 0.8]


def test_times_are_those_of_the_part_alone_and_add_up_to_it() -> None:
    def moved(name: str, start: float, dur: float) -> Any:
        return event("user_annotation", name, start, dur, 1, 0)

    moves = [("reduce_scatter", 0, 30), ("momentum", 30, 2), ("dp_gather", 32, 8), ("newton_schulz", 40, 5)]
    (rank,) = trace.parse(merged([*(moved(*move) for move in moves), gloo(10, 25, 0, 0), gloo(33, 6, 0, 0)]))
    parts = ("work", "work under the wire", "wire", "neither")
    assert trace_tables.times(rank, (30, 50)) == dict(zip(parts, (5, 2, 7, 6), strict=True))
    assert trace_tables.times(rank, (31, 42)) == dict(zip(parts, (2, 1, 7, 1), strict=True))


def test_parts_of_a_step_add_up_to_it_and_no_time_is_in_two() -> None:
    assert trace_tables.parts(row(8, 4, 8, 5, 3), 10) == {"work": 20, "both": 30, "collectives": 10, "neither": 20}


def test_what_can_hide_begins_with_muons_first_move() -> None:
    moves = [event("user_annotation", name, start, dur, 1, 0) for name, start, dur in
             (("reduce_scatter", 0, 30_000), ("momentum", 30_000, 2_000))]  # fmt: skip
    (rank,) = trace.parse(merged([*moves, gloo(10_000, 25_000, 0, 0), gloo(33_000, 6_000, 0, 0)]))
    assert schedule_race.hideable(rank) == pytest.approx(9)  # ms: of the first, what it does not share with the second


def test_the_sketch_shortens_by_what_can_hide_and_nothing_besides() -> None:
    races = {"links": {}, "loopback": {**SHORT, "waves": 1}}
    assert trace_tables.sketched(races, "pipelined") == ([0.5], [1.0])  # with one bucket nothing can hide
    many = {**SHORT, "waves": 1000}
    many["recorded"] = {"synchronous": {**row(4, 4, 8, 4, 0), "hideable": 4}}  # wire as long as work, nothing besides
    ((weight,), (ratio,)) = trace_tables.sketched({"links": {}, "loopback": many}, "pipelined")
    assert (weight, ratio) == (1.0, pytest.approx(0.5, abs=0.001))


def test_in_the_stored_races_the_clock_follows_the_sketch_asleep() -> None:
    found = results.load("traces")
    _, sketch = trace_tables.sketched(found, "pipelined")
    curves, _ = trace_tables.gain_curves(found, {"asleep": ("pipelined", True), "awake": ("pipelined", False)})
    far = {name: max(abs(one - other) for one, other in zip(sketch, y, strict=True)) for name, (_, y) in curves.items()}
    assert far["asleep"] < 0.06 < 0.15 < far["awake"]


def public(*sent: tuple[float, float, list[int]]) -> dict[str, Any]:
    return {"timeline": {"work": [[1.0, 3.0], [7.0, 30.0], [35.0, 90.0]], "collectives": [list(one) for one in sent]}}


def test_a_step_of_the_report_begins_with_its_dp_gather_and_ends_where_the_next_one_begins() -> None:
    dp, tp = figure_links.GROUPS.values()
    run = public((0, 1, dp), (10, 12, dp), (20, 26, dp), (20, 22, tp), (40, 41, dp), (42, 43, tp))
    lanes, length = figure_links.one_step(run)
    assert length == 20
    assert lanes == {"work": [(0, 10), (15, 20)], "DP": [(0, 6)], "TP": [(0, 2)]}
    after = public((0, 1, dp), (10, 12, dp), (20, 26, dp), (26, 28, tp), (45, 46, dp))
    figure = figure_links.draw_report(after, run, "Two runs")
    assert_readable(figure)
    scale = {name: boxes(figure, f"{name}-DP")[0].get_width() / 6 for name in ("synchronous", "asynchronous")}
    assert scale["synchronous"] == pytest.approx(scale["asynchronous"])
    told = figure_links.describe_report(after, run, "Two runs")
    assert told == (
        "Two runs. synchronous, 25 ms: DP gather 0.0 to 6.0, TP 6.0 to 8.0; "
        "asynchronous, 20 ms: DP gather 0.0 to 6.0, TP 0.0 to 2.0."
    )
