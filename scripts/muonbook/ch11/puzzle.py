"""Chapter 11's puzzle: an alarm that hears a broken optimizer without a reference to compare it with.

The solution is `alarm`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from muonbook.puzzles import Puzzle, insist

if TYPE_CHECKING:
    import torch

    from distmuon.launch import World

# None: the healthy optimizer
SUSPECTS = (None, "block-wise Newton–Schulz", "owned piece only", "no Newton–Schulz", "wrong tp dim")


class Heard(NamedTuple):
    """What the alarm said to one optimizer. name: of the exhibit, None if healthy. rang: for which matrices."""

    name: str | None
    rang: list[str]


def trial(world: World, alarm: Callable[..., Any]) -> list[Heard]:
    """Take one real step with each optimizer, without decay and with lr 1; show every matrix's update to the alarm."""
    from distmuon.sharding.grid import Grid
    from muonbook.ch11 import museum_tour

    grid = Grid.of(world)
    start = museum_tour.initial()
    heard = []
    for name in SUSPECTS:
        after, _ = museum_tour.on_grid(name, museum_tour.PLAIN_STEP, grid)
        rang = []
        for key, before in start.items():
            answer = alarm((before - after[key]).clone())
            insist("" if isinstance(answer, bool) else f"alarm returned a {type(answer).__name__}, not True or False.")
            rang += [key] * answer
        heard.append(Heard(name, rang))
    return heard


def judge(evidence: list[list[Heard]]) -> list[str]:
    """Return what is wrong: false alarms first, then silence."""
    false, silent = [], []
    for name, rang in evidence[0]:
        if name is None and rang:
            false.append(f"false alarm: it rings for {', '.join(rang)} of the healthy optimizer.")
        if name is not None and not rang:
            silent.append(f"it stays silent although the optimizer has the exhibit {name!r} in it.")
    return [*false, *silent[:1]]


def praise(evidence: list[list[Heard]]) -> str:
    """Return what was achieved, with what rang for whom."""
    rang = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in evidence[0] if name is not None)
    return f"silent for the healthy optimizer, and it rings where it should ({rang})."


PUZZLE = Puzzle(
    name="an alarm without a reference",
    function="alarm",
    dp=2,
    tp=2,
    trial=trial,
    judge=judge,
    praise=praise,
    hints=(
        "What must be true of the singular values of a healthy update, whatever the gradient was?",
        "They are the scale, 0.2 * sqrt(max(A, B)), times what five quintics leave: something from about 0.7 to 1.2.",
        "Divide the update by the scale, take torch.linalg.svdvals, and ring if the smallest is below 0.5 or the "
        "largest above 1.35. A bound on one side only lets some of the exhibits through.",
    ),
)


# ---- The solution -----------------------------------------------------------------------------------------


def alarm(update: torch.Tensor) -> bool:
    """Return whether `update` [A, B], learning rate taken out, is not what orthogonalization leaves."""
    import torch

    stretches = torch.linalg.svdvals(update.double()) / (0.2 * max(update.shape) ** 0.5)
    return bool(stretches.min() < 0.5 or stretches.max() > 1.35)
