# expect: over budget: more than 100 runs in world 1; 64 are enough


def fair_race(train, lrs):
    losses = {name: [train(name, lr, seed) for lr in lrs for seed in range(20)] for name in "AB"}
    return min(losses, key=lambda name: min(losses[name]))
