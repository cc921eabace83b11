# expect: world 4: you name B. B is worse and noisier, and the best of many noisy numbers is flattered
import math
from statistics import fmean


def fair_race(train, lrs):
    best = {}
    for name in "AB":
        means = [fmean(train(name, lr, seed) for seed in range(3)) for lr in lrs]
        best[name] = min(mean for mean in means if math.isfinite(mean))
    if abs(best["A"] - best["B"]) < 0.05:
        return "undecided"
    return min(best, key=best.get)
