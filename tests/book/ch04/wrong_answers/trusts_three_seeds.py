# expect: you name B on 3 fresh seeds; of equals, the same one wins on all of so few in 1 of 4 races
import math
from statistics import median


def fair_race(train, lrs):
    def loss(name, lr, seed):
        found = train(name, lr, seed)
        return found if math.isfinite(found) else math.inf

    best = {name: min(lrs, key=lambda lr: median(loss(name, lr, seed) for seed in range(3))) for name in "AB"}
    wins = sum(loss("A", best["A"], seed) < loss("B", best["B"], seed) for seed in range(3, 6))
    return {3: "A", 0: "B"}.get(wins, "undecided")
