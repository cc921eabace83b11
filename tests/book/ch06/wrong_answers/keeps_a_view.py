# expect: over budget: with 8 elements, rank 0 keeps 8 elements of state, and 2 are enough. Memory counts whole
# The momentum is a shard to look at, and a whole vector in memory.
import torch


def sharded_step(group, gradient, parameters, state, lr, mu):
    n, size = len(parameters), -(-len(parameters) // group.size)
    padding = parameters.new_zeros(group.size * size - n)
    mean = group.reduce_scatter(torch.cat([gradient, padding]), gradient.new_empty(size), "gradients") / group.size
    whole = torch.zeros(group.size * size)
    shard = whole[group.rank * size :][:size]
    shard += mu * state.get("momentum", 0) + mean
    state["momentum"] = shard
    shard = torch.cat([parameters, padding])[group.rank * size :][:size] - lr * shard
    return group.all_gather(shard, "parameters")[:n]
