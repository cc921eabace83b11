"""Wrong answers to the puzzle of chapter 3: above each stands what its reader must be told."""

import torch


def muon(one_step, to_adamw=("embedding", "head")):
    """Return what is right but for the step of one matrix, or for who gets one."""

    def step(weights, gradients, state, tools, lr, momentum, weight_decay):
        for name, weight in weights.items():
            if weight.ndim != 2 or name.startswith(to_adamw):
                tools.adamw(name, weight, gradients[name])
                continue
            m = state.setdefault(name, torch.zeros_like(weight))
            one_step(weight, gradients[name], m, tools.newton_schulz, lr, momentum, weight_decay)

    return step


def rate(lr, weight):
    return -lr * 0.2 * max(weight.shape) ** 0.5


def right(weight, gradient, m, newton_schulz, lr, momentum, weight_decay):
    m.mul_(momentum).add_(gradient)
    weight.mul_(1 - lr * weight_decay)
    weight.add_(newton_schulz(gradient + momentum * m), alpha=rate(lr, weight))


def coupled(weight, gradient, m, newton_schulz, lr, momentum, weight_decay):
    right(weight, gradient + weight_decay * weight, m, newton_schulz, lr, momentum, 0.0)


def decayed_afterwards(weight, gradient, m, newton_schulz, lr, momentum, weight_decay):
    right(weight, gradient, m, newton_schulz, lr, momentum, 0.0)
    weight.mul_(1 - lr * weight_decay)


def without_nesterov(weight, gradient, m, newton_schulz, lr, momentum, weight_decay):
    right(weight, gradient, m, lambda _: newton_schulz(m), lr, momentum, weight_decay)


def grown(weight, gradient, m, newton_schulz, lr, momentum, weight_decay):
    gradient.add_(m, alpha=momentum)
    m.copy_(gradient)
    weight.mul_(1 - lr * weight_decay)
    weight.add_(newton_schulz(gradient + momentum * m), alpha=rate(lr, weight))


def scaled_by_the_shorter_side(weight, gradient, m, newton_schulz, lr, momentum, weight_decay):
    too_little = (min(weight.shape) / max(weight.shape)) ** 0.5
    right(weight, gradient, m, lambda x: too_little * newton_schulz(x), lr, momentum, weight_decay)


# expect: rank 0: after step 1, up.weight [14x6] is off by
couples_the_decay = muon(coupled)

# expect: rank 0: after step 1, up.weight [14x6] is off by
decays_afterwards = muon(decayed_afterwards)

# expect: rank 0: after step 2, up.weight [14x6] is off by
forgets_nesterov = muon(without_nesterov)

# expect: step 2 changed the gradient of up.weight
grows_the_gradient = muon(grown)

# expect: over budget: newton_schulz was called 3 times in one step
orthogonalizes_the_embedding = muon(right, to_adamw="head")

# expect: rank 0: after step 1, up.weight [14x6] is off by
scales_by_the_shorter_side = muon(scaled_by_the_shorter_side)
