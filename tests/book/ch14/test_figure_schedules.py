"""The sketch of three schedules: blocks where the schedules' own order puts them, and a picture that can be read."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from figure_helpers import assert_readable, boxes, texts

from distmuon.optim.overlap import OVERLAPS, Gathering, NaiveMuon, OverlappedMuon, PipelinedMuon, Publishing, Worked
from distmuon.sharding.collectives import PendingWork
from muonbook.ch14.figure_schedules import (
    BUCKETS,
    DURATIONS,
    LANES,
    blocks,
    describe_schedules,
    draw_schedules,
    length,
)
from muonbook.figures import style


class Noting:
    """Moves no bucket group, and notes in which order a schedule would."""

    returns_late = False  # as with gather_all

    def __init__(self) -> None:
        self.noted: list[tuple[str, Any]] = []

    def step_adamw(self) -> None:
        pass

    def start(self, buckets: Any) -> Gathering:
        self.noted.append(("gather", buckets))
        return Gathering(buckets, {}, PendingWork())

    def work(self, gathering: Gathering) -> Worked:
        self.noted.append(("work", gathering.buckets))
        return Worked(gathering.buckets, {}, PendingWork())

    def start_publication(self, worked: Worked) -> Publishing:
        self.noted.append(("parameters", worked.buckets))
        return Publishing({}, PendingWork())

    def take(self, publishing: Publishing) -> None:
        pass


class NotingNaive(Noting, NaiveMuon):
    pass


class NotingPipelined(Noting, PipelinedMuon):
    pass


@pytest.mark.parametrize(("name", "noting"), [("naive", NotingNaive), ("pipelined", NotingPipelined)])
def test_everything_is_started_in_the_order_of_the_real_schedule(name: str, noting: type[OverlappedMuon]) -> None:
    assert issubclass(noting, OVERLAPS[name])
    real: Any = noting()
    real.make_moves(range(BUCKETS))
    assert [(block.kind, block.bucket) for block in blocks(name)] == real.noted


@pytest.mark.parametrize("name", OVERLAPS)
def test_a_lane_does_one_thing_at_a_time_and_nothing_before_what_it_needs(name: str) -> None:
    for lane in ("wire", "work"):
        mine = [block for block in blocks(name) if LANES[block.kind] == lane]
        assert all(first.end <= second.start for first, second in pairwise(mine))
    found = {(block.kind, block.bucket): block for block in blocks(name)}
    for n in range(BUCKETS):
        assert found["gather", n].end <= found["work", n].start
        assert found["work", n].end <= found["parameters", n].start


def test_all_schedules_do_the_same() -> None:
    expected = Counter((kind, n, DURATIONS[kind]) for kind in DURATIONS for n in range(BUCKETS))
    for name in OVERLAPS:
        assert Counter((b.kind, b.bucket, b.end - b.start) for b in blocks(name)) == expected, name
    assert DURATIONS["gather"] == DURATIONS["parameters"] == DURATIONS["work"] / 2  # as the note says


def test_only_the_pipeline_hides_the_wire() -> None:
    assert BUCKETS == 4  # as the note says
    assert length("synchronous") == length("naive") == 8.0
    assert length("pipelined") == 5.0  # gather 0, four works, parameters 3
    wire = [(b.kind[0], b.bucket, b.start) for b in blocks("pipelined") if LANES[b.kind] == "wire"]
    assert wire == [("g", 0, 0), ("g", 1, 0.5), ("p", 0, 1.5), ("g", 2, 2), ("p", 1, 2.5), ("g", 3, 3), ("p", 2, 3.5),
                    ("p", 3, 4.5)]  # fmt: skip


def test_a_schedule_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="synchronous, naive, pipelined; not 'lazy'"):
        blocks("lazy")


def test_the_picture_shows_it() -> None:
    figure, alt = draw_schedules("Three schedules"), describe_schedules("Three schedules")
    style.require_readable(figure, alt)
    assert_readable(figure)
    assert Counter(texts(figure)) >= Counter(
        {"wire": 3, "work": 3, "100 %": 2, "62 %": 1, **dict.fromkeys(OVERLAPS, 1)}
    )
    ends = {name: max(b.get_x() + b.get_width() for b in boxes(figure, f"{name}-")) for name in OVERLAPS}
    left = min(b.get_x() for b in boxes(figure, "pipelined-"))
    assert (ends["pipelined"] - left) / (ends["synchronous"] - left) == pytest.approx(5 / 8)
    assert ends["naive"] == pytest.approx(ends["synchronous"])


def test_the_alt_text_says_what_overlaps() -> None:
    told = describe_schedules()
    assert "synchronous, 100 % of the synchronous length: nothing overlaps" in told
    assert "naive, 100 % of the synchronous length: nothing overlaps" in told
    assert "pipelined, 62 % of the synchronous length: gather 1 under work 0, parameters 0 and gather 2 under" in told
