"""The kit's frame: checks with a name and a reason, what they find, and the optimizer that they look at.

A check is a function of a `Subject`. It returns what it saw; it raises `Breach` where the optimizer does not do what it
claims, and `Unclaimed` where it claims nothing. Whatever the optimizer itself raises is a breach, too.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from muon_conformance.adapter import DEFAULTS, Adapter
from muon_conformance.reference import SCALES, Arithmetic, PlainMuon, Quintic, distance, gaussian, quintics, tolerance

PASSED, FAILED, UNCLAIMED = "passed", "failed", "not claimed"
LR = 2.0**-5  # of a single step from zero, so that dividing by it rounds nothing


class Breach(AssertionError):
    """A claim that is not kept: what was expected and what was seen, in one sentence."""


class Unclaimed(Exception):
    """What was seen where nothing is claimed, in one sentence."""


class Observation(NamedTuple):
    """What one check found. verdict: `PASSED`, `FAILED` or `UNCLAIMED`. numbers: what the report has besides."""

    check: str
    verdict: str
    seen: str
    why: str
    numbers: dict[str, Any]


@dataclass(eq=False)
class Subject:
    """An optimizer under examination; what its adapter leaves open is measured when it is first needed."""

    adapter: Adapter
    numbers: dict[str, Any] = field(default_factory=dict)  # what the check that runs wants in its report
    _scales: dict[tuple[int, int], float] = field(default_factory=dict)

    @functools.cached_property
    def polynomials(self) -> tuple[Quintic, ...]:
        return quintics(self.adapter.coefficients, self.adapter.steps)

    @functools.cached_property
    def nesterov(self) -> bool:
        """As claimed; else the form that is nearer to its second step."""
        return self.nearest_form() if self.adapter.nesterov is None else self.adapter.nesterov

    @functools.cached_property
    def momentum_kind(self) -> str | None:
        """As claimed; else what its buffer holds, if there is one."""
        return self.adapter.momentum_kind or self.momentum_found()[0]

    @functools.cached_property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic(self.nesterov, self.polynomials, self.scale, average=self.momentum_kind == "average")

    @functools.cached_property
    def tolerance(self) -> float:
        return tolerance(self.polynomials, self.adapter.precision)

    def scale(self, a: int, b: int) -> float:
        """Return the factor on the update of an [A, B]: as claimed, else as measured."""
        rule = self.adapter.scale
        if rule is None:
            return self.measured_scale(a, b)
        return SCALES[rule][1](a, b) if isinstance(rule, str) else rule(a, b)

    def measured_scale(self, a: int, b: int) -> float:
        """Return the factor that brings the exact update nearest to the one that is made; measured once."""
        if (a, b) in self._scales:
            return self._scales[a, b]
        gradient = gaussian(a, b, seed=a + 7 * b)
        exact = Arithmetic(True, self.polynomials, SCALES["unit"][1]).orthogonalized(gradient)
        self._scales[a, b] = float((self.first_update(gradient) * exact).sum() / exact.square().sum())
        return self._scales[a, b]

    def nearest_form(self) -> bool:
        """Say whether a second step, on another gradient, is nearer to Nesterov's than to plain momentum's."""
        gradients = [gaussian(12, 12, seed=1), gaussian(12, 12, seed=2)]
        p, _ = self.train([torch.zeros(12, 12)], [[gradients[0]]], lr=LR, weight_decay=0.0)
        q, _ = self.train([torch.zeros(12, 12)], [[g] for g in gradients], lr=LR, weight_decay=0.0)
        second = p[0].double() - q[0].double()

        def off(nesterov: bool) -> float:
            arithmetic = Arithmetic(nesterov, self.polynomials, SCALES["unit"][1])
            exact = arithmetic.orthogonalized(arithmetic.fed(gradients[0].clone(), gradients[1], 0.95))
            return float(1 - (second * exact).sum() / (second.norm() * exact.norm()))

        return off(True) <= off(False)

    def momentum_found(self) -> tuple[str | None, float]:
        """Return what the state "momentum_buffer" is, "sum" or "average", and how far off; (None, inf) for none."""
        p, gradients = nn.Parameter(torch.zeros(8, 6)), [gaussian(8, 6, seed=1), gaussian(8, 6, seed=2)]
        optimizer = self.adapter.optimizer([p])
        feed(optimizer, [p], [[gradient] for gradient in gradients])
        buffer = optimizer.state.get(p, {}).get("momentum_buffer")
        if not isinstance(buffer, Tensor) or buffer.numel() != p.numel():
            return None, math.inf
        total = 0.95 * gradients[0] + gradients[1]
        off = {kind: distance(buffer.reshape(8, 6), part * total) for kind, part in (("sum", 1.0), ("average", 0.05))}
        return min(off.items(), key=lambda pair: pair[1])

    def train(
        self,
        weights: Sequence[Tensor],
        gradients: Iterable[Sequence[Tensor | None]],  # of every step, one for each weight
        **options: Any,
    ) -> tuple[list[Tensor], Optimizer]:
        """Return the weights after as many steps, and the optimizer."""
        parameters = [nn.Parameter(weight.clone()) for weight in weights]
        optimizer = self.adapter.optimizer(parameters, **options)
        feed(optimizer, parameters, gradients)
        return [p.detach() for p in parameters], optimizer

    def first_update(
        self,
        gradient: Tensor,  # [A, B]
    ) -> Tensor:  # [A, B], float64
        """Return what the first step subtracts from a weight of zero, over the learning rate."""
        (weight,), _ = self.train([torch.zeros_like(gradient)], [[gradient]], lr=LR, weight_decay=0.0)
        return -weight.double() / LR

    def plain(
        self, weights: Sequence[Tensor], gradients: Iterable[Sequence[Tensor | None]], **options: Any
    ) -> list[Tensor]:
        """Return the weights after the same steps of the reference."""
        parameters = [nn.Parameter(weight.clone()) for weight in weights]
        feed(PlainMuon(parameters, self.arithmetic, **DEFAULTS | options), parameters, gradients)
        return [p.detach() for p in parameters]

    @functools.cached_property
    def trains_plainly(self) -> bool:
        """Whether it keeps to the arithmetic at all, which everything that is compared with it needs."""
        weights, gradients = 0.3 * gaussian(12, 12), [[gaussian(12, 12, seed=1 + i)] for i in range(3)]
        found, expected = (how([weights], gradients) for how in (lambda *a: self.train(*a)[0], self.plain))
        return distance(found[0] - weights, expected[0] - weights) < self.tolerance


def feed(optimizer: Optimizer, parameters: Sequence[Tensor], gradients: Iterable[Sequence[Tensor | None]]) -> None:
    """Take one step for each row of gradients, which stay the caller's."""
    for row in gradients:
        for p, gradient in zip(parameters, row, strict=True):
            p.grad = None if gradient is None else gradient.clone()
        optimizer.step()


