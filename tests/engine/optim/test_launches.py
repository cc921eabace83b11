"""How often one step calls for work: on a GPU that is a launch each, and what the host needs for it adds up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from distmuon import DistributedMuon, Grid, Muon, MuonW

MAKERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "Muon": Muon,
    "MuonW": MuonW,
    "owner": lambda parameters: DistributedMuon(parameters, Grid.alone("cpu"), strategy="owner"),
    "gather_all": lambda parameters: DistributedMuon(parameters, Grid.alone("cpu"), strategy="gather_all"),
}
NO_WORK = ("aten::empty", "aten::empty_like", "aten::promote_types")


class Calls(TorchDispatchMode):
    """Counts what is asked for, but for views, memory and questions: {operator: times}."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not func.is_view and func._schema.name not in NO_WORK:
            self.counts[func._schema.name] += 1
        return func(*args, **kwargs or {})


def calls_of_a_step(name: str, matrices: int) -> Counter[str]:
    """Return what the second step asks for, of a model of so many matrices of one shape."""
    parameters = [nn.Parameter(torch.randn(16, 24)) for _ in range(matrices)]
    optimizer = MAKERS[name](parameters)
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack([(p * p).sum() for p in parameters]).sum().backward()
        with Calls() as calls:
            optimizer.step()
    return calls.counts


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_asks_for_no_more_if_there_are_more_matrices(name: str) -> None:
    assert calls_of_a_step(name, 9) == calls_of_a_step(name, 3)
