"""Take turns on the clock: acts that are timed in one run, round by round, so that all of them see the same machine.

Kept are ratios within a round, and medians over rounds: what slows the machine down for a while slows all of them down.
Needs no torch, but for a GPU's turn.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence


def shuffled(names: Iterable[str], round_number: int) -> list[str]:
    """Return the names in the order in which this round measures them: random, the same on all ranks.

    Every second round runs backwards, so that nobody is favoured by drift. In a fixed order it would not do: whoever
    always follows the same one finds its caches, and the tokens that the link has saved up.
    """
    order = list(names)
    random.Random(f"pair {round_number // 2}").shuffle(order)
    return order[::-1] if round_number % 2 else order


def clocked(act: Callable[[], object]) -> float:
    """Return the seconds that `act()` takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def ended(act: Callable[[], object], device: str) -> Callable[[], object]:
    """Return `act`, ended when it returns: on "cuda" it only asks for work, and the clock would stop before that."""
    if device != "cuda":
        return act
    import torch

    def to_the_end() -> None:
        act()
        torch.cuda.synchronize()

    return to_the_end


def take_turns(
    acts: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 1,
    before: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Let every act have its turn in each round, in `shuffled` order; return {name: seconds, one per round}.

    warm_up: rounds before those, which are forgotten. before: called with the act's name ahead of its turn, while the
    clock stands: the place for a barrier, or for the gradients of the next step. What must have ended when the clock
    stops belongs into the act (a barrier; a GPU's work, by `ended`). With ranks, all call this together.
    """
    seconds: dict[str, list[float]] = {name: [] for name in acts}
    for number in range(warm_up + rounds):
        for name in shuffled(acts, number):
            before(name)
            seconds[name].append(clocked(acts[name]))
    return {name: taken[warm_up:] for name, taken in seconds.items()}


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return {name: median}."""
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return mine / theirs, round by round. Raises ValueError where one of them has more rounds."""
    return [one / other for one, other in zip(mine, theirs, strict=True)]
