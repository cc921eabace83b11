# expect: world 2: you name B. A is better at its own best learning rate
import math


def fair_race(train, lrs):
    def both(lr):
        total = sum(train(name, lr, seed) for name in "AB" for seed in range(3))
        return total if math.isfinite(total) else math.inf

    lr = min(lrs, key=both)
    wins = sum(train("A", lr, seed) < train("B", lr, seed) for seed in range(10, 18))
    return {8: "A", 0: "B"}.get(wins, "undecided")
