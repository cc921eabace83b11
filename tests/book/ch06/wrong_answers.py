"""Wrong answers to the puzzle of chapter 6: above each stands what its reader must be told."""

import torch


def padded(group, x):
    return torch.cat([x, x.new_zeros(-len(x) % group.size)])


def own(group, x):
    return padded(group, x).chunk(group.size)[group.rank]


def mean_of(group, gradient):
    whole = padded(group, gradient)
    shard = whole.new_empty(len(whole) // group.size)
    return group.reduce_scatter(whole, shard, "gradients") / group.size


def step(group, mean, parameters, state, lr, mu):
    """Take the step of a shard, which is right where the mean of its gradients is, and gather the parameters."""
    state["momentum"] = mu * state.get("momentum", 0) + mean
    return group.all_gather(own(group, parameters) - lr * state["momentum"], "parameters")[: len(parameters)]


# expect: sharded_step's result has shape (8,), and (10,) is wanted.
# Two shards of two and a rest that nobody has: padding was forgotten, and n rounded down.
def drops_the_rest(group, gradient, parameters, state, lr, mu):
    whole = len(parameters) // group.size * group.size
    return step(group, mean_of(group, gradient[:whole].clone()), parameters[:whole], state, lr, mu)


# expect: after step 2, where one process has
# Without state the first step is right, and no other.
def forgets_its_momentum(group, gradient, parameters, state, lr, mu):
    return step(group, mean_of(group, gradient), parameters, {}, lr, mu)


# expect: with 8 elements, rank 0 has 80 at index 0 after step 1, where one process has 95.
# A reduce-scatter gives the sum.
def forgets_the_mean(group, gradient, parameters, state, lr, mu):
    return step(group, mean_of(group, gradient) * group.size, parameters, state, lr, mu)


# expect: over budget: with 8 elements, rank 0 keeps 8 elements of state, and 2 are enough. Memory counts whole
# The momentum is a shard to look at, and a whole vector in memory.
def keeps_a_view(group, gradient, parameters, state, lr, mu):
    new = step(group, mean_of(group, gradient), parameters, state, lr, mu)
    shard = own(group, torch.zeros_like(padded(group, parameters)))
    state["momentum"] = shard.copy_(state["momentum"])
    return new


# expect: over budget: with 8 elements, rank 0 sent 72 bytes in 2 collectives per step; 48 in 2 are enough.
# The state is cut, but the gradient is summed for everybody.
def reduces_and_then_gathers(group, gradient, parameters, state, lr, mu):
    mean = own(group, group.all_reduce(gradient, "gradients")) / group.size
    return step(group, mean, parameters, state, lr, mu)


# expect: over budget: with 8 elements, rank 0 keeps 8 elements of state, and 2 are enough
# Plain data parallelism: right, as many bytes as allowed, and four copies of the momentum.
def reduces_everything(group, gradient, parameters, state, lr, mu):
    mean = group.all_reduce(gradient, "gradients") / group.size
    state["momentum"] = mu * state.get("momentum", 0) + mean
    return parameters - lr * state["momentum"]
