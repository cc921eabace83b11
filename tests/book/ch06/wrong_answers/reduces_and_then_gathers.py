# expect: over budget: with 8 elements, rank 0 sent 72 bytes in 2 collectives per step; 48 in 2 are enough.
# The state is cut, but the gradient is summed for everybody.
import torch


def sharded_step(group, gradient, parameters, state, lr, mu):
    n, size = len(parameters), -(-len(parameters) // group.size)
    mine = slice(group.rank * size, (group.rank + 1) * size)
    padding = parameters.new_zeros(group.size * size - n)
    mean = group.all_reduce(torch.cat([gradient, padding]), "gradients")[mine] / group.size
    state["momentum"] = mu * state.get("momentum", 0) + mean
    shard = torch.cat([parameters, padding])[mine] - lr * state["momentum"]
    return group.all_gather(shard, "parameters")[:n]
