"""Who waits for whom: work as the planner adds it up, drawn on one scale, and the share of time at work."""

import numpy as np
import pytest
from figure_helpers import assert_readable, boxes, texts
from matplotlib.patches import StepPatch

from muonbook.ch15.worlds.figure_waits import FEW, BucketWork, bucket_work, describe_waits, draw_waits
from muonbook.planner.algorithms import ALGORITHMS
from muonbook.planner.fabrics import FABRICS
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.planned_worlds import specs_of

TITLE = "Everybody waits"


@pytest.fixture(scope="module")
def work() -> list[BucketWork]:
    return bucket_work("llama3_70b", 128, 8)


def test_work_adds_up_to_the_planners_and_waits_to_its_seconds(work) -> None:
    specs, indices = specs_of(MODELS["llama3_70b"], 8)
    fabric = FABRICS["nvlink_infiniband"]
    for name, mine in zip(("bucketed", "flat"), work, strict=True):
        part = ALGORITHMS[name].lay_out(specs, indices, 128, 8)
        assert np.allclose(sum(mine.work), part.flops())
        seconds = part.update_seconds(fabric.links(128, 8), fabric.flops_per_second)["Newton–Schulz"]
        assert mine.longest / fabric.flops_per_second == pytest.approx(seconds, rel=1e-6)


def test_a_share_is_the_mean_rank_s_of_what_the_slowest_take() -> None:
    assert BucketWork("a", [np.array([1.0, 3.0]), np.array([2.0, 0.0])]).busy == 3 / 5


def test_the_first_buckets_are_drawn_on_one_scale_and_told(work) -> None:
    figure = draw_waits(work, TITLE)
    assert_readable(figure)
    scales = set()
    for each in work:
        for n, mine in enumerate(each.work[:FEW]):
            (band,) = boxes(figure, f"bucket-{each.title}-{n}")
            scales.add(round(band.get_height() / mine.max() * work[0].longest, 6))
            (stairs,) = (p for p in figure.findobj(StepPatch) if p.get_gid() == f"work-{each.title}-{n}")
            drawn = np.asarray(stairs.get_data()[0]) - band.get_y()
            assert np.allclose(drawn / band.get_height(), mine / mine.max())
    assert len(scales) == 1
    assert "bucketed, 3 of 60 buckets" in texts(figure)
    assert describe_waits(work, TITLE).startswith(f"{TITLE}. bucketed, 3 of 60 buckets, at work 46% of the time; flat")
