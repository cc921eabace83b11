"""Timelines and schedules: every span in its place, hatched as long as it waits, and words over what they name."""

import re
from typing import Any

import numpy as np
import pytest
from figure_helpers import boxes, texts
from trace_cases import event, gloo, merged

from muonbook.ch14 import figures
from muonbook.ch14.figures import KINDS, SENT, Window, describe_timeline, draw_timeline, whole_step
from muonbook.figures import style
from muonbook.measure import trace

LEFT, PANEL = style.MARGIN + 62.0, style.WIDTH - 2 * style.MARGIN - 62.0
WHOLE = {"one": Window(0, 100)}


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


def test_every_move_has_a_colour_which_is_no_ranks() -> None:
    names = [name for _, moves in KINDS.values() for name in moves]
    assert len(names) == len(set(names))
    assert set(trace.MOVES) <= set(names)
    assert not {colour for colour, _ in KINDS.values()} & set(style.DP_COLOURS)
    assert len({colour for colour, _ in KINDS.values()}) == len(KINDS)


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


def test_parts_of_a_step_are_where_the_moves_were() -> None:
    step = a_step()
    assert said(figures.of_adamw(step)) == {
        "passes": (0, 20), "gradients": (20, 35), "parameters": (82, 100),
    }  # fmt: skip
    assert said(figures.of_muon(step)) == {
        "passes": (0, 20), "gradients": (20, 35), "bucket 0": (36, 88), "bucket 1": (88, 100),
    }  # fmt: skip


def test_a_gather_is_long_by_one_trace_and_short_by_the_other() -> None:
    blind, seen = figures.frames_of_waiting(a_step())
    assert "Labelled: one all-gather (" in blind.alt
    assert [text for text in texts(blind.figure) if "not opened" in text] == ["its trace is not opened"]
    assert "rank 1's trace is not opened" in blind.alt.replace(" (dp 1, tp 0)", "")
    assert "in collectives, waiting or sending" in blind.alt
    assert not any("not opened" in text for text in (*texts(seen.figure), seen.alt))
    assert "Labelled: rank 0 waits (" in seen.alt
    assert "rank 1 has come (" in seen.alt
    assert blind.caption.startswith("By rank 0's")
    assert seen.caption.startswith("In rank 1's trace")
    parts = {frame: {what: extents(frame.figure, f"timeline-Muon, gather all, bucketed-0-{what}") for what in SENT}
             for frame in (blind, seen)}  # fmt: skip
    assert [what for what, found in parts[blind].items() if found] == ["unknown"]  # one rank cannot tell which
    assert [what for what, found in parts[seen].items() if found] == ["waiting", "transfer"]
    (waited,), (sent,), (unknown,) = parts[seen]["waiting"], parts[seen]["transfer"], parts[blind]["unknown"]
    assert (waited[0], sent[1]) == pytest.approx(unknown)
    assert waited[1] == pytest.approx(sent[0])
    assert tuple(blind.figure.get_size_inches()) == tuple(seen.figure.get_size_inches())


def test_the_gather_that_is_shown_is_the_one_that_made_a_rank_wait_longest() -> None:
    """Not the first one, nor the one that took longest."""
    found = []
    for rank in (0, 1):
        moves = [moved("dp_gather", start, 30, rank) for start in (0, 30, 60)]
        gathers = [gloo(0, 29, rank, 0), gloo(30 + 8 * rank, 9 - 8 * rank, rank, 1), gloo(60, 2, rank, 2)]
        found.append([moved("step 0", 0, 100, rank), *moves, *gathers])
    blind, _ = figures.frames_of_waiting(trace.parse(merged(*found)))
    start, end = map(int, re.findall(r"one all-gather \((-?\d+)% to (\d+)%\)", blind.alt)[0])
    assert (start, end) == (17, 83)  # from 30 to 39, with a quarter of that on either side


def down(figure: Any, gid: str) -> tuple[float, float]:
    """Return from where to where on the card the one box of this name reaches."""
    (one,) = boxes(figure, gid)
    return one.get_y(), one.get_y() + one.get_height()


def test_words_lead_to_the_strips_of_the_rank_that_they_speak_of() -> None:
    """A bracket's sides go down to them, and a frame goes around them and around no other rank's."""
    _, seen = figures.frames_of_waiting(a_step())
    lines = [np.asarray(line.get_xydata()) for line in seen.figure.axes[0].lines]
    for words, rank in (("rank 0 waits", 0), ("rank 1 has come", 1)):
        (frame,) = boxes(seen.figure, f"callout-{words}")
        top, bottom = down(seen.figure, f"callout-{words}")
        strips = [down(seen.figure, f"timeline-Muon, gather all, bucketed-{n}-transfer") for n in (0, 1)]
        inside = [top <= start and end <= bottom for start, end in strips]
        assert inside == [n == rank for n in (0, 1)]
        for side in (frame.get_x(), frame.get_x() + frame.get_width()):
            assert any(np.allclose(line[:, 0], side) and top < line[-1, 1] < bottom for line in lines)


def test_a_stem_stands_on_the_middle_of_its_bracket() -> None:
    step = a_step()
    figure = draw_timeline({"one": step}, WHOLE, callouts={"one": figures.of_adamw(step)})
    lines = [np.asarray(line.get_xydata()) for line in figure.axes[0].lines]
    brackets = [line for line in lines if len(line) == 4]
    assert len(brackets) == 3
    for bracket in brackets:
        middle, high = (bracket[0, 0] + bracket[-1, 0]) / 2, bracket[1, 1]
        assert any(
            np.allclose(line[:, 0], middle) and np.isclose(line[-1, 1], high) for line in lines if len(line) == 2
        )


def test_a_step_of_adamw_and_one_of_muon_are_drawn_on_one_scale() -> None:
    windows = figures.on_one_scale({"a": Window(10, 110), "b": Window(5, 45)})
    assert windows == {"a": Window(10, 110), "b": Window(5, 105)}
    assert whole_step(a_step()) == Window(0, 100)


# ---- Simulated schedules ----------------------------------------------------------------------------------

SCHEDULES = {
    "in turn": [("gather 0", 0.0, 1.0), ("work 0", 1.0, 3.0), ("publish 0", 3.0, 4.0)],
    "at once": [("gather 0", 0.0, 1.0), ("work 0", 0.0, 2.0), ("publish 0", 1.0, 2.0)],
}


def test_schedules_are_told_with_their_shares_of_the_first_and_of_what_is_hidden() -> None:
    told = figures.describe_schedules(SCHEDULES, "Two schedules")
    assert told == (
        "Two schedules. in turn, 100% of the first one's length: 0% of sending under work; "
        "at once, 50% of the first one's length: 100% of sending under work."
    )
