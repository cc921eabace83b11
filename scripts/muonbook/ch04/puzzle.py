"""Chapter 4's puzzle: which of two optimizers is better, each at its best learning rate, if losses are noisy?

Nothing is trained: six made-up worlds answer as trainings do. The solution is `fair_race`, at the end of this file.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from muonbook.puzzles import CaseReport, Puzzle, require, unless

if TYPE_CHECKING:
    from distmuon.sharding.grid import Grid

LRS = tuple(0.001 * 2**n for n in range(8))
BUDGET, UNEVEN, ENOUGH = 100, 1.25, 5  # runs per world; of one for each of the other's, at most; seeds to judge on
ANSWERS = ("A", "B", "undecided")


class NoisyOptimizer(NamedTuple):
    """A made-up optimizer. loss: its mean held-out loss in nats at its best lr. bend: what it loses per doubling away
    from there, squared. noise: its deviation from run to run. luck: what one run in eight is better by.
    """

    loss: float
    lr: float
    bend: float
    noise: float
    luck: float = 0.0
    diverges: float = math.inf  # from this learning rate on


class NoisyWorld(NamedTuple):
    """A made-up world. shared: noise that a seed gives to both. right: the answers to it. lesson: for the others.

    balanced: whom a seed's own noise favours alternates as the Thue–Morse sequence does, which never agrees three times
    in a row: equals then do not look different on any five consecutive seeds. falling: in what order lrs come.
    """

    optimizers: dict[str, NoisyOptimizer]
    shared: float
    right: tuple[str, ...]
    lesson: str
    balanced: bool = False
    falling: bool = False


WORLDS = (
    NoisyWorld(
        {"A": NoisyOptimizer(1.5, 0.004, 0.02, 0.01), "B": NoisyOptimizer(1.4, 0.04, 0.2, 0.01)},
        0.1,
        ("B",),
        "B is better, but its best learning rate is ten times A's: let each race at its own.",
    ),
    NoisyWorld(
        {"A": NoisyOptimizer(1.4, 0.004, 0.03, 0.01), "B": NoisyOptimizer(1.5, 0.04, 0.1, 0.01)},
        0.2,
        ("A",),
        "A is better at its own best learning rate, and by more than noise if you compare the two seed by seed.",
    ),
    NoisyWorld(
        {"A": NoisyOptimizer(1.4, 0.011, 0.05, 0.01), "B": NoisyOptimizer(1.45, 0.011, 0.02, 0.01, luck=0.2)},
        0.0,
        ("A", "undecided"),
        "A is better, and now and then a run of B is lucky: the best single run of many tells of luck.",
    ),
    NoisyWorld(
        {"A": NoisyOptimizer(1.4, 0.011, 0.02, 0.01), "B": NoisyOptimizer(1.5, 0.011, 0.001, 0.4)},
        0.0,
        ("A", "undecided"),
        "B is worse and noisier, and the best of many noisy numbers is flattered: choose the learning rate on some "
        "seeds, and judge on others.",
    ),
    NoisyWorld(
        {"A": NoisyOptimizer(1.4, 0.011, 0.1, 0.2), "B": NoisyOptimizer(1.4, 0.011, 0.1, 0.2)},
        0.0,
        ("undecided",),
        "A and B are equally good there, and very noisy: claim nothing that some seeds contradict.",
        balanced=True,
    ),
    NoisyWorld(
        {"A": NoisyOptimizer(1.5, 0.008, 0.05, 0.01), "B": NoisyOptimizer(1.4, 0.016, 0.05, 0.01, diverges=0.1)},
        0.1,
        ("B",),
        "B is better, and diverges at the largest learning rate: nothing is less than nan, so count it as infinity "
        "before you compare.",
        falling=True,
    ),
)


def loss_of(number: int, name: str, lr: float, seed: int) -> float:
    """Return the held-out loss of one run in world `number`: the same for the same run, nan where it diverges."""
    world = WORLDS[number]
    optimizer = world.optimizers[name]
    if lr >= optimizer.diverges:
        return math.nan
    draw = random.Random(f"{number} {name} {lr!r} {seed}")  # the same in every process
    noise = draw.gauss(0, optimizer.noise)
    if world.balanced:
        noise = math.copysign(noise, (-1) ** (seed.bit_count() + (name == "B")))
    shared = random.Random(f"{number} {seed}").gauss(0, world.shared)
    luck = optimizer.luck if draw.random() < 1 / 8 else 0.0
    return optimizer.loss + optimizer.bend * math.log2(lr / optimizer.lr) ** 2 + noise + shared - luck


def trial(grid: Grid, fair_race: Callable[..., Any]) -> Iterator[CaseReport]:
    """Let the reader's function race A against B in every world."""
    for number, world in enumerate(WORLDS):
        runs: list[tuple[str, float, int]] = []

        def train(name: str, lr: float, seed: int, number: int = number, runs: list = runs) -> float:
            good = name in ("A", "B") and lr in LRS and isinstance(seed, int)
            wanted = 'the name is "A" or "B", the learning rate one of lrs, the seed a whole number'
            require(good, f"train({name!r}, {lr!r}, {seed!r}): {wanted}.")
            runs.append((name, lr, seed))
            require(len(runs) <= BUDGET, f"over budget: more than {BUDGET} runs in world {number + 1}; 64 are enough.")
            return loss_of(number, name, lr, seed)

        answer = fair_race(train, list(LRS[::-1] if world.falling else LRS))
        wanted = ", ".join(map(repr, ANSWERS))
        require(answer in ANSWERS, f"fair_race returned {answer!r}, and one of {wanted} is wanted.")
        yield CaseReport(_objections(number, answer, runs), (answer, len(runs), len(fresh_seeds(runs))))


