"""Callouts: words over what they name, at no other word, and found in any trace of a step."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from figure_helpers import assert_readable, boxes, texts
from trace_cases import event, gloo, merged

from distmuon.optim.overlap import OVERLAPS
from muonbook.ch14 import annotations
from muonbook.ch14.figure_timeline import KINDS, SENT, Callout, Window, describe_timeline, draw_timeline, window
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


def moved_to(rank: trace.RankTrace, name: str, start: float, end: float) -> trace.Activity:
    return rank.ranges[0]._replace(name=name, start=start, end=end)


def extents(said: Any) -> dict[str, tuple[float, float]]:
    return {callout.words: (callout.start, callout.end) for callout in said}


def test_parts_of_a_step_are_where_the_moves_were() -> None:
    step = a_step()
    assert extents(annotations.of_adamw(step)) == {
        "forward, backward": (0, 20), "mean gradients": (20, 35), "AdamW": (35, 36), "parameters": (82, 100),
    }  # fmt: skip
    assert extents(annotations.of_muon(step)) == {
        "forward, backward": (0, 20), "mean gradients": (20, 35), "bucket 0": (36, 88), "bucket 1": (88, 100),
    }  # fmt: skip


def test_a_gather_is_long_by_one_trace_and_short_by_the_other() -> None:
    blind, seen = annotations.frames_of_waiting(a_step())
    assert "Labelled: one all-gather (" in blind.alt
    assert "Labelled: rank 0 waits (" in seen.alt
    assert "rank 1 has come (" in seen.alt
    assert blind.caption.startswith("By rank 0's")
    assert seen.caption.startswith("By rank 1's")
    what_of = {frame: {(what, rank): boxes(frame.figure, f"timeline-Muon, bucketed-{rank}-{what}")
                       for what in SENT for rank in (0, 1)} for frame in (blind, seen)}  # fmt: skip
    assert [kind for kind, found in what_of[blind].items() if found] == [("unknown", 0)]  # one rank cannot tell which
    assert not what_of[seen]["unknown", 0]
    (waited,), (unknown,) = what_of[seen]["waiting", 0], what_of[blind]["unknown", 0]
    (early,), (last,) = what_of[seen]["transfer", 0], what_of[seen]["transfer", 1]
    assert waited.get_x() == unknown.get_x()
    assert waited.get_x() + waited.get_width() == pytest.approx(early.get_x()) == pytest.approx(last.get_x())
    for frame in (blind, seen):
        assert_readable(frame.figure)


def test_a_part_is_found_by_the_name_of_its_range() -> None:
    assert window(a_step(), within="Optimizer.step") == Window(20, 100)
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
    said = {"one": annotations.of_adamw(step), "other": annotations.of_muon(panels["other"])}
    assert_readable(draw_timeline(panels, callouts=said))


def test_frames_of_one_film_are_of_one_size_and_have_one_key() -> None:
    figures = [frame.figure for frame in annotations.frames_of_waiting(a_step())]
    assert len({tuple(figure.get_size_inches()) for figure in figures}) == 1
    names = KINDS.keys() | {name for name, *_ in SENT.values()}
    blind, seen = (names & set(texts(figure)) for figure in figures)
    assert blind == seen


def test_the_chapters_pictures_can_be_read() -> None:
    muon, adamw = stored("step_muon"), stored("step_adamw")
    panels = {"AdamW, ZeRO-1": adamw, "Muon, bucketed": muon}
    said = dict(zip(panels, (annotations.of_adamw(adamw), annotations.of_muon(muon)), strict=True))
    assert_readable(draw_timeline(panels, title="One training step", callouts=said))
    for frame in annotations.frames_of_waiting(muon):
        assert_readable(frame.figure)


def test_a_step_of_adamw_stands_over_one_of_muon_on_one_scale() -> None:
    short = [replace(rank, ranges=[a for a in rank.ranges if a.end <= 36]) for rank in a_step()]  # without Muon's moves
    short = [replace(rank, ranges=[*rank.ranges, moved_to(rank, "all_gather", 36, 50), moved_to(rank, "step 0", 0, 50)])
             for rank in short]  # fmt: skip
    muon = [replace(rank, ranges=[*rank.ranges, moved_to(rank, "step 0", 0, 100)]) for rank in a_step()]
    figure, alt = annotations.draw_a_step(short, muon, "Two steps")
    for name in ("AdamW, ZeRO-1", "Muon, bucketed"):  # the same 20 of 100 on both
        (passes,) = boxes(figure, f"timeline-{name}-0-forward and backward")
        assert passes.get_width() == pytest.approx(PANEL * 0.2)
    assert alt.startswith("Two steps")
    assert "bucket 0 (36% to 88%)" in alt
    assert_readable(annotations.draw_a_step(stored("step_adamw"), stored("step_muon"), "Two steps")[0])


def test_a_scale_is_as_long_as_the_longest_part_and_begins_where_each_does() -> None:
    windows = annotations.on_one_scale({"a": Window(10, 110), "b": Window(5, 45)})
    assert windows == {"a": Window(10, 110), "b": Window(5, 105)}


def test_after_the_gradients_comes_what_muon_does() -> None:
    ranks = [replace(rank, ranges=[*rank.ranges, moved_to(rank, "step 0", 0, 100)]) for rank in a_step()]
    assert annotations.after_the_gradients(ranks[0]) == Window(36, 100)


def test_schedules_appear_one_below_the_other_on_one_scale() -> None:
    runs = {name: stored(f"schedule_{name}") for name in OVERLAPS}
    frames = annotations.frames_of_schedules(runs, "Recorded", "Rank 0.")
    assert len({tuple(frame.figure.get_size_inches()) for frame in frames}) == 1
    for n, frame in enumerate(frames, 1):
        assert_readable(frame.figure)
        drawn = [run for run in runs if boxes(frame.figure, f"timeline-{run}-0-Newton–Schulz")]
        assert drawn == list(runs)[:n]
        assert all((run in frame.alt) == (run in drawn) for run in runs)
    works = boxes(frames[-1].figure, "timeline-pipelined-0-Newton–Schulz")
    said = extents(annotations.of_schedules(runs)["naive"])
    assert said["gathers"][1] == said["work"][0] < said["work"][1] == said["publish"][0]
    assert len(works) > 10  # a bucket each
