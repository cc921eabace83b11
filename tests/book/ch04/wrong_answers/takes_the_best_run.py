# expect: world 3: you name B. A is better, and now and then a run of B is lucky
import math


def fair_race(train, lrs):
    best = {name: min(train(name, lr, seed) for lr in lrs[:-1] for seed in range(6)) for name in "AB"}
    if math.isclose(best["A"], best["B"], abs_tol=0.03):
        return "undecided"
    return min(best, key=best.get)
