# expect: over budget: with shards of 50 elements and 320 bytes of room, rank 0 had 800 bytes of new tensors alive
# The whole momentum at once: right, short, and too large.
def step_in_waves(group, momentum, parameters, lr, room):
    parameters.sub_(group.all_gather(momentum, "momentum"), alpha=lr)
