"""Timelines and schedules: every span in its place, hatched as long as it waits, and words over what they name."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from figure_helpers import assert_readable, boxes, texts
from trace_cases import event, gloo, merged

from muonbook.ch14 import figures
from muonbook.ch14.figures import KINDS, SENT, Callout, Window, describe_timeline, draw_timeline, whole_step
from muonbook.figures import style
from muonbook.measure import results, trace

LEFT, PANEL = style.MARGIN + 62.0, style.WIDTH - 2 * style.MARGIN - 62.0
WHOLE = {"one": Window(0, 100)}


def stored(name: str) -> list[trace.RankTrace]:
    return trace.read(results.FOLDER / f"{name}.json.gz")


def moved(name: str, start: float, dur: float, rank: int = 0) -> Any:
    return event("user_annotation", name, start, dur, 1, rank)


def two_ranks() -> Any:
    """Return a step of 100: rank 0 gathers from 20 to 50, rank 1 arrives at 40; then Newton–Schulz."""
    first = [moved("forward_backward", 0, 20), moved("dp_gather", 20, 30), gloo(20, 30, 0, 0)]
    first += [moved("newton_schulz", 50, 40)]
    second = [moved("forward_backward", 0, 40, 1), moved("dp_gather", 40, 10, 1), gloo(40, 10, 1, 0)]
    return trace.parse(merged(first, second))


def a_step() -> Any:
    """Return a step of Muon with two buckets of which the last has no matrix; rank 1 is late at the gather."""
    found = []
    for rank, late in enumerate((0, 6)):
        moves = [("forward_backward", 0, 20), ("reduce_scatter", 20, 10), ("norms", 30, 5)]
        moves += [("adamw", 35, 1), ("momentum", 36, 4), ("dp_gather", 40, 10), ("newton_schulz", 50, 30)]
        moves += [("apply", 80, 2), ("all_gather", 82, 6), ("momentum", 88, 2), ("all_gather", 92, 8)]
        found.append([*(moved(*move, rank) for move in moves), gloo(40 + late, 9 - late, rank, 0)])
    return trace.parse(merged(*found))


def extents(figure: Any, gid: str) -> list[tuple[float, float]]:
    """Return (start, end) of what was drawn, in percent of the panel."""
    ends = [(b.get_x(), b.get_x() + b.get_width()) for b in boxes(figure, gid)]
    return [(round(100 * (start - LEFT) / PANEL, 6), round(100 * (end - LEFT) / PANEL, 6)) for start, end in ends]


def said(callouts: Any) -> dict[str, tuple[float, float]]:
    return {callout.words: (callout.start, callout.end) for callout in callouts}


# ---- Timelines --------------------------------------------------------------------------------------------


def test_ranges_and_collectives_are_where_they_were() -> None:
    figure = draw_timeline({"one": two_ranks()}, WHOLE)
    assert extents(figure, "timeline-one-0-forward") == [(0, 20)]
    assert extents(figure, "timeline-one-0-Newton") == [(50, 90)]
    assert extents(figure, "timeline-one-0-waiting") == [(20, 40)]
    assert extents(figure, "timeline-one-0-transfer") == [(40, 50)]
    assert extents(figure, "timeline-one-1-waiting") == []
    assert extents(figure, "timeline-one-1-transfer") == [(40, 50)]
    (waiting,) = boxes(figure, "timeline-one-0-waiting")
    assert waiting.get_hatch()
    assert {"rank 0", "rank 1", "one", "0 %", "100 %", "share of the 0.1 ms shown"} <= set(texts(figure))
    painted = [style.to_hex(patch.get_facecolor()) for patch in figure.axes[0].patches]
    assert {style.dp_colour(rank).lower() for rank in (0, 1)} <= set(painted)
    assert_readable(figure)


def test_every_move_has_a_colour_which_is_no_ranks() -> None:
    names = [name for _, moves in KINDS.values() for name in moves]
    assert len(names) == len(set(names))
    assert set(trace.MOVES) <= set(names)
    assert not {colour for colour, _ in KINDS.values()} & set(style.DP_COLOURS)
    assert len({colour for colour, _ in KINDS.values()}) == len(KINDS)


def test_a_part_of_a_step_fills_the_panel() -> None:
    figure = draw_timeline({"one": two_ranks()}, {"one": Window(50, 90)})
    assert extents(figure, "timeline-one-0-Newton") == [(0, 100)]
    assert extents(figure, "timeline-one-0-forward") == []


def test_of_one_rank_alone_the_others_still_tell_how_long_it_waited() -> None:
    panels = {"one": two_ranks()}
    figure, both = draw_timeline(panels, WHOLE, only=[0]), draw_timeline(panels, WHOLE)
    assert boxes(figure, "timeline-one-1-") == []
    for what in ("waiting", "transfer", "Newton"):
        assert extents(figure, f"timeline-one-0-{what}") == extents(both, f"timeline-one-0-{what}")
    told = describe_timeline(panels, WHOLE, only=[0])
    assert "rank 1" not in told
    assert "rank 0 (dp 0, tp 0) 30% in collectives, 20% waiting" in told


def test_collectives_at_the_same_time_lie_in_lanes() -> None:
    one = trace.parse(merged([gloo(start, dur, 0, n, ranks=(0,)) for n, (start, dur) in
                              enumerate(((0, 50), (10, 50), (55, 10)))]))  # fmt: skip
    first, second, third = boxes(draw_timeline({"one": one}, WHOLE), "timeline-one-0-transfer")
    assert first.get_y() == third.get_y() < second.get_y()
    assert first.get_y() + first.get_height() <= second.get_y()


def test_what_is_not_known_is_not_drawn_as_waiting() -> None:
    figure = draw_timeline({"one": trace.parse(merged([gloo(0, 50, 0, 0, ranks=(0, 7))]))}, WHOLE)
    assert extents(figure, "timeline-one-0-unknown") == [(0, 50)]
    assert boxes(figure, "timeline-one-0-waiting") == []


def test_alt_text_has_the_true_numbers() -> None:
    assert describe_timeline({"one": two_ranks()}, WHOLE, title="A step.") == (
        "A step. Shares of the part shown. one: rank 0 (dp 0, tp 0) 30% in collectives, 20% waiting in them, 40% in "
        "Newton–Schulz; rank 1 (dp 1, tp 0) 10% in collectives, 0% waiting in them, 0% in Newton–Schulz."
    )


# ---- Words over a timeline --------------------------------------------------------------------------------


def test_words_stand_over_their_bracket_and_in_the_alt_text() -> None:
    panels, callouts = {"one": a_step()}, {"one": [Callout("here", 40, 60)]}
    figure = draw_timeline(panels, WHOLE, callouts=callouts)
    (words,) = [text for text in figure.axes[0].texts if text.get_text() == "here"]
    assert words.get_position()[0] + style.wide("here") / 2 == pytest.approx(LEFT + PANEL / 2)
    across = [np.asarray(line.get_xdata(), dtype=float) for line in figure.axes[0].lines]
    (bracket,) = [x for x in across if len(x) == 4]
    assert (bracket - LEFT) / PANEL == pytest.approx([0.4, 0.4, 0.6, 0.6])
    assert "Labelled: here (40% to 60%)." in describe_timeline(panels, WHOLE, callouts=callouts)


def test_a_callout_of_one_rank_frames_its_strips() -> None:
    figure = draw_timeline({"one": a_step()}, WHOLE, callouts={"one": [Callout("here", 40, 60, 1)]})
    (frame,) = boxes(figure, "callout-here")
    strips = boxes(figure, "timeline-one-1-Newton")[0]
    assert frame.get_y() <= strips.get_y()
    assert strips.get_y() + strips.get_height() < frame.get_y() + frame.get_height()
    assert not frame.get_fill()


@pytest.mark.parametrize("apart", [1, 4, 20, 40])
def test_crowded_callouts_keep_apart(apart: int) -> None:
    words = ("forward, backward", "mean gradients", "AdamW")
    crowded = [Callout(each, n * apart, n * apart + 1) for n, each in enumerate(words)]
    assert_readable(draw_timeline({"one": a_step()}, WHOLE, callouts={"one": crowded}))


def test_parts_of_a_step_are_where_the_moves_were() -> None:
    step = a_step()
    assert said(figures.of_adamw(step)) == {
        "forward, backward": (0, 20), "mean gradients": (20, 35), "AdamW": (35, 36), "parameters": (82, 100),
    }  # fmt: skip
    assert said(figures.of_muon(step)) == {
        "forward, backward": (0, 20), "mean gradients": (20, 35), "bucket 0": (36, 88), "bucket 1": (88, 100),
    }  # fmt: skip


def test_a_gather_is_long_by_one_trace_and_short_by_the_other() -> None:
    blind, seen = figures.frames_of_waiting(a_step())
    assert "Labelled: one all-gather (" in blind.alt
    assert [text for text in texts(blind.figure) if "not opened" in text] == ["its trace is not opened"]
    assert not any("not opened" in text for text in texts(seen.figure))
    assert "Labelled: rank 0 waits (" in seen.alt
    assert "rank 1 has come (" in seen.alt
    assert blind.caption.startswith("By rank 0's")
    assert seen.caption.startswith("By rank 1's")
    what_of = {frame: {(what, rank): boxes(frame.figure, f"timeline-Muon, gather all, bucketed-{rank}-{what}")
                       for what in SENT for rank in (0, 1)} for frame in (blind, seen)}  # fmt: skip
    assert [kind for kind, found in what_of[blind].items() if found] == [("unknown", 0)]  # one rank cannot tell which
    assert not what_of[seen]["unknown", 0]
    (waited,), (unknown,) = what_of[seen]["waiting", 0], what_of[blind]["unknown", 0]
    (early,), (last,) = what_of[seen]["transfer", 0], what_of[seen]["transfer", 1]
    assert waited.get_x() == unknown.get_x()
    assert waited.get_x() + waited.get_width() == pytest.approx(early.get_x()) == pytest.approx(last.get_x())


def test_both_frames_of_the_gather_can_be_read_have_one_size_and_one_key() -> None:
    names = KINDS.keys() | {name for name, *_ in SENT.values()}
    for ranks in (a_step(), stored("step_muon")):
        blind, seen = (frame.figure for frame in figures.frames_of_waiting(ranks))
        assert tuple(blind.get_size_inches()) == tuple(seen.get_size_inches())
        assert names & set(texts(blind)) == names & set(texts(seen))
        for figure in (blind, seen):
            assert_readable(figure)


def test_a_step_of_adamw_stands_over_one_of_muon_on_one_scale() -> None:
    def lasting(rank: trace.RankTrace, end: float) -> trace.RankTrace:
        kept = [each for each in rank.ranges if each.end <= end and each.name != "step 0"]
        whole = rank.ranges[0]._replace(name="step 0", start=0, end=end)
        return replace(rank, ranges=[*kept, whole, whole._replace(name="all_gather", start=end - 1, end=end)])

    short, muon = [lasting(rank, 50) for rank in a_step()], a_step()
    figure, alt = figures.draw_a_step(short, muon, "Two steps")
    for name in ("AdamW, ZeRO-1", "Muon, gather all, bucketed"):  # the same 20 of 100 on both
        (passes,) = boxes(figure, f"timeline-{name}-0-forward and backward")
        assert passes.get_width() == pytest.approx(PANEL * 0.2)
    assert alt.startswith("Two steps")
    assert "bucket 0 (36% to 88%)" in alt
    assert_readable(figures.draw_a_step(stored("step_adamw"), stored("step_muon"), "Two steps")[0])
    windows = figures.on_one_scale({"a": Window(10, 110), "b": Window(5, 45)})
    assert windows == {"a": Window(10, 110), "b": Window(5, 105)}
    assert whole_step(muon) == Window(0, 100)


# ---- Simulated schedules ----------------------------------------------------------------------------------

SCHEDULES = {
    "in turn": [("gather 0", 0.0, 1.0), ("work 0", 1.0, 3.0), ("publish 0", 3.0, 4.0)],
    "at once": [("gather 0", 0.0, 1.0), ("work 0", 0.0, 2.0), ("publish 0", 1.0, 2.0)],
}


def test_schedules_are_drawn_on_one_scale_with_their_shares_of_the_first() -> None:
    figure = figures.draw_schedules(SCHEDULES, "Two schedules")
    assert_readable(figure)
    assert {"in turn", "at once", "100 %", "50 %", "link", "work"} <= set(texts(figure))
    (gather,), (publish,) = boxes(figure, "in turn-gather-0"), boxes(figure, "at once-publish-0")
    assert gather.get_width() == pytest.approx(publish.get_width())
    assert publish.get_x() == pytest.approx(gather.get_x() + gather.get_width())
    (work,) = boxes(figure, "at once-work-0")
    assert work.get_y() > publish.get_y()
    told = figures.describe_schedules(SCHEDULES, "Two schedules")
    assert told == (
        "Two schedules. in turn, 100% of the first one's length: 0% of sending under work; "
        "at once, 50% of the first one's length: 100% of sending under work."
    )
