"""A warning names the line of whoever can do something about it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from distmuon import Grid, split_parameters
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.muon import Muon


def _table_alone() -> None:
    split_parameters(nn.Sequential(nn.Embedding(9, 8)))


def _embedding_for_muon() -> None:
    Muon([("embed.weight", nn.Parameter(torch.ones(9, 8)))])


def _without_gradients(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[], None]:
    def step() -> None:
        make(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))).step()

    return step


@pytest.mark.parametrize(
    "act",
    [
        _table_alone,
        _embedding_for_muon,
        _without_gradients(lambda model: Muon([p for p in model.parameters() if p.ndim == 2])),
        _without_gradients(lambda model: DistributedMuon(split_parameters(model), Grid.alone())),
    ],
)
def test_a_warning_points_at_the_users_line(act: Callable[[], None]) -> None:
    with pytest.warns(UserWarning, match=r"^Muon gets|^parameter|^no parameter") as found:
        act()
    assert [warning.filename for warning in found] == [__file__]
