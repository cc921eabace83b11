"""Checks of one step's arithmetic, on one process: numbers, spectra, scales of gradients, decay."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from muon_conformance.kit import Breach, Subject, Unclaimed, check, near
from muon_conformance.reference import SCALES, SHAPES, Arithmetic, distance, gaussian

STEPS = 4


def _weights() -> list[Tensor]:
    return [0.3 * gaussian(*shape, seed=i) for i, shape in enumerate(SHAPES)]


def _gradients(steps: int = STEPS) -> list[list[Tensor]]:
    return [[gaussian(*shape, seed=100 * step + i) for i, shape in enumerate(SHAPES)] for step in range(1, 1 + steps)]


# ---- Numbers ----------------------------------------------------------------------------------------------


@check("Whoever changes an optimizer under a recipe relies on the same numbers coming out of the same gradients.")
def golden_numbers(subject: Subject) -> str:
    weights = _weights()
    trained, _ = subject.train(weights, _gradients())
    expected = subject.plain(weights, _gradients())
    off = max(
        near(w - start, e - start, subject.tolerance, f"{STEPS} steps of a {tuple(start.shape)} matrix")
        for w, e, start in zip(trained, expected, weights, strict=True)
    )
    subject.numbers |= {"distance": off, "tolerance": subject.tolerance}
    measured = [name for name in ("nesterov", "scale") if getattr(subject.adapter, name) is None]
    note = f"; {' and '.join(measured)} as measured" if measured else ""
    return f"{off:.1g} from the float64 reference after {STEPS} steps, where {subject.tolerance:.1g} is rounding{note}."


@check("With Nesterov each step looks ahead; off where it is claimed, a tuned momentum means something else.")
def Nesterovs_momentum(subject: Subject) -> str:
    form = subject.nearest_form()
    words = {True: "G + mu M", False: "M"}
    if subject.adapter.nesterov is None:
        raise Unclaimed(f"Newton–Schulz is fed {words[form]}, by measurement.")
    if form != subject.adapter.nesterov:
        raise Breach(
            f"Newton–Schulz was expected to be fed {words[not form]}, the second step is that of {words[form]}."
        )
    return f"Newton–Schulz is fed {words[form]}."


@check("A checkpoint's momentum is read by others: summed and averaged ones differ by the factor 1 - mu.")
def the_momentum_buffer(subject: Subject) -> str:
    kind, off = subject.momentum_found()
    if kind is None:
        raise Unclaimed("there is no state momentum_buffer of the matrix's size.")
    claimed = subject.adapter.momentum_kind
    if off > 2.0**-7:  # a bf16 buffer rounds twice
        raise Breach(
            f"momentum_buffer is neither the sum nor the average of gradients; the nearer is off by {off:.2g}."
        )
    if claimed is None:
        raise Unclaimed(f"momentum_buffer is the {kind}, by measurement.")
    if claimed != kind:
        raise Breach(f"momentum_buffer was expected to be the {claimed} of gradients, and is the {kind}.")
    return f"momentum_buffer is the {kind} of gradients."


@check("A matrix that borrows another one's momentum is pushed where that one should go.")
def each_parameter_has_its_own_momentum(subject: Subject) -> str:
    weights = [0.3 * gaussian(12, 12, seed=i) for i in range(3)]
    gradients = [[gaussian(12, 12, seed=10 * step + i) for i in range(3)] for step in range(1, 4)]
    together, _ = subject.train(weights, gradients)
    same = True
    for i, weight in enumerate(weights):
        (alone,), _ = subject.train([weight], [[row[i]] for row in gradients])
        near(together[i] - weight, alone - weight, subject.tolerance, "a matrix that is trained beside others")
        same &= torch.equal(alone, together[i])
    return f"three matrices together train as each alone{', to the bit' * same}."


@check("The scale decides what a learning rate means; another one silently trains some shapes faster than others.")
def the_scale_of_every_shape(subject: Subject) -> str:
    shapes = ((32, 16), (16, 32), (16, 16), (48, 8), (8, 48))
    factors = {shape: subject.measured_scale(*shape) for shape in shapes}
    subject.numbers |= {"factors": {f"{a}x{b}": factor for (a, b), factor in factors.items()}}
    rule = subject.adapter.scale
    if rule is None:
        fits = [name for name, (_, f) in SCALES.items() if all(abs(x / f(*s) - 1) < 0.05 for s, x in factors.items())]
        formula = SCALES[fits[0]][0] if fits else "none that the kit knows"
        raise Unclaimed(f"the factor is {formula}, by measurement; of a 32x16 it is {factors[32, 16]:.3g}.")
    for (a, b), factor in factors.items():
        expected = subject.scale(a, b)
        if not abs(factor / expected - 1) <= subject.tolerance:
            raise Breach(
                f"the update of a {a}x{b} matrix was expected to have the factor {expected:.3g}, and has {factor:.3g}."
            )
    return f"factor {SCALES[rule][0] if isinstance(rule, str) else 'as given'} on {len(shapes)} shapes."


# ---- Spectra ----------------------------------------------------------------------------------------------

SPECTRA = {
    "flat": torch.ones(12),
    "falling to 1/100": torch.logspace(0, -2, 12),
    "one large": torch.tensor([1.0] + [0.03] * 11),
    "of rank 3": torch.tensor([1.0, 0.5, 0.2] + [0.0] * 9),
    "of rank 1": torch.tensor([1.0] + [0.0] * 11),
    "in two clusters": torch.tensor([1.0] * 6 + [0.05] * 6),
}


@check("Muon is the promise that all directions move alike: singular values in the band of its polynomial.")
def singular_values(subject: Subject) -> str:
    shape, (low, high) = (12, 20), subject.arithmetic.band()
    rounded = Arithmetic(True, subject.polynomials, SCALES["unit"][1], subject.adapter.precision)
    left, right = (torch.linalg.qr(gaussian(side, side, seed=side).double()).Q for side in shape)
    right, factor = right[:, :12], subject.scale(*shape)
    all_values: list[float] = []
    for name, values in SPECTRA.items():
        matrix = (left @ torch.diag(values.double()) @ right.T).float()
        relative = values.double() / values.double().norm()
        update, control = subject.first_update(matrix) / factor, rounded.orthogonalized(matrix)
        made_values, control_values = ((left.T @ x @ right).diagonal() for x in (update, control))
        expected, spoken = subject.arithmetic.response(relative), relative > 1e-2
        slack = max(4 * float((control_values - expected)[spoken].abs().max()), subject.tolerance)
        worst = float((made_values - expected)[spoken].abs().max())
        top = float(torch.linalg.matrix_norm(update, 2))
        if not worst <= slack:
            raise Breach(
                f"of a gradient whose spectrum is {name}, a singular value is {worst:.2g} off its polynomial's; "
                f"{slack:.1g} is rounding."
            )
        if not top <= high + slack:
            raise Breach(
                f"of a gradient whose spectrum is {name}, the update has a singular value of {top:.2f}; at most "
                f"{high:.2f} is promised."
            )
        all_values += made_values[spoken].tolist()
    least, largest = min(all_values), max(all_values)
    subject.numbers |= {"least": least, "largest": largest, "band": [low, high]}
    return f"{least:.2f} to {largest:.2f} on {len(SPECTRA)} spectra; the polynomial gives {low:.2f} to {high:.2f}."


@check("A gradient's size is chance (loss scale, batch, depth); Muon's step must not depend on it.")
def scale_invariance(subject: Subject) -> str:
    gradient = gaussian(16, 24, seed=3)
    expected = subject.first_update(gradient)
    lowest = -10
    if subject.adapter.epsilon:  # as far down as its own epsilon permits: momentum's average is 1/20 of the gradient
        lowest = math.ceil(math.log2(100 * subject.adapter.epsilon / (0.05 * float(gradient.norm()))))
    powers = [power for power in (lowest, -10, 10, 20) if power >= lowest]
    bits = True
    for power in powers:
        update = subject.first_update(gradient * 2.0**power)
        near(update, expected, subject.tolerance, f"the update of a gradient times 2^{power}")
        bits &= torch.equal(update, expected)
    return f"the same update from gradients times 2^{min(powers)} to 2^{max(powers)}{', to the bit' * bits}."


def _of_size(subject: Subject, size: float) -> float:
    """Return which part of the update is left of a gradient of another size."""
    gradient = gaussian(16, 24, seed=3)
    expected, found = subject.first_update(gradient), subject.first_update(size * gradient)
    if not found.isfinite().all():
        raise Breach(f"gradients of size {size:g} gave an update that is not finite.")
    return float((found * expected).sum() / expected.square().sum())


@check("Late in training, and deep in a network, gradients get tiny; an epsilon above them switches the layer off.")
def tiny_gradients(subject: Subject) -> str:
    parts, epsilon = {size: _of_size(subject, size) for size in (1e-8, 1e-12)}, subject.adapter.epsilon
    subject.numbers |= {"parts": {f"{size:g}": part for size, part in parts.items()}}
    if all(abs(part - 1) <= subject.tolerance for part in parts.values()):
        return "gradients of size 1e-8 and 1e-12 give the whole update."
    saw = " and ".join(f"gradients of size {size:g} give {part:.2g} of the update" for size, part in parts.items())
    if epsilon != 0:
        raise Unclaimed(f"{saw}{f'; its epsilon of {epsilon:g} says so' if epsilon else ''}.")
    raise Breach(f"{saw}, where all of it is claimed.")


@check("An exploding loss is survived only if a step stays a step.")
def huge_gradients(subject: Subject) -> str:
    part = _of_size(subject, 1e8)
    if not abs(part - 1) <= subject.tolerance:
        raise Breach(f"gradients of size 1e8 were expected to give the same update, and give {part:.2g} of it.")
    return "gradients of size 1e8 give the same update."


@check("A layer that is not used has a gradient of zero; 0/0 there would destroy the model.")
def a_zero_gradient(subject: Subject) -> str:
    update = subject.first_update(torch.zeros(12, 8))
    if not torch.equal(update, torch.zeros_like(update)):
        raise Breach(
            f"a gradient of zero was expected to give an update of zero, saw one of norm {float(update.norm()):.2g}."
        )
    return "gives an update of zero."


@check("A NaN that vanishes in the optimizer hides a broken run; it must be seen, raised or skipped aloud.")
def a_NaN_is_not_swallowed(subject: Subject) -> str:
    gradient, weight = gaussian(12, 8), 0.3 * gaussian(12, 8, seed=1)
    gradient[3, 4] = math.nan
    try:
        (trained, other), _ = subject.train([weight, weight], [[gradient, gaussian(12, 8, seed=2)]])
    except Exception as error:
        return f"raises {type(error).__name__}."
    beside = "another matrix of the step trains on" if other.isfinite().all() else "and so is every other matrix"
    if not trained.isfinite().all():
        return f"is in the weights, where anyone finds it; {beside}."
    moved = "stayed where it was, and nothing was said" if torch.equal(trained, weight) else "moved to finite numbers"
    raise Breach(f"a NaN in the gradient was expected to be raised or to be in the weights; the matrix {moved}.")


@check("The roles of inputs and outputs are a convention of layouts: a transposed layer must learn the same.")
def orientation(subject: Subject) -> str:
    off = []
    for shape in ((24, 8), (8, 24), (40, 4)):
        gradient = gaussian(*shape, seed=sum(shape))
        tall, wide = subject.first_update(gradient), subject.first_update(gradient.T.contiguous()).T
        tall, wide = tall / tall.norm(), wide / wide.norm()
        off.append(near(tall, wide, subject.tolerance, f"the update of a {shape} matrix beside its transpose's"))
    return f"a matrix and its transpose get transposed updates, up to {max(off):.1g}."


@check("Decay that enters the gradient would be orthogonalized away: it must shrink the weights beside the update.")
def decoupled_weight_decay(subject: Subject) -> str:
    weight, gradient, lr = gaussian(12, 8), gaussian(12, 8, seed=1), 0.25
    (none,), _ = subject.train([weight], [[gradient]], lr=lr, weight_decay=0.0)
    (some,), _ = subject.train([weight], [[gradient]], lr=lr, weight_decay=0.5)
    off = near(
        none - some, lr * 0.5 * weight, 1e-5, "what a decay of 0.5 takes away at lr 0.25, an eighth of the weights"
    )
    return f"W <- (1 - lr lambda) W beside the update, up to {off:.0e}."


@check(
    "A bf16 weight keeps no change below half of its last digit: decay rounded by itself does nothing, and all grow."
)
def decay_in_bf16(subject: Subject) -> str:
    taken = {}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for dtype in (torch.float32, torch.bfloat16):
            weight = (0.3 * gaussian(16, 16)).to(dtype)
            gradients = [[gaussian(16, 16, seed=1 + step).bfloat16().to(dtype)] for step in range(60)]
            ends = [subject.train([weight], gradients, lr=0.02, weight_decay=decay)[0][0] for decay in (0.1, 0.0)]
            decayed, left = (float(end.float().norm()) for end in ends)
            taken[dtype] = 1 - decayed / left
    part = taken[torch.bfloat16] / taken[torch.float32]
    subject.numbers |= {"part": part}
    saw = f"in bf16, decay takes {part:.0%} of what it takes in float32"
    if abs(part - 1) <= 0.2:
        return f"{saw}."
    said = "it says so" if any("decay" in str(warning.message) for warning in told) else "nothing is said"
    if subject.adapter.decays_bf16 is None:
        raise Unclaimed(f"{saw}, and {said}.")
    raise Breach(f"{saw}, where all of it is claimed.")


@check("Gradients are logged, clipped and added up by others; a step that overwrites them breaks those in silence.")
def gradients_stay_as_they_were(subject: Subject) -> str:
    p, gradient = torch.nn.Parameter(0.3 * gaussian(12, 8)), gaussian(12, 8, seed=1)
    optimizer = subject.adapter.optimizer([p])
    for _ in range(2):
        p.grad = gradient.clone()
        optimizer.step()
        if p.grad is None:
            raise Breach("`.grad` was expected to stay until zero_grad, and is None after the step.")
        if not torch.equal(p.grad, gradient):
            raise Breach(
                f"`.grad` was expected to stay, and has changed by {distance(p.grad, gradient):.2g} of its norm."
            )
    return "`.grad` is the same after a step."
