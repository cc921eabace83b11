# expect: sharded_step's result has shape (8,), and (10,) is wanted.
# Two shards of two and a rest that nobody has: padding was forgotten, and n rounded down.
def sharded_step(group, gradient, parameters, state, lr, mu):
    size = len(parameters) // group.size
    mean = gradient.new_empty(size)
    group.reduce_scatter(gradient[: group.size * size].clone(), mean, "gradients")
    mean /= group.size
    state["momentum"] = mu * state.get("momentum", 0) + mean
    shard = parameters[group.rank * size :][:size] - lr * state["momentum"]
    return group.all_gather(shard, "parameters")
