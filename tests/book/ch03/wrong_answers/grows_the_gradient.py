# expect: step 2 changed the gradient of up.weight
import torch


def step(weights, gradients, state, tools, lr, momentum, weight_decay):
    for name, weight in weights.items():
        gradient = gradients[name]
        if weight.ndim != 2 or name.startswith(("embedding", "head")):
            tools.adamw(name, weight, gradient)
            continue
        m = gradient.add_(state.get(name, torch.zeros_like(weight)), alpha=momentum)
        state[name] = m.clone()
        o = tools.newton_schulz(gradient + momentum * m)
        weight.mul_(1 - lr * weight_decay)
        weight.add_(o, alpha=-lr * 0.2 * max(weight.shape) ** 0.5)
