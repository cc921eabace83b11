"""Wrong answers to the puzzle of chapter 13: above each stands what its reader must be told."""

import torch


# expect: over budget: with shards of 50 elements and 320 bytes of room, rank 0 had 800 bytes of new tensors alive
# The whole momentum at once: right, short, and too large.
def gathers_everything(group, momentum, parameters, lr, room):
    parameters.sub_(group.all_gather(momentum, "momentum"), alpha=lr)


# expect: with shards of 50 elements and 320 bytes of room, rank 0 has
# Half the bytes, and 8 bits are not enough for the numbers of this trial.
def in_bf16(group, momentum, parameters, lr, room):
    rows, part = parameters.view(group.size, -1), room // (4 * group.size)
    for start in range(0, len(momentum), part):
        wave = group.all_gather(momentum[start : start + part].to(torch.bfloat16), "momentum")
        rows[:, start : start + part].sub_(wave.view(group.size, -1), alpha=lr)
        del wave


# expect: with shards of 50 elements and 320 bytes of room, rank 0 has 929 at index 20 of the parameters, not 979.5.
# A wave is taken for a run of the parameters; it is a part of every shard.
def joins_the_parts(group, momentum, parameters, lr, room):
    part, done = room // (4 * group.size), 0
    for start in range(0, len(momentum), part):
        wave = group.all_gather(momentum[start : start + part], "momentum")
        parameters[done : done + len(wave)].sub_(wave, alpha=lr)
        done += part
        del wave


# expect: over budget: with shards of 50 elements and 320 bytes of room, rank 0 had 640 bytes of new tensors alive
# Every wave fits; but the name holds the last one while the next is gathered.
def keeps_the_last_wave(group, momentum, parameters, lr, room):
    rows, part = parameters.view(group.size, -1), room // (4 * group.size)
    for start in range(0, len(momentum), part):
        wave = group.all_gather(momentum[start : start + part], "momentum")
        rows[:, start : start + part].sub_(wave.view(group.size, -1), alpha=lr)


# expect: rank 0 made 24 collectives, and 1 are enough: fill the room.
# Never too large, and never done.
def one_by_one(group, momentum, parameters, lr, room):
    rows = parameters.view(group.size, -1)
    for start in range(len(momentum)):
        rows[:, start].sub_(group.all_gather(momentum[start : start + 1], "momentum"), alpha=lr)


# expect: over budget: with shards of 50 elements and 320 bytes of room, rank 0 had 640 bytes of new tensors alive
# lr * wave is a tensor of its own.
def scales_first(group, momentum, parameters, lr, room):
    rows, part = parameters.view(group.size, -1), room // (4 * group.size)
    for start in range(0, len(momentum), part):
        wave = group.all_gather(momentum[start : start + part], "momentum").view(group.size, -1)
        rows[:, start : start + part] -= lr * wave
        del wave
