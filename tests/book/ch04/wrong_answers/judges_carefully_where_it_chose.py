# expect: world 1: you name B on the seeds that its learning rate was chosen on, where luck flatters it
import math
from statistics import fmean


def fair_race(train, lrs):
    losses = {}
    for name in "AB":
        runs = [[train(name, lr, seed) for seed in range(6)] for lr in lrs]
        losses[name] = min((found for found in runs if math.isfinite(sum(found))), key=fmean)
    wins = sum(a < b for a, b in zip(losses["A"], losses["B"], strict=True))
    return {6: "A", 0: "B"}.get(wins, "undecided")
