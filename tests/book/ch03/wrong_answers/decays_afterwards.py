# expect: rank 0: after step 1, up.weight [14x6] is off by
import torch


def step(weights, gradients, state, tools, lr, momentum, weight_decay):
    for name, weight in weights.items():
        gradient = gradients[name]
        if weight.ndim != 2 or name.startswith(("embedding", "head")):
            tools.adamw(name, weight, gradient)
            continue
        m = state.setdefault(name, torch.zeros_like(weight))
        m.mul_(momentum).add_(gradient)
        o = tools.newton_schulz(gradient + momentum * m)
        weight.add_(o, alpha=-lr * 0.2 * max(weight.shape) ** 0.5)
        weight.mul_(1 - lr * weight_decay)
