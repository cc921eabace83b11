"""Chapter 11's puzzle: an alarm that hears a broken optimizer without a reference to compare it with.

The solution is `alarm`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from muonbook.figures.healthy import HEALTHY
from muonbook.puzzles import CaseReport, Puzzle, require, unless

if TYPE_CHECKING:
    import torch

    from distmuon.sharding.grid import Grid

# None: the healthy optimizer
SUSPECTS = (None, "block-wise Newton–Schulz", "owned piece only", "no Newton–Schulz", "wrong tp dim")


def trial(grid: Grid, alarm: Callable[..., Any]) -> Iterator[CaseReport]:
    """Take one real step with each optimizer, without decay and with lr 1; show every matrix's update to the alarm."""
    from muonbook.ch11 import experiments

    start = experiments.initial()
    for name in SUSPECTS:
        after, _ = experiments.on_grid(name, experiments.PLAIN_STEP, grid)
        updates = {key: before - after[key] for key, before in start.items()}
        rang = []
        for key, update in updates.items():
            answer = alarm(update.clone())
            require(isinstance(answer, bool), f"alarm returned a {type(answer).__name__}, not True or False.")
            rang += [key] if answer else []
        keys, healthy = ", ".join(rang), name is None
        seen = extremes([updates[key] for key in (rang if healthy and rang else updates)])
        false = f"false alarm: it rings for {keys} of the healthy optimizer. {seen}"
        silent = f"it stays silent although the optimizer has the exhibit {name!r} in it. {seen}"
        complaints = [unless(not (healthy and rang), false), unless(bool(healthy or rang), silent)]
        yield CaseReport(complaints, f"{name}: {keys}")


def extremes(updates: Sequence[torch.Tensor]) -> str:
    """Say how far the singular values of these updates reach, and how far healthy ones do."""
    import torch

    reach = [torch.linalg.svdvals(update.double()) / (0.2 * max(update.shape) ** 0.5) for update in updates]
    low, high = min(values.min().item() for values in reach), max(values.max().item() for values in reach)
    healthy = f"healthy: from about {HEALTHY[0]:.1f} to {HEALTHY[1]:.1f}"
    return f"Singular values / (0.2 sqrt(max(A, B))): from {low:.1g} to {high:.2g}; {healthy}."


PUZZLE = Puzzle(
    function="alarm",
    trial=trial,
    praise=lambda facts: f"silent for the healthy optimizer, and it rings where it should ({'; '.join(facts[0][1:])}).",
    hints=(
        "What must be true of the singular values of a healthy update, whatever the gradient was?",
        "They are the scale, 0.2 * sqrt(max(A, B)), times what five quintics leave: something from about "
        f"{HEALTHY[0]:.1f} to {HEALTHY[1]:.1f}.",
        "Divide the update by the scale, take torch.linalg.svdvals, and ring if the smallest is below 0.5 or the "
        "largest above 1.35. A bound on one side only lets some of the exhibits through.",
    ),
    goal="Detect a broken optimizer from one update of one matrix, without a reference to compare it with.",
    dp=2,
    tp=2,
)


# ---- The solution -----------------------------------------------------------------------------------------


def alarm(update: torch.Tensor) -> bool:
    """Return whether `update` [A, B] is not what orthogonalization leaves."""
    import torch

    stretches = torch.linalg.svdvals(update.double()) / (0.2 * max(update.shape) ** 0.5)
    return bool(stretches.min() < 0.5 or stretches.max() > 1.35)