# ---- Checks -----------------------------------------------------------------------------------------------

Look = Callable[[Subject], str]


class Check(NamedTuple):
    """A check. why: what goes wrong for whom where it is not kept. ranks: of the world that it needs."""

    name: str
    why: str
    look: Look
    ranks: int = 1


CHECKS: dict[str, Check] = {}


def check(why: str) -> Callable[[Look], Look]:
    """Add a check on one process under its function's name."""

    def add(look: Look) -> Look:
        name = look.__name__.replace("_", " ")
        CHECKS[name] = Check(name, why, look)
        return look

    return add


def judge(one: Check, subject: Subject) -> Observation:
    """Run a check; return what it found. Never raises for what the optimizer does."""
    adapter, subject.numbers = subject.adapter, {}
    if one.name in adapter.lacks:
        return Observation(one.name, UNCLAIMED, adapter.lacks[one.name], one.why, {})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen, verdict = one.look(subject), PASSED
    except Unclaimed as unclaimed:
        seen, verdict = str(unclaimed), UNCLAIMED
    except Breach as breach:
        seen, verdict = str(breach), FAILED
    except ModuleNotFoundError as error:
        seen, verdict = f"it cannot run here: {said(error)}.", UNCLAIMED
    except Exception as error:
        seen, verdict = f"raised {said(error)}", FAILED
    return Observation(one.name, verdict, seen, one.why, subject.numbers)


def said(error: BaseException, most: int = 240) -> str:
    """Return an error's kind and words in one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:most]}{'…' * (len(words) > most)}"


def near(actual: Tensor, expected: Tensor, most: float, what: str) -> float:
    """Return the relative distance of two tensors. Raises Breach where it is more than `most`, or no number."""
    off = distance(actual, expected)
    if not off <= most:
        raise Breach(f"{what}: expected at most {most:.1g} from the reference, relative, saw {off:.2g}.")
    return off
