"""Checks of how an optimizer is used, on one process: groups, states, schedules, closures, and users' programs."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from muon_conformance.adapter import DEFAULTS
from muon_conformance.kit import CHECKS, Breach, Check, Subject, Unclaimed, check, feed, near, said
from muon_conformance.programs import PROGRAMS, SmallNet
from muon_conformance.reference import PlainMuon, distance, gaussian

PROGRAM = "program: "  # before the name of each
A, B = (12, 8), (8, 12)


def _row(step: int) -> list[Tensor]:
    return [gaussian(*A, seed=10 * step + 1), gaussian(*B, seed=10 * step + 2)]


def _start() -> list[nn.Parameter]:
    return [nn.Parameter(0.3 * gaussian(*A, seed=3)), nn.Parameter(0.3 * gaussian(*B, seed=4))]


def _same(actual: Tensor, expected: Tensor) -> str:
    return "to the bit" if torch.equal(actual, expected) else f"up to {distance(actual, expected):.0e}"


@check("Layers have their own learning rates; an option that leaks from group to group trains other layers than asked.")
def two_groups_with_their_own_options(subject: Subject) -> str:
    own: list[dict[str, Any]] = [
        {"lr": 0.05, "weight_decay": 0.3, "momentum": 0.8},
        {"lr": 0.01, "weight_decay": 0.0, "momentum": 0.95},
    ]
    parameters, alone = _start(), _start()
    optimizer = subject.adapter.optimizer(
        [{"params": [p]} | options for p, options in zip(parameters, own, strict=True)]
    )
    feed(optimizer, parameters, map(_row, range(3)))
    same = []
    for i, (p, options) in enumerate(zip(alone, own, strict=True)):
        begun = p.detach().clone()
        feed(subject.adapter.optimizer([p], **options), [p], [[_row(step)[i]] for step in range(3)])
        near(parameters[i] - begun, p - begun, subject.tolerance, f"group {i} of two, beside an optimizer of its own")
        same.append(_same(parameters[i], p))
    return f"each group trains as under an optimizer of its own, {' and '.join(dict.fromkeys(same))}."


@check("A layer that a batch did not use has no gradient: it must wait, without decay, and not stop the others.")
def a_parameter_without_gradient(subject: Subject) -> str:
    parameters, alone = _start(), _start()
    before = parameters[1].detach().clone()
    feed(subject.adapter.optimizer(parameters), parameters, [[_row(step)[0], None] for step in range(2)])
    if not torch.equal(parameters[1], before):
        raise Breach(
            "a parameter without gradient was expected to stay as it is, and has moved by "
            f"{distance(parameters[1], before):.2g} of its size."
        )
    feed(subject.adapter.optimizer(alone[:1]), alone[:1], [[_row(step)[0]] for step in range(2)])
    near(parameters[0], alone[0], subject.tolerance, "the parameter beside it")
    return "stays as it is; the others train as without it."


@check("Schedulers write `lr` into the groups; a step that remembers another one ignores the schedule.")
def a_schedule_moves_the_step(subject: Subject) -> str:
    p, gradient, moves = nn.Parameter(torch.zeros(A)), gaussian(*A), []
    optimizer = subject.adapter.optimizer([p], lr=0.25, weight_decay=0.0, momentum=0.0)
    for lr in (0.25, 0.125, 0.5):
        before = p.detach().clone()
        optimizer.param_groups[0]["lr"] = lr
        feed(optimizer, [p], [[gradient]])
        moves.append(float((p.detach() - before).norm()) / lr)
    if max(moves) > (1 + subject.tolerance) * min(moves):
        raise Breach(
            f"steps were expected to be in proportion to lr; over it they are {', '.join(f'{m:.3g}' for m in moves)}."
        )
    return "the step follows `lr` in the group."


@check("Line searches, LBFGS-like loops and trainers call step(closure) and want its loss back.")
def a_closure(subject: Subject) -> str:
    parameters, plain = _start(), _start()
    rows, losses = [_row(step) for step in range(2)], []

    def closure(row: list[Tensor]) -> Tensor:
        if not torch.is_grad_enabled():
            raise Breach("gradients were expected to be enabled in the closure, and are not.")
        for p, gradient in zip(parameters, row, strict=True):
            p.grad = gradient.clone()
        return torch.tensor(7.0)

    optimizer = subject.adapter.optimizer(parameters)
    for row in rows:
        step: Any = optimizer.step
        losses.append(step(partial(closure, row)))
    if any(loss is None or float(loss) != 7 for loss in losses):
        raise Breach(f"step(closure) was expected to return the closure's 7.0, and returned {losses}.")
    feed(subject.adapter.optimizer(plain), plain, rows)
    near(parameters[0], plain[0], subject.tolerance, "training by a closure")
    return "is called once with gradients enabled, and its loss returned."


@check("A run that is resumed must go on as if it had never stopped: that is what the momentum is saved for.")
def a_state_goes_through_a_file(subject: Subject) -> str:
    parameters = _start()
    optimizer = subject.adapter.optimizer(parameters, lr=0.05)
    feed(optimizer, parameters, map(_row, range(2)))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = [nn.Parameter(p.detach().clone()) for p in parameters]
    resumed = subject.adapter.optimizer(others)
    resumed.load_state_dict(torch.load(file))  # weights_only, torch's default
    if resumed.param_groups[0]["lr"] != 0.05:
        raise Breach(f"the loaded lr was expected to be 0.05, and is {resumed.param_groups[0]['lr']}.")
    between = [p.detach().clone() for p in parameters]
    feed(optimizer, parameters, map(_row, range(2, 4)))
    feed(resumed, others, map(_row, range(2, 4)))
    for p, other, start in zip(parameters, others, between, strict=True):
        near(other - start, p - start, 1e-6, "a run that was resumed from a file")
    return f"and goes on, {_same(others[0], parameters[0])}; weights_only, so that no stranger's code is run."


@check("foreach and fused are ways to be faster; whoever turns them on wants the same training.")
def flags_change_nothing(subject: Subject) -> str:
    if not subject.adapter.flags:
        raise Unclaimed("it has no foreach or fused.")
    plain = _start()
    feed(subject.adapter.optimizer(plain), plain, map(_row, range(3)))
    for flags in subject.adapter.flags:
        parameters = _start()
        feed(subject.adapter.optimizer(parameters, **flags), parameters, map(_row, range(3)))
        near(parameters[0] - _start()[0], plain[0] - _start()[0], subject.tolerance, f"training with {flags}")
    return f"{' and '.join(name for flags in subject.adapter.flags for name in flags)}: the same training."


@check("Where one optimizer trains the whole model, its AdamW must be AdamW: embeddings and norms hang on it.")
def AdamW_for_the_rest(subject: Subject) -> str:
    if "adamw" not in subject.adapter.marks:
        raise Unclaimed("it claims matrices alone; others belong to another optimizer.")
    matrix, bias = nn.Parameter(0.3 * gaussian(*A)), nn.Parameter(gaussian(9))
    other = nn.Parameter(bias.detach().clone())
    groups = [{"params": [matrix]}, {"params": [bias], "kind": "adamw", "lr": 0.01, "weight_decay": 0.2}]
    optimizer = subject.adapter.optimizer(groups)
    group = next(g for g in optimizer.param_groups if any(p is bias for p in g["params"]))
    betas, eps = group.get("betas", (0.9, 0.999)), group.get("eps", 1e-8)
    adamw = torch.optim.AdamW([other], lr=0.01, weight_decay=0.2, betas=betas, eps=eps)
    before = bias.detach().clone()
    feed(optimizer, [matrix, bias], [[gaussian(*A, seed=i), gaussian(9, seed=50 + i)] for i in range(4)])
    feed(adamw, [other], [[gaussian(9, seed=50 + i)] for i in range(4)])
    off = near(bias - before, other - before, 1e-4, "four steps of a bias beside torch.optim.AdamW's")
    return f"a bias trains as under torch.optim.AdamW, up to {off:.0e}."


@check("A bias, a kernel or an empty matrix has no singular values to speak of; taken silently, it trains on nonsense.")
def what_is_no_matrix_is_refused(subject: Subject) -> str:
    if "adamw" in subject.adapter.marks:
        raise Unclaimed("it claims to take every parameter.")
    taken = []
    for name, shape in {"a bias": (9,), "a scalar": ()}.items():
        p = nn.Parameter(torch.ones(shape))
        try:
            feed(subject.adapter.optimizer([p]), [p], [[torch.ones(shape)]])
        except Exception as error:
            refusal = said(error, 80)
        else:
            taken.append(name)
    if taken:
        raise Breach(f"{' and '.join(taken)} in a group of matrices was expected to be refused, and was trained.")
    return f"a bias is refused ({refusal})."


# ---- Programs ---------------------------------------------------------------------------------------------


def follow(name: str, subject: Subject) -> str:
    """Run a program with the optimizer and with the reference; both must end at the same weights and see the same."""
    refusal = subject.adapter.refuses.get(name)
    if refusal is not None:
        try:
            PROGRAMS[name](lambda model: subject.adapter.optimizer(model.parameters()))
        except Exception as error:
            if refusal in str(error):
                return f"refused aloud: {said(error)}"
            raise
        raise Breach(f"the program was expected to be refused in words such as {refusal!r}, and ran.")
    if not subject.trains_plainly:
        raise Unclaimed(
            "plain training does not follow the arithmetic, so nothing can be compared: see golden numbers."
        )
    trained, events = PROGRAMS[name](lambda model: subject.adapter.optimizer(model.parameters()))
    reference, reference_events = PROGRAMS[name](
        lambda model: PlainMuon(model.parameters(), subject.arithmetic, **DEFAULTS)
    )
    weights, others = (
        torch.cat([p.detach().flatten().double() for p in one.parameters()]) for one in (trained, reference)
    )
    begun = torch.cat([p.detach().flatten() for p in SmallNet().parameters()])
    start = begun if len(begun) == len(weights) else 0 * weights
    most = subject.tolerance * (2 if subject.adapter.scale is None else 1)  # a measured scale has roundings of its own
    off = near(weights - start, others - start, most, "the weights at its end")
    numbers, reference_numbers = (
        torch.tensor([x for row in rows for x in _flat(row)], dtype=torch.float64)
        for rows in (events, reference_events)
    )
    if numbers.shape != reference_numbers.shape or not torch.allclose(
        numbers, reference_numbers, rtol=subject.tolerance, atol=1e-9, equal_nan=True
    ):
        raise Breach("losses, options or events on the way were expected to be those of the reference, and differ.")
    return f"ends {off:.0e} from the reference."


def _flat(row: Any) -> list[float]:
    return [float("nan") if x is None else float(x) for x in (row if isinstance(row, list) else [row])]


WHY = "People write this; an optimizer that trains it to other weights than plain arithmetic would surprises them."
CHECKS |= {f"{PROGRAM}{name}": Check(f"{PROGRAM}{name}", WHY, partial(follow, name)) for name in PROGRAMS}
