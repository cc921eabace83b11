"""How often one step calls for work: on a GPU that is a launch each, and what the host needs for it adds up.

And how often it waits for a learning rate that lies on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from distmuon import DistributedMuon, Grid, Muon, MuonW, Zero1AdamW
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


# ---- Options that are tensors on a device -----------------------------------------------------------------


class OnDevice(Tensor):
    """A number that lies on a device and not in the host's memory, as far as anyone can ask; "lazy" is one that torch
    always knows. waits: how the host has looked at one, or at what was computed with one."""

    waits: ClassVar[list[str]] = []
    number: Tensor

    @staticmethod
    def __new__(cls, number: Tensor) -> OnDevice:
        lazy = torch.device("lazy")
        made = Tensor._make_wrapper_subclass(cls, number.shape, dtype=number.dtype, device=lazy)  # type: ignore[attr-defined]
        made.number = number
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        def on_host(value: Any) -> Any:
            return value.number if isinstance(value, OnDevice) else value

        options = dict(kwargs or {})
        device = options.pop("device", None)
        leaves = device is not None and torch.device(device).type == "cpu"
        if leaves or func._schema.name == "aten::_local_scalar_dense":
            cls.waits.append(func._schema.name)
        found = func(*tree_map(on_host, args), **tree_map(on_host, options))
        stays = isinstance(found, Tensor) and not leaves and not any(found is one for one in args)
        return OnDevice(found) if stays else found


def moved_with(make: Callable[..., Any], clip: bool, **given: Any) -> list[Tensor]:
    """Return where two steps lead with two groups that share an option, or more of them, given as tensors."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(6, 4, generator=generator)) for _ in range(4)]
    optimizer = make([{"params": weights[:2], **given}, {"params": weights[2:], **given}])
    for _ in range(2):
        for p in weights:
            p.grad = torch.randn(6, 4, generator=generator)
        OnDevice.waits.clear()
        if clip:
            optimizer.clip_grad_norm_(1.0)
            OnDevice.waits.clear()
        optimizer.step()
        for group in optimizer.param_groups:
            assert all(group[name] is value for name, value in given.items())
    return [p.detach() for p in weights]


STEPPED: dict[str, Callable[..., Any]] = {
    "Muon": Muon,
    "MuonW": MuonW,
    "MuonW, AdamW": lambda groups: MuonW([{"algorithm": "adamw", **group} for group in groups]),
    "DistributedMuon": lambda groups: DistributedMuon(groups, Grid.alone("cpu")),
    "Zero1AdamW": lambda groups: Zero1AdamW(groups, Grid.alone("cpu")),
}


@pytest.mark.parametrize("name", STEPPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip", [False, True])
def test_a_step_waits_once_for_options_on_the_device_and_moves_as_with_those_on_the_host(
    name: str, dtype: torch.dtype, clip: bool
) -> None:
    if clip and name == "Muon":
        return
    given = {"lr": torch.tensor(0.003, dtype=dtype), "weight_decay": torch.tensor(0.07)}
    if "AdamW" not in name:
        given["momentum"] = torch.tensor(0.9)
    expected = moved_with(STEPPED[name], clip, **given)
    found = moved_with(STEPPED[name], clip, **{option: OnDevice(value) for option, value in given.items()})
    assert len(OnDevice.waits) == 1
    assert all(map(torch.equal, found, expected))


def test_a_step_that_is_refused_gives_the_options_back() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = MuonW([p], lr=OnDevice(torch.tensor(0.1)))
    rate = optimizer.param_groups[0]["lr"] = OnDevice(torch.tensor(-0.1))
    p.grad = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"lr=-0\.1"):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] is rate


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
