"""The sketch of gathers that share a wire: the sum grows by sharing, the step shrinks by hiding, and both are drawn."""

from itertools import pairwise

import pytest
from figure_helpers import assert_readable, boxes, texts
from matplotlib.figure import Figure

from muonbook.ch14.figure_overlap import (
    BUCKETS,
    COUNTED,
    GATHER,
    SCENES,
    WORK,
    OverlapScene,
    RankAndWire,
    counted,
    frames_of_overlap,
    hidden,
    timed,
)
from muonbook.figures import player, style
from muonbook.figures.player import Frame


@pytest.fixture(scope="module")
def frames() -> list[Frame]:
    return frames_of_overlap()


def widths(figure: Figure, start: str) -> list[float]:
    return [box.get_width() for box in boxes(figure, start)]


def test_gathers_share_the_wire_equally_from_the_moment_they_meet() -> None:
    rank = RankAndWire()
    rank.start(0)
    rank.work(0)  # alone: gather 0 ends with it
    rank.start(1)
    rank.left[1] /= 2  # as if half of it had been sent
    rank.start(2)
    rank.wait(2)
    assert rank.sent == {0: (0, 1), 1: (1, 2), 2: (1, 2.5)}  # 1 gets half for 1; 2 the same, then all for a half


@pytest.mark.parametrize("scene", [*SCENES, OverlapScene(4, True, "", ""), OverlapScene(3, True, "", "")])
def test_nothing_is_lost_nor_done_too_early(scene: OverlapScene) -> None:
    rank = timed(scene)
    assert list(rank.sent) == list(rank.worked) == list(range(BUCKETS))
    assert counted(rank)["communication"] == pytest.approx(BUCKETS * GATHER)  # the wire is never faster, nor idle
    assert all(rank.sent[bucket][1] <= begin for bucket, (begin, _) in rank.worked.items())
    assert all(end - begin == WORK for begin, end in rank.worked.values())
    assert all(before[1] <= after[0] for before, after in pairwise(rank.worked.values()))


def test_sharing_makes_the_sum_grow_and_hiding_the_step_shrink() -> None:
    turns, shared, under = (timed(scene) for scene in SCENES)
    assert counted(turns) == {"communication_sum": 4, "communication": 4, "span": 8}
    assert counted(shared) == counted(turns) | {"communication_sum": 8}
    assert counted(under) == counted(shared) | {"span": 6}
    assert [hidden(rank) for rank in (turns, shared, under)] == [0, 0, 2]
    assert set(COUNTED) == set(counted(turns))


def test_every_frame_can_be_read_and_they_make_a_film(frames: list[Frame]) -> None:
    for scene, frame in zip(SCENES, frames, strict=True):
        style.require_readable(frame.figure, frame.alt)
        assert_readable(frame.figure)
        assert {"wire", "work", scene.head, *COUNTED.values()} <= set(texts(frame.figure))
        assert "no measurement" in frame.alt
    assert player.html("overlap", frames)


def test_a_gather_on_half_of_the_wire_has_the_area_of_one_that_has_it_all(frames: list[Frame]) -> None:
    sent = [box for frame in frames for box in boxes(frame.figure, "gather-")]
    assert len({round(box.get_width() * box.get_height(), 3) for box in sent}) == 1
    zero, one = boxes(frames[1].figure, "gather-0")[0], boxes(frames[1].figure, "gather-1")[0]
    assert one.get_y() == zero.get_y() + zero.get_height()


def test_bars_have_the_length_of_what_they_count(frames: list[Frame]) -> None:
    (unit,) = widths(frames[0].figure, "work-0")
    for scene, frame in zip(SCENES, frames, strict=True):
        for key, value in counted(timed(scene)).items():
            assert widths(frame.figure, f"bar-{COUNTED[key]}") == pytest.approx([unit * value])
        assert widths(frame.figure, "summed-") == pytest.approx(widths(frame.figure, "gather-"))


def test_later_frames_outline_the_bars_of_the_first(frames: list[Frame]) -> None:
    first, *later = (frame.figure for frame in frames)
    assert not boxes(first, "before-")
    for figure in later:
        assert widths(figure, "before-") == widths(first, "bar-")
    assert {"8, was 4", "4", "8"} <= set(texts(later[0]))
    assert {"8, was 4", "4", "6, was 8"} <= set(texts(later[1]))


def test_words_tell_the_same_numbers(frames: list[Frame]) -> None:
    last = frames[-1]
    assert "gather 2 from 2 to 4, gather 3 from 2 to 4, work 0 from 2 to 3, work 1 from 3 to 4" in last.alt
    assert "durations, summed: 8, was 4; the same, as a union: 4; first start to last end: 6, was 8" in last.alt
    assert last.alt.endswith("gathers under work: 2.")
    assert "sum stays 8. But 2 of the wire's 4 now pass under work, and the step takes 6" in last.caption
