# expect: A and B are equally good there, and very noisy
import math
from statistics import fmean


def fair_race(train, lrs):
    def mean(name, lr, seeds):
        found = fmean(train(name, lr, seed) for seed in seeds)
        return found if math.isfinite(found) else math.inf

    def best(name):
        return min(lrs, key=lambda lr: mean(name, lr, range(3)))

    fresh = range(50, 58)
    return "A" if mean("A", best("A"), fresh) < mean("B", best("B"), fresh) else "B"
