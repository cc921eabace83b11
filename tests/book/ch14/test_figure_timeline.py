"""Timelines: every range and collective in its place, hatched as long as it waits, and readable."""

from typing import Any

import pytest
from figure_helpers import assert_readable, boxes, texts
from trace_cases import event, gloo, merged

from muonbook.ch14.figure_timeline import KINDS, describe_timeline, draw_timeline
from muonbook.figures import style
from muonbook.measure.trace import MOVES, parse

LEFT, PANEL = style.MARGIN + 62.0, style.WIDTH - 2 * style.MARGIN - 62.0


def moved(name: str, start: float, dur: float, rank: int) -> Any:
    return event("user_annotation", name, start, dur, 1, rank)


def two_ranks(**more: float) -> Any:
    """Return a step of 100: rank 0 gathers from 20 to 50, rank 1 arrives at 40; then Newton–Schulz."""
    first = [moved("forward_backward", 0, 20, 0), moved("dp_gather", 20, 30, 0), gloo(20, 30, 0, 0)]
    first += [moved("newton_schulz", 50, 40, 0)]
    second = [moved("forward_backward", 0, 40, 1), moved("dp_gather", 40, 10, 1), gloo(40, 10, 1, 0)]
    return parse(merged(first, second))


def extents(figure: Any, gid: str) -> list[tuple[float, float]]:
    """Return (start, end) of what was drawn, in percent of the panel."""
    found = boxes(figure, gid)
    return [
        (round(100 * (b.get_x() - LEFT) / PANEL, 6), round(100 * (b.get_x() + b.get_width() - LEFT) / PANEL, 6))
        for b in found
    ]


def test_ranges_and_collectives_are_where_they_were() -> None:
    figure = draw_timeline({"one": two_ranks()})
    assert extents(figure, "timeline-one-0-forward") == [(0, 20)]
    assert extents(figure, "timeline-one-0-Newton") == [(50, 90)]
    assert extents(figure, "timeline-one-0-waiting") == [(20, 40)]
    assert extents(figure, "timeline-one-0-transfer") == [(40, 50)]
    assert extents(figure, "timeline-one-1-waiting") == []
    assert extents(figure, "timeline-one-1-transfer") == [(40, 50)]
    (waiting,) = boxes(figure, "timeline-one-0-waiting")
    assert waiting.get_hatch()


def test_ranks_have_their_colours() -> None:
    figure = draw_timeline({"one": two_ranks()})
    assert {"rank 0", "rank 1", "one", "0 %", "100 %", "share of the step"} <= set(texts(figure))
    painted = [style.to_hex(patch.get_facecolor()) for patch in figure.axes[0].patches]
    assert {style.dp_colour(rank).lower() for rank in (0, 1)} <= set(painted)


def test_no_colour_of_a_move_is_a_ranks() -> None:
    assert not {colour for colour, _ in KINDS.values()} & set(style.DP_COLOURS)
    assert len({colour for colour, _ in KINDS.values()}) == len(KINDS)


def test_every_move_is_of_one_kind() -> None:
    names = [name for _, moves in KINDS.values() for name in moves]
    assert len(names) == len(set(names))
    assert set(MOVES) <= set(names)


def test_part_of_a_step() -> None:
    figure = draw_timeline({"one": two_ranks()}, within="newton")
    assert extents(figure, "timeline-one-0-Newton") == [(0, 100)]
    assert extents(figure, "timeline-one-0-forward") == []
    assert "share of the part shown" in texts(figure)


def test_of_one_rank_alone_the_others_still_tell_how_long_it_waited() -> None:
    panels = {"one": two_ranks()}
    figure, both = draw_timeline(panels, only=[0]), draw_timeline(panels)
    assert boxes(figure, "timeline-one-1-") == []
    for what in ("waiting", "transfer", "Newton"):
        assert extents(figure, f"timeline-one-0-{what}") == extents(both, f"timeline-one-0-{what}")
    assert extents(figure, "timeline-one-0-waiting")
    assert "rank 1" not in describe_timeline(panels, only=[0])
    assert "rank 0 (dp 0, tp 0) 30% in collectives, 20% waiting" in describe_timeline(panels, only=[0])
    assert_readable(figure)


def test_collectives_at_the_same_time_lie_in_lanes() -> None:
    one = parse(merged([gloo(0, 50, 0, 0, ranks=(0,)), gloo(10, 50, 0, 1, ranks=(0,)), gloo(55, 10, 0, 2, ranks=(0,))]))
    first, second, third = boxes(draw_timeline({"one": one}), "timeline-one-0-transfer")
    assert first.get_y() == third.get_y() < second.get_y()
    assert first.get_y() + first.get_height() <= second.get_y()


def test_what_is_not_known_is_not_drawn_as_waiting() -> None:
    one = parse(merged([gloo(0, 50, 0, 0, ranks=(0, 7))]))
    figure = draw_timeline({"one": one})
    assert extents(figure, "timeline-one-0-unknown") == [(0, 50)]
    assert boxes(figure, "timeline-one-0-waiting") == []


def test_three_panels_can_be_read() -> None:
    panels = {name: two_ranks() for name in ("synchronous", "naive", "pipelined")}
    figure = draw_timeline(panels, title="One step, three schedules", note="Recorded on one machine.")
    assert_readable(figure)


def test_alt_text_has_the_true_numbers() -> None:
    assert describe_timeline({"one": two_ranks()}, title="A step.") == (
        "A step. Shares of the step. one: rank 0 (dp 0, tp 0) 30% in collectives, 20% waiting in them, 40% in "
        "Newton–Schulz; rank 1 (dp 1, tp 0) 10% in collectives, 0% waiting in them, 0% in Newton–Schulz."
    )


@pytest.mark.parametrize(
    ("panels", "options", "message"),
    [
        ({}, {}, "at least one panel"),
        ({"one": two_ranks()}, {"step": 3}, "no range step 3"),
        ({"one": two_ranks()}, {"within": "lunch"}, "no range 'lunch'"),
    ],
)
def test_what_cannot_be_drawn_says_why(panels: Any, options: Any, message: str) -> None:
    for make in (draw_timeline, describe_timeline):
        with pytest.raises(ValueError, match=message):
            make(panels, **options)
