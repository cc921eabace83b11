"""What belongs to Muon in models like those that people train: experts, kernels and layers, and no table or head."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
from lookalikes import MUON
from torch import nn

from distmuon.optim.param_groups import split_parameters


def muons(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of Muon's parameters by the option matrices."""
    groups = [group for group in split_parameters(model) if group["algorithm"] == "muon"]
    return {group.get("matrices", "whole"): [name for name, _ in group["params"]] for group in groups}


@pytest.mark.parametrize("make", MUON, ids=lambda make: make.__name__)
def test_muon_gets_the_maps_between_hidden_vectors_and_nothing_else(make: Callable[[], nn.Module]) -> None:
    model = make()
    names = [name for name, _ in model.named_parameters()]
    expected = {
        kind: [n for n in names if n in rows or any(n.startswith(row[:-1]) for row in rows if row.endswith("*"))]
        for kind, rows in MUON[make].items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # where Muon gets most, nothing is to be said
        assert {kind: sorted(found) for kind, found in muons(model).items()} == {
            kind: sorted(found) for kind, found in expected.items()
        }
