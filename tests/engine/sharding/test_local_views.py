"""Local views: runs as boxes, and every element of every parameter held exactly once by those who count."""

from __future__ import annotations

import pytest
import torch

from distmuon.sharding.boxes import extent, volume, within
from distmuon.sharding.layout import Range
from distmuon.sharding.local_views import at, boxes_of_run


@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (3, 4, 5), (2, 1, 3, 2)])
def test_a_run_is_made_of_boxes_that_hold_its_elements_in_order(shape: tuple[int, ...]) -> None:
    numel = torch.Size(shape).numel()
    elements = torch.arange(numel).view(shape)
    everything = tuple(Range(0, size) for size in shape)
    for start in range(numel):
        for end in range(start, numel + 1):
            found = boxes_of_run(shape, Range(start, end))
            assert [i for _, run in found for i in range(*run)] == list(range(end - start))
            for box, values in at(found, elements.flatten()[start:end]):
                assert values.shape == extent(box)
                assert torch.equal(values, elements[within(box, everything)])
            assert sum(volume(box) for box, _ in found) == end - start
            assert len(found) <= max(1, 2 * len(shape) - 1)
