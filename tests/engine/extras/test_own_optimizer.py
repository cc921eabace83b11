"""An optimizer of one's own with `local_views()` is saved, resharded, watched and clipped like ours."""

from __future__ import annotations

import math
from pathlib import Path

import own_optimizer as own
import pytest
import torch
from torch import nn

from distmuon import launch
from distmuon.checkpoint import CheckpointError, save, weights
from distmuon.metrics import Metrics


def test_what_three_ranks_save_any_number_loads_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    ends = launch.run(own.go_on, (str(tmp_path / "saved"), True), dp=3)
    alone = launch.run(own.go_on, (str(tmp_path / "alone"), True))[0]
    for ranks in (1, 2):
        ends += launch.run(own.go_on, (str(tmp_path / "saved"),), dp=ranks)
    for end in ends:
        assert all(torch.equal(a, b) for a, b in zip(end, alone, strict=True))
    for dtype in own.DTYPES:
        one, other = (weights(tmp_path / where / str(dtype)) for where in ("saved", "alone"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_metrics_are_the_same_on_any_number_of_ranks() -> None:
    expected = launch.run(own.observed)[0]
    assert expected["totals"]["update_rms"] > 0
    for found in launch.run(own.observed, dp=3):
        assert found["totals"] == pytest.approx(expected["totals"])
        for name, numbers in expected["parameters"].items():
            assert found["parameters"][name] == pytest.approx(numbers)


def test_heads_are_clipped_on_any_number_of_ranks_to_the_bit() -> None:
    (moved,), (expected,) = (launch.run(own.clipped, (threshold,)) for threshold in (math.inf, 0.5))
    assert (expected["gammas"] < 1).tolist() == [True, False, True, True]
    rows = torch.tensor([gamma**0.5 for gamma in expected["gammas"].tolist()], dtype=torch.float64).repeat_interleave(2)
    for number, (before, after) in enumerate(zip(moved["shards"], expected["shards"], strict=True)):
        assert torch.equal(after, (before.double().view(8, -1) * rows.view(8, 1)).float().flatten())
        p = expected["weights"][number % 4 + number // 4 * 8]  # after the first of two steps
        assert torch.equal(p.flatten(), after.to(p.dtype))
    for found in launch.run(own.clipped, dp=3):
        assert torch.equal(found["gammas"], expected["gammas"])
        assert all(torch.equal(a, b) for a, b in zip(found["weights"], expected["weights"], strict=True))


def test_masters_that_nobody_would_save_are_refused(tmp_path: Path) -> None:
    (words,) = set(launch.run(own.keeps_masters_to_itself, (str(tmp_path / "saved"),), dp=2))
    assert "keep them there as 'master_weight'" in words
    assert list(tmp_path.iterdir()) == []


def test_tp_local_tensors_are_refused_where_nobody_knows_the_grid(tmp_path: Path) -> None:
    for said in launch.run(own.save_tp_local, (str(tmp_path / "saved"),), dp=1, tp=2):
        assert all("'weight' is cut over TP ranks, and only a sharded optimizer knows the grid" in one for one in said)
    assert list(tmp_path.iterdir()) == []


def test_views_that_leave_out_a_parameter_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)

    class Half(torch.optim.SGD):
        def local_views(self) -> list:
            return []

    with pytest.raises(CheckpointError, match="leaves out 'weight'"):
        save(tmp_path / "saved", model, Half(model.parameters()))
    with pytest.raises(ValueError, match=r"leaves out a parameter of shape \[2, 2\]"):
        Metrics(Half(model.parameters()))
