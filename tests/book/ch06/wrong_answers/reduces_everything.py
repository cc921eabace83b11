# expect: over budget: with 8 elements, rank 0 keeps 8 elements of state, and 2 are enough
# Plain data parallelism: right, as many bytes as allowed, and four copies of the momentum.
def sharded_step(group, gradient, parameters, state, lr, mu):
    mean = group.all_reduce(gradient, "gradients") / group.size
    state["momentum"] = mu * state.get("momentum", 0) + mean
    return parameters - lr * state["momentum"]
