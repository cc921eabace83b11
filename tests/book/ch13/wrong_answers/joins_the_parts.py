# expect: with shards of 50 elements and 320 bytes of room, rank 0 has 929 at index 20 of the parameters, not 979.5.
# A wave is taken for a run of the parameters; it is a part of every shard.
def step_in_waves(group, momentum, parameters, lr, room):
    part, done = room // (4 * group.size), 0
    for start in range(0, len(momentum), part):
        wave = group.all_gather(momentum[start : start + part], "momentum")
        parameters[done : done + len(wave)].sub_(wave, alpha=lr)
        done += part
        del wave
