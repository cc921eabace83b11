# expect: with shards of 50 elements and 320 bytes of room, rank 0 has
# Half the bytes, and 8 bits are not enough for the numbers of this trial.
import torch


def step_in_waves(group, momentum, parameters, lr, room):
    rows, part = parameters.view(group.size, -1), room // (4 * group.size)
    for start in range(0, len(momentum), part):
        wave = group.all_gather(momentum[start : start + part].to(torch.bfloat16), "momentum")
        rows[:, start : start + part].sub_(wave.view(group.size, -1), alpha=lr)
        del wave
