# expect: with 8 elements, rank 0 has 80 at index 0 after step 1, where one process has 95.
# A reduce-scatter gives the sum.
import torch


def sharded_step(group, gradient, parameters, state, lr, mu):
    n, size = len(parameters), -(-len(parameters) // group.size)
    padding = parameters.new_zeros(group.size * size - n)
    total = group.reduce_scatter(torch.cat([gradient, padding]), gradient.new_empty(size), "gradients")
    state["momentum"] = mu * state.get("momentum", 0) + total
    shard = torch.cat([parameters, padding])[group.rank * size :][:size] - lr * state["momentum"]
    return group.all_gather(shard, "parameters")[:n]
