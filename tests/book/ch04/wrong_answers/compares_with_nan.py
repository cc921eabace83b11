# expect: world 6: you say "undecided". B is better, and diverges at the largest learning rate
from statistics import median


def fair_race(train, lrs):
    best = {name: min(lrs, key=lambda lr: median(train(name, lr, seed) for seed in range(3))) for name in "AB"}
    wins = [train("A", best["A"], seed) < train("B", best["B"], seed) for seed in range(10, 18)]
    losses = [train("A", best["A"], seed) > train("B", best["B"], seed) for seed in range(10, 18)]
    return "A" if all(wins) else "B" if all(losses) else "undecided"
