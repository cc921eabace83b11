# expect: runs for B and 14 for A; the one that is tuned harder looks better
import math
from statistics import median


def fair_race(train, lrs):
    def loss(name, lr, seed):
        found = train(name, lr, seed)
        return found if math.isfinite(found) else math.inf

    a = min(sorted(lrs)[1:4], key=lambda lr: median(loss("A", lr, seed) for seed in range(2)))
    b = min(lrs, key=lambda lr: median(loss("B", lr, seed) for seed in range(5)))
    wins = sum(loss("A", a, seed) < loss("B", b, seed) for seed in range(10, 18))
    return {8: "A", 0: "B"}.get(wins, "undecided")
