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
from distmuon.optim.muon import decay_cautiously_

RATE = torch.tensor(1e-3)
MAKERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "Muon": Muon,
    "MuonW": MuonW,
    "owner": lambda parameters: DistributedMuon(parameters, Grid.alone("cpu"), strategy="owner"),
    "owner, lr a tensor": lambda parameters: DistributedMuon(parameters, Grid.alone("cpu"), RATE, strategy="owner"),
    "Muon, cautious": lambda parameters: Muon(parameters, cautious_decay=True),
    "MuonW, cautious": lambda parameters: MuonW(parameters, cautious_decay=True),
    "owner, cautious": lambda parameters: DistributedMuon(
        parameters, Grid.alone("cpu"), strategy="owner", cautious_decay=True
    ),
    "Muon, NorMuon": lambda parameters: Muon(parameters, normuon_beta2=0.95),
    "MuonW, NorMuon": lambda parameters: MuonW(parameters, normuon_beta2=0.95),
    "owner, NorMuon": lambda parameters: DistributedMuon(
        parameters, Grid.alone("cpu"), strategy="owner", normuon_beta2=0.95
    ),
    "gather_all": lambda parameters: DistributedMuon(parameters, Grid.alone("cpu"), strategy="gather_all"),
}
NO_WORK = ("aten::empty", "aten::empty_like", "aten::promote_types")
STEPPING: list[Callable[..., Any]] = [Muon, MuonW]


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_update", [torch.float32, torch.bfloat16])
def test_cautious_decay_of_many_is_that_of_each_to_the_bit(dtype: torch.dtype, of_update: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(9, n, generator=generator).to(dtype) for n in (7, 16, 33)]
    updates = [torch.randn(9, n, generator=generator).to(of_update) for n in (7, 16, 33)]
    weights[0][0], updates[0][1] = 0.0, -0.0
    wanted = [
        torch.where(w.sign() * o.sign() >= 0, w * (1 - 0.3 * 0.7), w) for w, o in zip(weights, updates, strict=True)
    ]
    decay_cautiously_(weights, updates, 0.3, 0.7)
    assert all(torch.equal(w, other) for w, other in zip(weights, wanted, strict=True))


def test_clipping_asks_for_no_more_if_there_are_more_matrices() -> None:
    found = []
    for matrices in (3, 9):
        parameters = [nn.Parameter(torch.randn(16, 24)) for _ in range(matrices)]
        optimizer = MuonW(parameters)
        torch.stack([(p * p).sum() for p in parameters]).sum().backward()
        with Calls() as calls:
            optimizer.clip_grad_norm_(1.0)
        found.append(calls.counts)
    assert found[0] == found[1]


# ---- What must not be asked for at once -------------------------------------------------------------------


@pytest.mark.parametrize("make", STEPPING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("other", [slice(0, 6), slice(3, 9)])
def test_two_parameters_on_one_memory_both_take_their_step(make: Any, dtype: torch.dtype, other: slice) -> None:
    memory = torch.ones(9, 8, dtype=dtype)
    shared = [nn.Parameter(memory[:6]), nn.Parameter(memory[other])]
    alone = [nn.Parameter(torch.ones(6, 8, dtype=dtype)) for _ in range(2)]
    for seed, pair in enumerate(zip(shared, alone, strict=True)):
        gradient = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
        for p in pair:
            p.grad = gradient.clone()
    options = dict(lr=0.1, weight_decay=0.0, master_weights=False)
    make(shared, **options).step()
    make(alone, **options).step()
    moved = torch.ones(9, 8, dtype=dtype)
    moved[:6] += alone[0].detach() - 1
    moved[other] += alone[1].detach() - 1
    torch.testing.assert_close(memory, moved, rtol=0.02, atol=0.02)
