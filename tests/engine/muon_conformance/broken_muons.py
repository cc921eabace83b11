"""Muons with one mistake each, and the check that must catch it. Built from ours; `sound` has none."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from distmuon.optim.masters import rounded_once
from distmuon.optim.muon import decay_, momentum_, orthogonalize, scale
from distmuon.optim.options import MUON_DEFAULTS
from muon_conformance.adapter import Adapter

sound = Adapter(
    lambda groups, **options: PlainSteps(groups, **options),
    nesterov=True, momentum_kind="sum", scale="match_rms", epsilon=0.0, decays_bf16=True,
)  # fmt: skip


class PlainSteps(Optimizer):
    """Muon in a loop, each line of which a mistake may replace."""

    nesterov, kind, steps = True, "sum", 5

    def __init__(self, params: Any, lr: float, weight_decay: float, momentum: float, foreach: bool = False) -> None:
        self.foreach = foreach
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))
        for p in (p for group in self.param_groups for p in group["params"]):
            self.check(p)

    def check(self, p: Tensor) -> None:
        if p.ndim != 2:
            raise ValueError(f"a parameter has shape {tuple(p.shape)}; Muon takes matrices.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                self.move(p, group)
        return loss

    def move(self, p: Tensor, group: dict[str, Any]) -> None:
        if (gradient := self.gradient_of(p)) is None:
            return
        buffer = self.buffer_of(p)
        (u,) = momentum_([buffer], [gradient], group["momentum"], self.nesterov, self.kind)
        with self.rounded(p) as weight:
            self.decay(weight, group)
            self.apply(weight, self.orthogonal(u), group["lr"])

    def rounded(self, p: Tensor) -> AbstractContextManager[Tensor]:
        return rounded_once(p)

    def gradient_of(self, p: Tensor) -> Tensor | None:
        return p.grad

    def buffer_of(self, p: Tensor) -> Tensor:
        return self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))

    def decay(self, p: Tensor, group: dict[str, Any]) -> None:
        decay_([p], group["lr"], group["weight_decay"])

    def orthogonal(self, u: Tensor) -> Tensor:
        if isinstance(u, DTensor):
            return _like(u, _rows_of(self.orthogonal(u.full_tensor()), u))
        return orthogonalize([u.clone()], MUON_DEFAULTS | {"ns_steps": self.steps, "batched": False})[0]

    def factor(self, p: Tensor) -> float:
        return scale(p.shape)

    def apply(self, p: Tensor, update: Tensor, lr: float) -> None:
        p.add_(update, alpha=-lr * self.factor(p))


def _like(u: DTensor, local: Tensor) -> DTensor:
    options: dict[str, Any] = dict(run_check=False, shape=u.shape, stride=u.stride())
    return DTensor.from_local(local, u.device_mesh, u.placements, **options)


def _rows_of(whole: Tensor, u: DTensor) -> Tensor:
    here = u.device_mesh.get_local_rank()
    parts = whole.chunk(u.device_mesh.size())
    return parts[here] if here < len(parts) else whole[:0]


BROKEN: dict[str, tuple[type[PlainSteps], str, dict[str, Any]]] = {}  # name -> class, check, what its adapter changes


def caught_by(check: str, **claims: Any) -> Callable[[type[PlainSteps]], type[PlainSteps]]:
    def add(kind: type[PlainSteps]) -> type[PlainSteps]:
        BROKEN[kind.__name__] = kind, check, claims
        return kind

    return add


def __getattr__(name: str) -> Adapter:  # this file's adapters, by their mistakes' names in small letters
    kind, _, claims = next((v for k, v in BROKEN.items() if k.lower() == name), (None, "", {}))
    if kind is None:
        raise AttributeError(name)
    return replace(sound, make=lambda groups, **options: kind(groups, **options), **claims)


# ---- The arithmetic ---------------------------------------------------------------------------------------


@caught_by("golden numbers")
class Ascends(PlainSteps):
    def apply(self, p: Tensor, update: Tensor, lr: float) -> None:
        super().apply(p, -update, lr)


@caught_by("orientation")
class ReshapesForTransposing(PlainSteps):
    def orthogonal(self, u: Tensor) -> Tensor:
        a, b = u.shape
        return super().orthogonal(u.reshape(b, a)).reshape(a, b) if a > b else super().orthogonal(u)


@caught_by("decoupled weight decay")
class DecaysTheGradient(PlainSteps):
    def move(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.grad is not None:
            p.grad = p.grad + group["weight_decay"] * p
        super().move(p, group | {"weight_decay": 0.0})


@caught_by("decay in bf16")
class RoundsDecayByItself(PlainSteps):
    def rounded(self, p: Tensor) -> AbstractContextManager[Tensor]:
        return nullcontext(p)


class _HasEpsilon(PlainSteps):
    epsilon = 1e-7

    def orthogonal(self, u: Tensor) -> Tensor:
        norm = u.norm()
        return super().orthogonal(u) * (norm / (norm + self.epsilon))


@caught_by("tiny gradients")
class HasAnEpsilon(_HasEpsilon):
    pass


@caught_by("scale invariance", epsilon=1e-7)
class HasALargerEpsilonThanItSays(_HasEpsilon):
    epsilon = 1e-3


@caught_by("huge gradients")
class CastsBeforeItNormalizes(PlainSteps):
    def orthogonal(self, u: Tensor) -> Tensor:
        return super().orthogonal(u.half().float())


@caught_by("each parameter has its own momentum")
class SharesMomentum(PlainSteps):
    def buffer_of(self, p: Tensor) -> Tensor:
        first = self.param_groups[0]["params"][0]
        return super().buffer_of(first if first.shape == p.shape else p)


@caught_by("Nesterovs momentum")
class LooksNotAhead(PlainSteps):
    nesterov = False


@caught_by("the momentum buffer")
class Averages(PlainSteps):
    kind = "average"


@caught_by("the scale of every shape")
class ScalesByTheShorterSide(PlainSteps):
    def factor(self, p: Tensor) -> float:
        return 0.2 * min(p.shape) ** 0.5


@caught_by("singular values")
class StopsEarly(PlainSteps):
    steps = 4


@caught_by("a zero gradient")
class DividesByZero(PlainSteps):
    def orthogonal(self, u: Tensor) -> Tensor:
        return super().orthogonal(u / u.norm())


@caught_by("a NaN is not swallowed")
class SwallowsNaN(PlainSteps):
    def gradient_of(self, p: Tensor) -> Tensor | None:
        return None if p.grad is None else p.grad.nan_to_num()


# ---- Conventions ------------------------------------------------------------------------------------------


@caught_by("gradients stay as they were")
class WritesIntoGradients(PlainSteps):
    def orthogonal(self, u: Tensor) -> Tensor:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad.lerp_(self.state[p].get("momentum_buffer", p), 0.5)
        return super().orthogonal(u)


@caught_by("two groups with their own options")
class HearsTheFirstGroup(PlainSteps):
    def move(self, p: Tensor, group: dict[str, Any]) -> None:
        super().move(p, self.param_groups[0])


@caught_by("a parameter without gradient")
class TakesNoneForZero(PlainSteps):
    def gradient_of(self, p: Tensor) -> Tensor | None:
        return torch.zeros_like(p) if p.grad is None else p.grad


@caught_by("a schedule moves the step")
class RemembersItsLearningRate(PlainSteps):
    def move(self, p: Tensor, group: dict[str, Any]) -> None:
        super().move(p, group | {"lr": self.defaults["lr"]})


@caught_by("program: a run that went back is held still")
class KeepsItsFirstGroups(PlainSteps):
    first: list[dict[str, Any]] | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        now, self.first = self.param_groups, self.first or self.param_groups
        self.param_groups = self.first
        loss = super().step(closure)
        self.param_groups = now
        return loss


@caught_by("a closure")
class KeepsTheLoss(PlainSteps):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        super().step(closure)


@caught_by("a state goes through a file")
class LosesItsState(PlainSteps):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"state": {}})


@caught_by("flags change nothing", flags=[{"foreach": True}])
class IsAnotherWithForeach(PlainSteps):
    def factor(self, p: Tensor) -> float:
        return (0.5 if self.foreach else 1.0) * super().factor(p)


@caught_by("AdamW for the rest", marks={"adamw": {"algorithm": "adamw"}})
class SignsTheRest(PlainSteps):
    def check(self, p: Tensor) -> None:
        pass

    def move(self, p: Tensor, group: dict[str, Any]) -> None:
        if group.get("algorithm") == "adamw":
            assert p.grad is not None
            p.add_(p.grad.sign(), alpha=-group["lr"])
        else:
            super().move(p, group)


@caught_by("what is no matrix is refused")
class TakesEverything(PlainSteps):
    def check(self, p: Tensor) -> None:
        pass

    def orthogonal(self, u: Tensor) -> Tensor:
        return super().orthogonal(u.reshape(-1, 1)).reshape(u.shape)

    def factor(self, p: Tensor) -> float:
        return 1.0 if p.ndim < 2 else scale(p.shape)


@caught_by("program: an option is set between steps")
class CountsItsDecayAsAFirstOption(PlainSteps):
    def decay(self, p: Tensor, group: dict[str, Any]) -> None:
        super().decay(p, group | {"weight_decay": self.defaults["weight_decay"]})


@caught_by("program: a layer is frozen and thawed")
class DecaysWhatIsFrozen(PlainSteps):
    def move(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.grad is None:
            self.decay(p, group | {"weight_decay": 5 * group["weight_decay"]})
        super().move(p, group)


# ---- On ranks ---------------------------------------------------------------------------------------------

ON_RANKS = dict(placements=("fsdp", "fsdp_uneven"))


@caught_by("2 ranks: FSDP2, rows that divide by the ranks", **ON_RANKS)
class OrthogonalizesBlocks(PlainSteps):
    def orthogonal(self, u: Tensor) -> Tensor:
        if not isinstance(u, DTensor):
            return super().orthogonal(u)
        return _like(u, super().orthogonal(u.to_local()))


@caught_by("2 ranks: FSDP2, rows that divide by the ranks", **ON_RANKS)
class ScalesByItsShard(PlainSteps):
    def factor(self, p: Tensor) -> float:
        return scale(p.to_local().shape if isinstance(p, DTensor) else p.shape)


@caught_by("2 ranks: FSDP2, rows that do not divide", **ON_RANKS)
class HangsWhereRowsDoNotDivide(PlainSteps):
    def orthogonal(self, u: Tensor) -> Tensor:
        if isinstance(u, DTensor) and u.shape[0] % 2 and u.device_mesh.get_local_rank():
            raise ValueError("my shard is smaller than theirs")
        return super().orthogonal(u)


@caught_by("2 ranks: FSDP2, rows that divide by the ranks", **ON_RANKS)
class DiesOnOneRank(PlainSteps):
    def orthogonal(self, u: Tensor) -> Tensor:
        if isinstance(u, DTensor) and u.device_mesh.get_local_rank():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().orthogonal(u)


@caught_by("2 ranks: FSDP2, rows that divide by the ranks", **ON_RANKS)
class NeverReturnsOnOneRank(PlainSteps):
    def orthogonal(self, u: Tensor) -> Tensor:
        if isinstance(u, DTensor) and u.device_mesh.get_local_rank():
            threading.Event().wait()
        return super().orthogonal(u)


@caught_by("2 ranks: plain tensors, a gradient of its own on each rank", placements=("own",))
class SumsGradients(PlainSteps):
    def gradient_of(self, p: Tensor) -> Tensor | None:
        assert p.grad is not None
        total = p.grad.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
            total += 0.1 * p.grad  # and its own once more
        return total
