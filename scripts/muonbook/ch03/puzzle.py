"""Chapter 3's puzzle: the whole step of a hybrid optimizer, with nothing but tensors and a Newton–Schulz.

Two processes try it at once, each with a model of its own. The solution is `step`, at the end of this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from muonbook.puzzles import Puzzle, expect_tensor, insist

if TYPE_CHECKING:
    from torch import Tensor

    from distmuon.launch import World

STEPS, TOLERANCE = 4, 1e-9  # of the movement, in float64
OPTIONS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.4}
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


class Off(NamedTuple):
    """How far the reader's function is from the reference. distance: of the movement so far."""

    step: int
    name: str
    distance: float


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
        if self._orthogonalized > len(self._hidden):
            insist(
                f"over budget: newton_schulz was called {self._orthogonalized} times in one step, "
                f"and the model has {len(self._hidden)} hidden matrices."
            )
        return newton_schulz(matrix)

    def adamw(self, name: str, weight: Tensor, gradient: Tensor) -> None:
        """Take AdamW's step of the parameter `name` in place, weight decay included; it remembers its own state."""
        import torch

        if name in self._hidden:
            insist(f"adamw was given {name}, which is a hidden matrix.")
        self._left[name] += 1
        if name not in self._adamw:
            parameter = torch.nn.Parameter(weight.clone())
            options = {key: OPTIONS[key] for key in ("lr", "weight_decay")}
            self._adamw[name] = parameter, torch.optim.AdamW([parameter], **options)
        parameter, optimizer = self._adamw[name]
        with torch.no_grad():
            parameter.copy_(weight)
        parameter.grad = gradient.clone()
        optimizer.step()
        with torch.no_grad():
            weight.copy_(parameter)

    def settle(self) -> str:
        """Return what was left out or done twice in this step, or "", and begin the next."""
        wrong = [name for name in self._others if self._left[name] != 1]
        orthogonalized, left = self._orthogonalized, self._left
        self._orthogonalized, self._left = 0, Counter()
        if wrong:
            return f"adamw was called {left[wrong[0]]} times for {wrong[0]} in one step; once is right."
        if orthogonalized != len(self._hidden):
            return (
                f"newton_schulz was called {orthogonalized} times in one step, "
                f"and the model has {len(self._hidden)} hidden matrices."
            )
        return ""


def trial(world: World, step: Callable[..., Any]) -> list[Off]:
    """Take the steps with the reader's function and with the reference; return where they part, first step first."""
    import torch

    from distmuon.optim.muon import Muon

    shapes = MODELS[world.rank]
    hidden = [name for name, shape in shapes.items() if len(shape) == 2 and not name.startswith(ADAMW)]
    generator = torch.Generator().manual_seed(world.rank)
    start = {name: torch.randn(*shape, generator=generator).double() for name, shape in shapes.items()}
    weights = {name: weight.clone() for name, weight in start.items()}
    reference = {name: torch.nn.Parameter(weight.clone()) for name, weight in start.items()}
    others = {key: OPTIONS[key] for key in ("lr", "weight_decay")}
    optimizers = (
        Muon([reference[name] for name in hidden], batched=False, **OPTIONS),
        torch.optim.AdamW([p for name, p in reference.items() if name not in hidden], **others),
    )
    tools = Tools(list(shapes), hidden)
    state: dict[Any, Any] = {}
    off: list[Off] = []
    for number in range(1, STEPS + 1):
        gradients = {name: torch.randn(*shape, generator=generator).double() for name, shape in shapes.items()}
        given = {name: gradient.clone() for name, gradient in gradients.items()}
        step(weights, given, state, tools, **OPTIONS)
        insist(tools.settle())
        for name, parameter in reference.items():
            insist(expect_tensor(name, weights.get(name), shapes[name], torch.float64))
            parameter.grad = gradients[name]
            if not torch.equal(given[name], gradients[name]):
                insist(f"step {number} changed the gradient of {name}, which is not yours to change.")
        for optimizer in optimizers:
            optimizer.step()
        for name, parameter in reference.items():
            right = parameter.detach()
            off.append(Off(number, name, float((weights[name] - right).norm() / (right - start[name]).norm())))
    return [one for one in off if not one.distance < TOLERANCE]


def judge(evidence: list[list[Off]]) -> list[str]:
    """Return what is wrong: on each process the first weight that is off."""
    complaints = []
    for rank, off in enumerate(evidence):
        if off:
            step, name, distance = off[0]
            shape = "x".join(map(str, MODELS[rank][name]))
            before = " Until then all was right." if step > 1 else ""
            complaints.append(
                f"rank {rank}: after step {step}, {name} [{shape}] is off by {distance:.2f} of its movement.{before}"
            )
    return complaints


def praise(evidence: list[list[Off]]) -> str:
    """Return what was achieved."""
    matrices = sum(len(shape) == 2 and not name.startswith(ADAMW) for model in MODELS for name, shape in model.items())
    return (
        f"{STEPS} steps of {len(evidence)} models, the same as Muon and AdamW take, "
        f"with {matrices} calls of Newton–Schulz per step for {matrices} hidden matrices."
    )


PUZZLE = Puzzle(
    name="write the step",
    function="step",
    dp=2,
    tp=1,
    trial=trial,
    judge=judge,
    praise=praise,
    hints=(
        "Sort the names first: what is 1-D, or is called embedding or head, is one call of tools.adamw. For the rest, "
        "keep a momentum in `state` under the name; it begins as zeros.",
        "M <- mu M + G, then feed mu M + G, not M, to tools.newton_schulz. The first step cannot tell the two apart; "
        "the second can.",
        "Multiply the weight by 1 - lr * weight_decay, and only then add the update times "
        "-lr * 0.2 * max(A, B) ** 0.5. All in place, by mul_ and add_. The gradient must survive.",
    ),
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
