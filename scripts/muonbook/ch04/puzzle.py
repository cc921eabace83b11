"""Chapter 4's puzzle: which of two optimizers is better, each at its best learning rate, if losses are noisy?

Nothing is trained: six made-up worlds answer as trainings do. The solution is `fair_race`, at the end of this file.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from muonbook.puzzles import Puzzle, insist

if TYPE_CHECKING:
    from distmuon.launch import World

LRS = tuple(0.001 * 2**n for n in range(8))
BUDGET, UNEVEN, ENOUGH = 100, 1.25, 5  # runs per world; of one for each of the other's, at most; seeds to judge on
ANSWERS = ("A", "B", "undecided")


class Racer(NamedTuple):
    """A made-up optimizer. loss: its mean held-out loss in nats at its best lr. bend: what it loses per doubling away
    from there, squared. noise: its deviation from run to run. luck: what one run in eight is better by.
    """

    loss: float
    lr: float
    bend: float
    noise: float
    luck: float = 0.0
    diverges: float = math.inf  # from this learning rate on


class Course(NamedTuple):
    """A made-up world. shared: noise that a seed gives to both. right: the answers to it. lesson: for the others.

    balanced: whom a seed's own noise favours alternates as the Thue–Morse sequence does, which never agrees three times
    in a row: equals then do not look different on any five consecutive seeds. falling: in what order lrs come.
    """

    racers: dict[str, Racer]
    shared: float
    right: tuple[str, ...]
    lesson: str
    balanced: bool = False
    falling: bool = False


COURSES = (
    Course(
        {"A": Racer(1.5, 0.004, 0.02, 0.01), "B": Racer(1.4, 0.04, 0.2, 0.01)},
        0.1,
        ("B",),
        "B is better, but its best learning rate is ten times A's: let each race at its own.",
    ),
    Course(
        {"A": Racer(1.4, 0.004, 0.03, 0.01), "B": Racer(1.5, 0.04, 0.1, 0.01)},
        0.2,
        ("A",),
        "A is better at its own best learning rate, and by more than noise if you compare the two seed by seed.",
    ),
    Course(
        {"A": Racer(1.4, 0.011, 0.05, 0.01), "B": Racer(1.45, 0.011, 0.02, 0.01, luck=0.2)},
        0.0,
        ("A", "undecided"),
        "A is better, and now and then a run of B is lucky: the best single run of many tells of luck.",
    ),
    Course(
        {"A": Racer(1.4, 0.011, 0.02, 0.01), "B": Racer(1.5, 0.011, 0.001, 0.4)},
        0.0,
        ("A", "undecided"),
        "B is worse and noisier, and the best of many noisy numbers is flattered: choose the learning rate on some "
        "seeds, and judge on others.",
    ),
    Course(
        {"A": Racer(1.4, 0.011, 0.1, 0.2), "B": Racer(1.4, 0.011, 0.1, 0.2)},
        0.0,
        ("undecided",),
        "A and B are equally good there, and very noisy: claim nothing that some seeds contradict.",
        balanced=True,
    ),
    Course(
        {"A": Racer(1.5, 0.008, 0.05, 0.01), "B": Racer(1.4, 0.016, 0.05, 0.01, diverges=0.1)},
        0.1,
        ("B",),
        "B is better, and diverges at the largest learning rate: nothing is less than nan, so count it as infinity "
        "before you compare.",
        falling=True,
    ),
)


class Seen(NamedTuple):
    """What one world has seen. answer: the reader's. runs: (name, lr, seed), in order."""

    answer: str
    runs: list[tuple[str, float, int]]


def loss_of(number: int, name: str, lr: float, seed: int) -> float:
    """Return the held-out loss of one run in world `number`: the same for the same run, nan where it diverges."""
    course = COURSES[number]
    racer = course.racers[name]
    if lr >= racer.diverges:
        return math.nan
    draw = random.Random(f"{number} {name} {lr!r} {seed}")  # the same in every process
    noise = draw.gauss(0, racer.noise)
    if course.balanced:
        noise = math.copysign(noise, (-1) ** (seed.bit_count() + (name == "B")))
    shared = random.Random(f"{number} {seed}").gauss(0, course.shared)
    luck = racer.luck if draw.random() < 1 / 8 else 0.0
    return racer.loss + racer.bend * math.log2(lr / racer.lr) ** 2 + noise + shared - luck


