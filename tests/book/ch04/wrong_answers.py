"""Wrong answers to the puzzle of chapter 4: above each stands what its reader must be told."""

import functools
import math
from statistics import fmean, median


def finite(train):
    """Return `train` with an infinite loss where a run diverges."""
    return lambda name, lr, seed: found if math.isfinite(found := train(name, lr, seed)) else math.inf


def best_rates(train, lrs, middle=median, seeds=range(3)):
    """Return {name: the learning rate with the least loss in the middle of these seeds}."""
    return {name: min(lrs, key=lambda lr: middle(train(name, lr, seed) for seed in seeds)) for name in "AB"}


def judged(train, lr, seeds):
    """Return whoever is better on every seed. lr: {name: its learning rate}."""
    wins = sum(train("A", lr["A"], seed) < train("B", lr["B"], seed) for seed in seeds)
    return {len(seeds): "A", 0: "B"}.get(wins, "undecided")


# expect: world 1: you say "undecided". B is better
def claims_nothing(train, lrs):
    return "undecided"


# expect: world 6: you say "undecided". B is better, and diverges at the largest learning rate
def compares_with_nan(train, lrs):
    best = best_rates(train, lrs)
    wins = [train("A", best["A"], seed) < train("B", best["B"], seed) for seed in range(10, 18)]
    losses = [train("A", best["A"], seed) > train("B", best["B"], seed) for seed in range(10, 18)]
    return "A" if all(wins) else "B" if all(losses) else "undecided"


# expect: world 1: you name B on the seeds that its learning rate was chosen on, where luck flatters it
def judges_carefully_where_it_chose(train, lrs):
    train = functools.cache(finite(train))
    return judged(train, best_rates(train, lrs, fmean, range(6)), range(6))


# expect: world 4: you name B. B is worse and noisier, and the best of many noisy numbers is flattered
def judges_where_it_chose(train, lrs):
    train = finite(train)
    best = {name: min(fmean(train(name, lr, seed) for seed in range(3)) for lr in lrs) for name in "AB"}
    return "undecided" if abs(best["A"] - best["B"]) < 0.05 else min(best, key=best.get)


# expect: A and B are equally good there, and very noisy
def names_the_smaller_mean(train, lrs):
    train = finite(train)
    lr = best_rates(train, lrs, fmean)
    return min("AB", key=lambda name: fmean(train(name, lr[name], seed) for seed in range(50, 58)))


# expect: over budget: more than 100 runs in world 1; 64 are enough
def runs_everything(train, lrs):
    losses = {name: [train(name, lr, seed) for lr in lrs for seed in range(20)] for name in "AB"}
    return min(losses, key=lambda name: min(losses[name]))


# expect: world 1: you name A. B is better, but its best learning rate is ten times A's
def shares_one_learning_rate(train, lrs):
    return judged(train, dict.fromkeys("AB", lrs[len(lrs) // 2]), range(8))


# expect: world 2: you name B. A is better at its own best learning rate
def shares_the_best_on_average(train, lrs):
    train = finite(train)
    lr = min(lrs, key=lambda lr: sum(train(name, lr, seed) for name in "AB" for seed in range(3)))
    return judged(train, dict.fromkeys("AB", lr), range(10, 18))


# expect: world 3: you name B. A is better, and now and then a run of B is lucky
def takes_the_best_run(train, lrs):
    best = {name: min(train(name, lr, seed) for lr in lrs[:-1] for seed in range(6)) for name in "AB"}
    return "undecided" if math.isclose(best["A"], best["B"], abs_tol=0.03) else min(best, key=best.get)


# expect: you name B on 3 fresh seeds; of equals, the same one wins on all of so few in 1 of 4 races
def trusts_three_seeds(train, lrs):
    return judged(finite(train), best_rates(finite(train), lrs), range(3, 6))


# expect: runs for B and 14 for A; the one that is tuned harder looks better
def tunes_one_harder(train, lrs):
    train = finite(train)
    a = best_rates(train, sorted(lrs)[1:4], seeds=range(2))["A"]
    b = min(lrs, key=lambda lr: median(train("B", lr, seed) for seed in range(5)))
    return judged(train, {"A": a, "B": b}, range(10, 18))
