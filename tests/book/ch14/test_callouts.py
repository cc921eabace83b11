"""Callouts: words over what they name, at no other word, and found in any trace of a step."""

from typing import Any

import numpy as np
import pytest
from figure_helpers import assert_readable, boxes, texts
from trace_cases import event, gloo, merged

from muonbook.ch14 import callouts
from muonbook.ch14.figure_timeline import KINDS, Callout, Window, describe_timeline, draw_timeline, window
from muonbook.figures import style
from muonbook.measure import results, trace

LEFT = style.MARGIN + 62.0
PANEL = style.WIDTH - style.MARGIN - LEFT


def stored(name: str) -> list[trace.RankTrace]:
    return trace.read(results.FOLDER / f"{name}.json.gz")


def moved(name: str, start: float, dur: float, rank: int = 0) -> Any:
    return event("user_annotation", name, start, dur, 1, rank)


def a_step() -> Any:
    """Return a step of Muon with two buckets of which the last has no matrix; rank 1 is late at the gather."""
    found = []
    for rank, late in enumerate((0, 6)):
        moves = [
            ("forward_backward", 0, 20),
            ("Optimizer.step#M", 20, 80),
            ("reduce_scatter", 20, 10),
            ("norms", 30, 5),
        ]
        moves += [("adamw", 35, 1), ("momentum", 36, 4), ("dp_gather", 40, 10), ("newton_schulz", 50, 30)]
        moves += [("apply", 80, 2), ("all_gather", 82, 6), ("momentum", 88, 2), ("all_gather", 92, 8)]
        found.append([*(moved(*move, rank) for move in moves), gloo(40 + late, 9 - late, rank, 0)])
    return trace.parse(merged(*found))


def extents(said: Any) -> dict[str, tuple[float, float]]:
    return {callout.words: (callout.start, callout.end) for callout in said}


def test_parts_of_a_step_are_where_the_moves_were() -> None:
    step = a_step()
    assert extents(callouts.of_adamw(step)) == {
        "forward, backward": (0, 20), "mean gradients": (20, 35), "AdamW": (35, 36), "parameters": (82, 100),
    }  # fmt: skip
    assert extents(callouts.of_muon(step)) == {
        "forward, backward": (0, 20), "mean gradients": (20, 35), "bucket 0": (36, 88),
    }  # fmt: skip


def test_the_first_look_is_at_the_longest_wait_for_momentum_and_the_last_at_the_optimizers_step() -> None:
    meeting, optimizer = callouts.widening(a_step())
    assert optimizer.within == Window(20, 100)
    assert optimizer.callouts == tuple(callouts.of_muon(a_step())[1:])
    assert extents(meeting.callouts) == {"rank 0 waits": (40, 46), "rank 1 has come": (46, 49)}
    assert [callout.rank for callout in meeting.callouts] == [0, 1]
    assert meeting.within.start < 40 < 49 < meeting.within.end
    assert "rank 1 comes" in meeting.caption


def test_a_part_is_found_by_the_name_of_its_range() -> None:
    assert window(a_step(), within=callouts.OPTIMIZER) == Window(20, 100)
    with pytest.raises(ValueError, match="step 0 has no range 'no such'"):
        window(a_step(), within="no such")


def test_words_stand_over_their_bracket_and_in_the_alt_text() -> None:
    panels, said = {"one": a_step()}, {"one": [Callout("here", 40, 60)]}
    figure = draw_timeline(panels, callouts=said)
    (words,) = [text for text in figure.axes[0].texts if text.get_text() == "here"]
    middle = words.get_position()[0] + style.wide("here") / 2
    assert middle == pytest.approx(LEFT + PANEL / 2)
    across = [np.asarray(line.get_xdata(), dtype=float) for line in figure.axes[0].lines]
    (bracket,) = [x for x in across if len(x) == 4]
    assert (bracket - LEFT) / PANEL == pytest.approx([0.4, 0.4, 0.6, 0.6])
    assert "Labelled: here (40% to 60%)." in describe_timeline(panels, callouts=said)


def test_a_callout_of_one_rank_frames_its_strips() -> None:
    figure = draw_timeline({"one": a_step()}, callouts={"one": [Callout("here", 40, 60, 1)]})
    (frame,) = boxes(figure, "callout-here")
    strips = boxes(figure, "timeline-one-1-Newton")[0]
    assert frame.get_y() <= strips.get_y()
    assert strips.get_y() + strips.get_height() < frame.get_y() + frame.get_height()
    assert not frame.get_fill()


@pytest.mark.parametrize("apart", [1, 4, 20, 40])
def test_crowded_callouts_keep_apart(apart: int) -> None:
    said = ("forward, backward", "mean gradients", "AdamW")
    crowded = [Callout(words, n * apart, n * apart + 1) for n, words in enumerate(said)]
    assert_readable(draw_timeline({"one": a_step()}, callouts={"one": crowded}))


@pytest.mark.parametrize("late", [0, 5, 30, 80])
def test_callouts_of_any_step_can_be_read(late: float) -> None:
    """However long the forward pass of one of two steps takes."""
    step = trace.parse(
        merged([moved("step 0", 0, 100 + late), *(moved(n, at + late, 5) for n, at in (("adamw", 40), ("norms", 30))),
                moved("forward_backward", 0, 20 + late), moved("reduce_scatter", 25 + late, 5),
                moved("all_gather", 50 + late, 50)])
    )  # fmt: skip
    panels = {"one": step, "other": a_step()}
    said = {"one": callouts.of_adamw(step), "other": callouts.of_muon(panels["other"])}
    assert_readable(draw_timeline(panels, callouts=said))


def test_pictures_of_one_film_are_of_one_size() -> None:
    step = a_step()
    figures = [
        draw_timeline({"one": step}, within=view.within, callouts={"one": view.callouts}, rows=2, whole_key=True)
        for view in callouts.widening(step)
    ]
    assert len({tuple(figure.get_size_inches()) for figure in figures}) == 1
    first, *others = (KINDS.keys() & set(texts(figure)) for figure in figures)
    assert all(other == first for other in others)


def test_the_chapters_pictures_can_be_read() -> None:
    muon, adamw = stored("step_muon"), stored("step_adamw")
    panels = {"AdamW, ZeRO-1": adamw, "Muon, bucketed": muon}
    said = dict(zip(panels, (callouts.of_adamw(adamw), callouts.of_muon(muon)), strict=True))
    assert_readable(draw_timeline(panels, title="One training step", callouts=said))
    for view in callouts.widening(muon):
        assert_readable(draw_timeline({"m": muon}, within=view.within, callouts={"m": view.callouts}, rows=2))