def trial(world: World, fair_race: Callable[..., Any]) -> list[Seen]:
    """Let the reader's function race A against B in every world."""
    seen = []
    for number, course in enumerate(COURSES):
        runs: list[tuple[str, float, int]] = []

        def train(name: str, lr: float, seed: int, number: int = number, runs: list = runs) -> float:
            good = name in ("A", "B") and lr in LRS and isinstance(seed, int)
            wanted = 'the name is "A" or "B", the learning rate one of lrs, the seed a whole number'
            insist("" if good else f"train({name!r}, {lr!r}, {seed!r}): {wanted}.")
            runs.append((name, lr, seed))
            insist(
                f"over budget: more than {BUDGET} runs in world {number + 1}; 64 are enough."
                if len(runs) > BUDGET
                else ""
            )
            return loss_of(number, name, lr, seed)

        answer = fair_race(train, list(LRS[::-1] if course.falling else LRS))
        wanted = ", ".join(map(repr, ANSWERS))
        insist("" if answer in ANSWERS else f"fair_race returned {answer!r}, and one of {wanted} is wanted.")
        seen.append(Seen(answer, runs))
    return seen


def fresh_seeds(runs: list[tuple[str, float, int]]) -> list[int]:
    """Return the seeds that both have run, each at one learning rate: no choice was made on them."""
    tried: dict[tuple[int, str], set[float]] = {}
    for name, lr, seed in runs:
        tried.setdefault((seed, name), set()).add(lr)
    seeds = sorted({seed for seed, _ in tried})
    return [seed for seed in seeds if all(len(tried.get((seed, name), ())) == 1 for name in "AB")]


def judge(evidence: list[list[Seen]]) -> list[str]:
    """Return what is wrong: wrong winners, uneven tuning, claims on stale or few seeds, then timidity."""
    wrong, uneven, stale, timid = [], [], [], []
    for number, (course, (answer, runs)) in enumerate(zip(COURSES, evidence[0], strict=True), start=1):
        counts = {name: sum(run[0] == name for run in runs) for name in "AB"}
        fresh = len(fresh_seeds(runs))
        if answer not in course.right:
            if answer == "undecided":
                timid.append(f'world {number}: you say "undecided". {course.lesson}')
            else:
                wrong.append(f"world {number}: you name {answer}. {course.lesson}")
        if max(counts.values()) > UNEVEN * min(counts.values()):
            more, less = sorted(counts, key=lambda name: -counts[name])
            uneven.append(
                f"world {number}: {counts[more]} runs for {more} and {counts[less]} for {less}; whoever is tuned "
                "harder looks better, so spend the same on both."
            )
        elif answer != "undecided" and fresh == 0:
            stale.append(
                f"world {number}: you name {answer} on the seeds that its learning rate was chosen on, where luck "
                "flatters it; judge on seeds that no choice has seen."
            )
        elif answer != "undecided" and fresh < ENOUGH:
            chance = f"of equals, the same one wins on all of so few in 1 of {2 ** (fresh - 1)} races"
            if fresh == 1:
                chance = "even of equals, one wins there"
            seeds = f"{fresh} fresh seed{'s' * (fresh > 1)}"
            stale.append(f"world {number}: you name {answer} on {seeds}; {chance}, so judge on {ENOUGH} or more.")
    return [*wrong[:1], *uneven[:1], *stale[:1], *timid[:1]]


def praise(evidence: list[list[Seen]]) -> str:
    """Return what was achieved, with its numbers."""
    named = ", ".join(answer for answer, _ in evidence[0])
    most = max(len(runs) for _, runs in evidence[0])
    judged = min(len(fresh_seeds(runs)) for answer, runs in evidence[0] if answer != "undecided")
    return f"{len(COURSES)} worlds, {named}; {most} runs in each at most, and every claim made on {judged} fresh seeds."


PUZZLE = Puzzle(
    name="a fair race",
    function="fair_race",
    dp=1,
    tp=1,
    trial=trial,
    judge=judge,
    praise=praise,
    hints=(
        "Two questions, two sets of seeds: which learning rate suits each, and then who is better. What may a lucky "
        "run decide in the first, and what in the second?",
        "Choose each one's learning rate by its median over three seeds, nan counted as infinity. Then run both, each "
        "at its own, on eight seeds that you have not used.",
        'Compare in pairs, seed by seed: if all(a < b for a, b in pairs), it is "A"; if all(b < a for a, b in pairs), '
        '"B"; otherwise "undecided". That is 2 * (8 * 3 + 8) runs.',
    ),
)


# ---- The solution -----------------------------------------------------------------------------------------


def fair_race(train: Callable[[str, float, int], float], lrs: Sequence[float]) -> str:
    """Return "A" or "B", whichever has the smaller loss on every fresh seed, each at its best learning rate."""

    def loss(name: str, lr: float, seed: int) -> float:
        found = train(name, lr, seed)
        return found if math.isfinite(found) else math.inf

    def best(name: str) -> float:
        return min(lrs, key=lambda lr: statistics.median(loss(name, lr, seed) for seed in range(3)))

    a, b = best("A"), best("B")
    pairs = [(loss("A", a, seed), loss("B", b, seed)) for seed in range(100, 108)]
    if all(first < second for first, second in pairs):
        return "A"
    return "B" if all(second < first for first, second in pairs) else "undecided"
