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
        update = of_weak_directions()
        weak = f"false alarm: it rings for a healthy update, of a momentum with weak directions. {extremes([update])}"
        complaints = [unless(not (healthy and rang), false), unless(bool(healthy or rang), silent)]
        complaints.append(unless(not (healthy and alarm(update)), weak))
        yield CaseReport(complaints, f"{name}: {keys}")


def of_weak_directions() -> torch.Tensor:
    """Return Muon's update, [12, 10], of a momentum whose directions differ in strength by up to 10,000 times."""
    import torch

    from distmuon.optim.newton_schulz import newton_schulz

    random = torch.Generator().manual_seed(11)
    outputs, inputs = (torch.linalg.qr(torch.randn(n, 10, generator=random, dtype=torch.float64)).Q for n in (12, 10))
    strengths = torch.logspace(0, -4, 10, dtype=torch.float64)
    return 0.2 * 12**0.5 * newton_schulz(outputs * strengths @ inputs.mT)


def extremes(updates: Sequence[torch.Tensor]) -> str:
    """Say how far the singular values of these updates reach, and where the largest of a healthy one lies."""
    import torch

    reach = [torch.linalg.svdvals(update.double()) / (0.2 * max(update.shape) ** 0.5) for update in updates]
    low, high = min(values.min().item() for values in reach), max(values.max().item() for values in reach)
    healthy = f"in a healthy update the largest lies between about {HEALTHY[0]:.1f} and {HEALTHY[1]:.1f}"
    return f"Singular values / (0.2 sqrt(max(A, B))): from {low:.1g} to {high:.2g}; {healthy}."


PUZZLE = Puzzle(
    function="alarm",
    trial=trial,
    praise=lambda facts: f"silent for the healthy optimizer, and it rings where it should ({'; '.join(facts[0][1:])}).",
    hints=(
        "What must be true of the singular values of a healthy update, whatever the momentum was?",
        "Divide them by the scale, 0.2 * sqrt(max(A, B)). Five quintics bring the strong directions to between "
        f"{HEALTHY[0]:.1f} and {HEALTHY[1]:.1f}, but a very weak direction may stay weak. The strongest never does.",
        "Take torch.linalg.svdvals of the update divided by the scale, and ring if the largest is below 0.5 or above "
        "1.25. Leave the smallest alone, because it depends on the momentum.",
    ),
    goal="Detect a broken optimizer from one update of one matrix, without a reference to compare it with.",
    dp=2,
    tp=2,
)


# ---- The solution -----------------------------------------------------------------------------------------


def alarm(update: torch.Tensor) -> bool:
    """Return whether `update` [A, B] is not what orthogonalization leaves."""
    import torch

    scale = 0.2 * max(update.shape) ** 0.5
    largest = torch.linalg.matrix_norm(update.double(), 2) / scale  # the largest singular value
    return bool(largest < 0.5 or largest > 1.25)
