# expect: world 1: you name A. B is better, but its best learning rate is ten times A's


def fair_race(train, lrs):
    lr = lrs[len(lrs) // 2]
    wins = sum(train("A", lr, seed) < train("B", lr, seed) for seed in range(8))
    return {8: "A", 0: "B"}.get(wins, "undecided")
