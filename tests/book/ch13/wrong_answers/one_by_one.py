# expect: rank 0 made 24 collectives, and 1 are enough: fill the room.
# Never too large, and never done.
def step_in_waves(group, momentum, parameters, lr, room):
    rows = parameters.view(group.size, -1)
    for start in range(len(momentum)):
        rows[:, start].sub_(group.all_gather(momentum[start : start + 1], "momentum"), alpha=lr)
