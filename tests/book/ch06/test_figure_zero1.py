"""The moving picture of ZeRO-1: its bytes are those of the ring formula, and every frame paints what it says."""

from __future__ import annotations

import pytest
from figure_helpers import assert_readable, texts
from matplotlib.colors import to_hex, to_rgba
from matplotlib.patches import Rectangle

from muonbook.ch06 import small_puzzles
from muonbook.ch06.figures import ALIKE, HIGH, KINDS, SCALE, STEP, frames_of_zero1, sent_bytes
from muonbook.figures.player import Frame
from muonbook.figures.style import dp_colour


@pytest.fixture(scope="module", params=[2, 4])
def told(request: pytest.FixtureRequest) -> tuple[int, list[Frame]]:
    return request.param, frames_of_zero1(request.param)


def coloured(frame: Frame, colour: str) -> float:
    """Return the area that a colour covers on the card."""
    boxes = [box for box in frame.figure.axes[0].patches if isinstance(box, Rectangle)]
    return sum(box.get_width() * box.get_height() for box in boxes if to_hex(box.get_facecolor()) == colour.lower())


def test_kept_and_sent_stand_on_every_card(told: tuple[int, list[Frame]]) -> None:
    D, frames = told
    kept = [small_puzzles.kept_bytes(0 if n < 2 else 1, D) for n in range(len(frames))]
    reduce, gather, all_reduce = sent_bytes(D)
    sent = [0, 0, 0, 0, reduce, reduce, reduce, reduce + gather, reduce + gather]
    for frame, each_kept, each_sent in zip(frames, kept, sent, strict=True):
        lines = [f"A rank keeps {each_kept:g} B per parameter", f"It has sent {each_sent:g} B per parameter"]
        assert texts(frame.figure)[-2:] == lines
        assert all(f"{line}." in frame.alt for line in lines)
    assert f"sends {all_reduce:g}." in frames[-1].caption


def test_what_a_rank_throws_away_is_no_longer_painted(told: tuple[int, list[Frame]]) -> None:
    D, frames = told
    before, after = frames[1], frames[2]
    alike = sum(KINDS.values()) - KINDS["g"]
    assert coloured(after, ALIKE) / coloured(before, ALIKE) == pytest.approx(KINDS["w"] / alike)
    for rank in range(D):
        own = coloured(after, dp_colour(rank)) / coloured(before, dp_colour(rank))
        assert own == pytest.approx(1 + 3 / D), "its gradient, and a shard of master, m and v"


def test_what_is_painted_in_a_rank_adds_up_to_what_it_keeps(told: tuple[int, list[Frame]]) -> None:
    D, frames = told
    for frame in frames:
        boxes = [box for box in frame.figure.axes[0].patches if isinstance(box, Rectangle)]
        filled = [box for box in boxes if to_rgba(box.get_facecolor())[3] and HIGH / D <= box.get_height() <= HIGH]
        for rank in range(D):
            top = min(box.get_y() for box in filled) + rank * STEP
            spans = {(box.get_x(), box.get_width()) for box in filled if top <= box.get_y() < top + HIGH}
            starts = {x for x, _ in spans}
            covered = sum(max(w for x, w in spans if x == start) for start in starts)
            nested = sum(w for x, w in spans if any(a < x and x + w <= a + b + 1e-6 for a, b in spans))
            kept = float(frame.alt.partition("A rank keeps ")[2].split()[0])
            assert (covered - nested) / SCALE == pytest.approx(kept)


def test_a_mean_has_a_stripe_of_every_rank_and_the_gathered_weights_a_part(told: tuple[int, list[Frame]]) -> None:
    D, frames = told
    means, joined = frames[4], frames[7]
    areas = [coloured(means, dp_colour(rank)) for rank in range(D)]
    assert areas == pytest.approx([areas[0]] * D)
    assert coloured(joined, ALIKE) == 0
    assert coloured(frames[6], ALIKE) > 0, "old weights are still there before the all-gather"


def test_every_frame_can_be_read_and_says_something_new(told: tuple[int, list[Frame]]) -> None:
    _, frames = told
    for frame in frames:
        assert_readable(frame.figure)
    assert len({frame.alt for frame in frames}) == len({frame.caption for frame in frames}) == len(frames)
