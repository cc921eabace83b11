"""Chapter 3's puzzle: the whole step of a hybrid optimizer, with nothing but tensors and a Newton–Schulz.

Two processes try it at once, each with a model of its own. The solution is `step`, at the end of this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from muonbook.puzzles import CaseReport, Puzzle, require, require_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from distmuon.sharding.grid import Grid

STEPS, TOLERANCE = 4, 1e-9  # of the movement, in float64
ADAMW_OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.4}
OPTIONS = {**ADAMW_OPTIONS, "momentum": 0.9}
ADAMW = ("embedding", "head")  # beside everything that is not 2-D
MODELS = (  # one per process: what holds for one shape by accident does not hold for two
    {"embedding.weight": (9, 6), "up.weight": (14, 6), "up.bias": (14,), "down.weight": (6, 14), "head.weight": (5, 6)},
    {
        "embedding.weight": (5, 8),
        "mix.weight": (8, 8),
        "norm.weight": (8,),
        "thin.weight": (3, 8),
        "head.weight": (4, 8),
    },
)


class Tools:
    """What the reader's function may call: Newton–Schulz, once per hidden matrix and step, and AdamW for the rest."""

    def __init__(self, names: list[str], hidden: list[str]) -> None:
        self._hidden, self._others = hidden, [name for name in names if name not in hidden]
        self._adamw: dict[str, Any] = {}
        self._orthogonalized, self._left = 0, Counter[str]()

    def newton_schulz(self, matrix: Tensor) -> Tensor:
        """Return `matrix` [A, B], orthogonalized in five steps; it is left as it was."""
        from distmuon.optim.newton_schulz import newton_schulz

        self._orthogonalized += 1
        require(self._orthogonalized <= len(self._hidden), f"over budget: {self._count()}")
        return newton_schulz(matrix)

    def adamw(self, name: str, weight: Tensor, gradient: Tensor) -> None:
        """Take AdamW's step of the parameter `name` in place, weight decay included; it remembers its own state."""
        import torch

        require(name not in self._hidden, f"adamw was given {name}, which is a hidden matrix.")
        self._left[name] += 1
        if name not in self._adamw:
            parameter = torch.nn.Parameter(weight.clone())
            self._adamw[name] = parameter, torch.optim.AdamW([parameter], **ADAMW_OPTIONS)
        parameter, optimizer = self._adamw[name]
        parameter.data, parameter.grad = weight, gradient.clone()
        optimizer.step()

    def settle(self) -> None:
        """Stop the trial where something was left out or done twice in this step; begin the next."""
        for name in self._others:
            calls = self._left[name]
            require(calls == 1, f"adamw was called {calls} times for {name} in one step; once is right.")
        require(self._orthogonalized == len(self._hidden), self._count())
        self._orthogonalized, self._left = 0, Counter()

    def _count(self) -> str:
        return (
            f"newton_schulz was called {self._orthogonalized} times in one step, "
            f"and the model has {len(self._hidden)} hidden matrices."
        )


def trial(grid: Grid, step: Callable[..., Any]) -> Iterator[CaseReport]:
    """Take the steps with the reader's function and with the reference, and compare every weight after every step."""
    import torch

    from distmuon.optim.muon import Muon

    shapes = MODELS[grid.world.rank]
    hidden = [name for name, shape in shapes.items() if len(shape) == 2 and not name.startswith(ADAMW)]
    generator = torch.Generator().manual_seed(grid.world.rank)
    start = {name: torch.randn(*shape, generator=generator).double() for name, shape in shapes.items()}
    weights = {name: weight.clone() for name, weight in start.items()}
    reference = {name: torch.nn.Parameter(weight.clone()) for name, weight in start.items()}
    optimizers = (
        Muon([reference[name] for name in hidden], batched=False, **OPTIONS),
        torch.optim.AdamW([p for name, p in reference.items() if name not in hidden], **ADAMW_OPTIONS),
    )
    tools = Tools(list(shapes), hidden)
    state: dict[Any, Any] = {}
    complaint = ""  # the first
    for number in range(1, STEPS + 1):
        gradients = {name: torch.randn(*shape, generator=generator).double() for name, shape in shapes.items()}
        given = {name: gradient.clone() for name, gradient in gradients.items()}
        step(weights, given, state, tools, **OPTIONS)
        tools.settle()
        for name, parameter in reference.items():
            require_tensor(name, weights.get(name), shapes[name], torch.float64)
            parameter.grad = gradients[name]
            changed = f"step {number} changed the gradient of {name}, which is not yours to change."
            require(torch.equal(given[name], gradients[name]), changed)
        for optimizer in optimizers:
            optimizer.step()
        for name, parameter in reference.items():
            right = parameter.detach()
            off = float((weights[name] - right).norm() / (right - start[name]).norm())  # of the movement so far
            if not complaint and not off < TOLERANCE:
                where = f"rank {grid.world.rank}: after step {number}, {name} [{'x'.join(map(str, shapes[name]))}]"
                before = " Until then all was right." if number > 1 else ""
                complaint = f"{where} is off by {off:.2f} of its movement.{before}"
    yield CaseReport([complaint], len(hidden))


PUZZLE = Puzzle(
    function="step",
    trial=trial,
    praise=lambda facts: (
        f"{STEPS} steps of {len(facts)} models, the same as Muon and AdamW take, with "
        f"{(matrices := sum(map(sum, facts)))} calls of Newton–Schulz per step for {matrices} hidden matrices."
    ),
    hints=(
        "Sort the names first: what is 1-D, or is called embedding or head, is one call of tools.adamw. For the rest, "
        "keep a momentum in `state` under the name; it begins as zeros.",
        "M <- mu M + G, then feed mu M + G, not M, to tools.newton_schulz. The first step cannot tell the two apart; "
        "the second can.",
        "Multiply the weight by 1 - lr * weight_decay, and only then add the update times "
        "-lr * 0.2 * max(A, B) ** 0.5. All in place, by mul_ and add_. The gradient must survive.",
    ),
    goal="Write the whole step of Muon for hidden matrices, with AdamW for all other parameters.",
    dp=2,
    told=2,
)


# ---- The solution -----------------------------------------------------------------------------------------


def step(
    weights: dict[str, Tensor],
    gradients: dict[str, Tensor],
    state: dict[str, Tensor],
    tools: Tools,
    lr: float,
    momentum: float,
    weight_decay: float,
) -> None:
    """Take one step of Muon and AdamW, changing the tensors in `weights` in place."""
    import torch

    for name, weight in weights.items():
        gradient = gradients[name]
        if weight.ndim != 2 or name.startswith(("embedding", "head")):
            tools.adamw(name, weight, gradient)
            continue
        m = state.setdefault(name, torch.zeros_like(weight))
        m.mul_(momentum).add_(gradient)
        o = tools.newton_schulz(gradient + momentum * m)
        weight.mul_(1 - lr * weight_decay)
        weight.add_(o, alpha=-lr * 0.2 * max(weight.shape) ** 0.5)