def fresh_seeds(runs: list[tuple[str, float, int]]) -> list[int]:
    """Return the seeds that both have run, each at one learning rate: no choice was made on them."""
    tried: dict[tuple[int, str], set[float]] = {}
    for name, lr, seed in runs:
        tried.setdefault((seed, name), set()).add(lr)
    seeds = sorted({seed for seed, _ in tried})
    return [seed for seed in seeds if all(len(tried.get((seed, name), ())) == 1 for name in "AB")]


def _objections(number: int, answer: str, runs: list[tuple[str, float, int]]) -> list[str]:
    """Return what is wrong: a wrong winner, uneven tuning, a claim on stale or few seeds, timidity."""
    world, where = WORLDS[number], f"world {number + 1}:"
    right, claims = answer in world.right, answer != "undecided"
    fewer, more = sorted((sum(run[0] == name for run in runs), name) for name in "AB")
    even = more[0] <= UNEVEN * fewer[0]
    fresh = len(fresh_seeds(runs))
    chance = f"of equals, the same one wins on all of so few in 1 of {2 ** (fresh - 1)} races"
    if fresh == 1:
        chance = "even of equals, one wins there"
    seeds = f"{fresh} fresh seed{'s' if fresh > 1 else ''}; {chance}, so judge on {ENOUGH} or more."
    if fresh == 0:
        seeds = (
            "the seeds that its learning rate was chosen on, where luck "
            "flatters it; judge on seeds that no choice has seen."
        )
    return [
        unless(right or not claims, f"{where} you name {answer}. {world.lesson}"),
        unless(
            even,
            f"{where} {more[0]} runs for {more[1]} and {fewer[0]} for {fewer[1]}; the one that is tuned "
            "harder looks better, so spend the same on both.",
        ),
        unless(fresh >= ENOUGH or not claims or not even, f"{where} you name {answer} on {seeds}"),
        unless(right or claims, f'{where} you say "undecided". {world.lesson}'),
    ]


def praise(facts: list[list[tuple[str, int, int]]]) -> str:
    """Return what was achieved, with its numbers."""
    named, runs, fresh = zip(*facts[0], strict=True)
    judged = min(seeds for answer, seeds in zip(named, fresh, strict=True) if answer != "undecided")
    return (
        f"{len(WORLDS)} worlds, {', '.join(named)}; {max(runs)} runs in each at most, "
        f"and every claim made on {judged} fresh seeds."
    )


PUZZLE = Puzzle(
    function="fair_race",
    trial=trial,
    praise=praise,
    hints=(
        "Two questions, two sets of seeds: which learning rate suits each, and then who is better. What may a lucky "
        "run decide in the first, and what in the second?",
        "Choose each one's learning rate by its median over three seeds, nan counted as infinity. Then run both, each "
        "at its own, on eight seeds that you have not used.",
        'Compare in pairs, seed by seed: if all(a < b for a, b in pairs), it is "A"; if all(b < a for a, b in pairs), '
        '"B"; otherwise "undecided". That is 2 * (8 * 3 + 8) runs.',
    ),
    goal="Decide which of two optimizers is better when losses are noisy and each has its own best learning rate.",
)


# ---- The solution -----------------------------------------------------------------------------------------


def fair_race(train: Callable[[str, float, int], float], lrs: Sequence[float]) -> str:
    """Return "A" or "B", whichever loses less on every fresh seed, each at its best rate."""

    def loss(name: str, lr: float, seed: int) -> float:
        final = train(name, lr, seed)
        return final if math.isfinite(final) else math.inf

    def best(name: str) -> float:
        return min(lrs, key=lambda lr: statistics.median(loss(name, lr, seed) for seed in range(3)))

    a, b = best("A"), best("B")
    pairs = [(loss("A", a, seed), loss("B", b, seed)) for seed in range(100, 108)]
    if all(first < second for first, second in pairs):
        return "A"
    return "B" if all(second < first for first, second in pairs) else "undecided"
