# expect: over budget: with shards of 50 elements and 320 bytes of room, rank 0 had 640 bytes of new tensors alive
# lr * wave is a tensor of its own.
def step_in_waves(group, momentum, parameters, lr, room):
    rows, part = parameters.view(group.size, -1), room // (4 * group.size)
    for start in range(0, len(momentum), part):
        wave = group.all_gather(momentum[start : start + part], "momentum").view(group.size, -1)
        rows[:, start : start + part] -= lr * wave
        del wave
