# expect: world 1: you say "undecided". B is better


def fair_race(train, lrs):
    return "undecided"
