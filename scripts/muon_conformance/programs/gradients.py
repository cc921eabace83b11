"""What users do to gradients between backward and step: drop, change, hold, clip, scale, add up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from muon_conformance.programs.small import (
    STEPS,
    Make,
    SmallNet,
    Trained,
    change_gradients,
    loss_of,
    program,
    programs,
    refill,
    sizes,
    step,
    train,
)
from muon_conformance.reference import gaussian


@program
def plain_training(make: Make) -> Trained:
    model = SmallNet()
    return model, train(model, make(model))


@program
def a_closure(make: Make) -> Trained:
    model, seen = SmallNet(), []
    optimizer = make(model)

    def closure(i: int) -> Any:
        assert torch.is_grad_enabled()
        seen.append(i)
        optimizer.zero_grad()
        loss = loss_of(model, i)
        loss.backward()
        return loss

    for i in range(STEPS):
        loss: Any = optimizer.step(partial(closure, i))
        seen.append(loss.item())
    optimizer.zero_grad()
    assert optimizer.step() is None
    return model, seen


@programs(
    {
        "optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
        "optimizer.zero_grad to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        "model.zero_grad": lambda model, optimizer: model.zero_grad(),
        "model.zero_grad to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
        "grad = None": lambda model, optimizer: change_gradients(model, lambda grad: None),
        "grad = zeros": lambda model, optimizer: change_gradients(model, torch.zeros_like),
        "grad.zero_()": lambda model, optimizer: change_gradients(model, Tensor.zero_),
    }
)
def gradients_are_dropped_by(make: Make, choice: Callable[[nn.Module, Optimizer], None]) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    for i in range(STEPS):
        (100 * loss_of(model, 50 + i)).backward()
        choice(model, optimizer)
        loss_of(model, i).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@programs(
    {
        "mul_": lambda grad: grad.mul_(-1),
        "another tensor": lambda grad: -grad.clone(),
        "copy_": lambda grad: grad.copy_(grad.sign()),
        "None": lambda grad: None,
        "a tensor of other strides": lambda grad: -grad.t().contiguous().t(),
    }
)
def gradients_are_changed_by(make: Make, choice: Callable[[Tensor], Tensor | None]) -> Trained:
    model, seen = SmallNet(), []
    optimizer = make(model)
    for i in range(STEPS):
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        loss_of(model, i).backward()
        seen += [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
        if i % 2:
            change_gradients(model, choice)
        optimizer.step()
    return model, seen


@program
def micro_batches_add_up(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    for i in range(STEPS):
        for rows in (slice(0, 4), slice(4, 8)):
            (loss_of(model, i, rows) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@programs({"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_})
def torch_clips_the(make: Make, choice: Callable[..., Any]) -> Trained:
    model, seen = SmallNet(), []
    optimizer = make(model)
    for i in range(STEPS):
        optimizer.zero_grad()
        (10 * loss_of(model, i)).backward()
        total = choice(model.parameters(), 0.05 * (i + 1))
        seen.append(0.0 if total is None else float(total))
        optimizer.step()
    return model, seen


@programs({"": False, "and clips": True})
def a_scaler_meets_an_infinity(make: Make, choice: bool) -> Trained:
    model, seen = SmallNet(), []
    optimizer, scaler = make(model), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for i in range(STEPS + 2):
        optimizer.zero_grad()
        loss = loss_of(model, i) * (float("inf") if i == 2 else 1.0)
        scaler.scale(loss).backward()
        if choice:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        seen += [scaler.get_scale(), *sizes(model)]
    return model, seen


@program
def two_losses_share_a_graph(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    for i in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, i)
        loss.backward(retain_graph=True)
        loss.square().backward()
        optimizer.step()
    return model, []


@program
def backward_makes_a_graph(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    for i in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, i).backward(create_graph=True)
        optimizer.step()
    return model, []


@programs({"dropped": lambda o: o.zero_grad(), "stepped over": lambda o: o.step()})
def gradients_that_are_held_keep_their_values_when(make: Make, choice: Callable[[Optimizer], Any]) -> Trained:
    model, seen = SmallNet(), []
    optimizer = make(model)
    for i in range(STEPS):
        loss_of(model, i).backward()
        held = [p.grad for p in model.parameters()]
        choice(optimizer)
        optimizer.zero_grad()
        loss_of(model, 50 + i).backward()
        seen += [float(grad.norm()) for grad in held if grad is not None]
        for p, grad in zip(model.parameters(), held, strict=True):
            assert p.grad is not None
            assert grad is not None
            p.grad = grad - 0.5 * p.grad
        optimizer.step()
        optimizer.zero_grad()
    return model, seen


def swap_gradients(p: Tensor, q: Tensor) -> None:
    p.grad, q.grad = q.grad, p.grad


@programs(
    {
        "grad.data =": lambda p, q: setattr(p.grad, "data", 0.1 - p.grad.data),
        "one another's": swap_gradients,
        "their transposes": lambda p, q: setattr(p, "grad", p.grad.t()),
    }
)
def square_gradients_become(make: Make, choice: Callable[[Tensor, Tensor], Any]) -> Trained:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(6, 4, bias=False))
    refill(model)
    optimizer = make(model)
    for i in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        if i % 2 == 0:
            choice(model.get_parameter("0.weight"), model.get_parameter("1.weight"))
        optimizer.step()
    return model, sizes(model)


@program
def gradients_are_there_before_the_optimizer(make: Make) -> Trained:
    model = SmallNet()
    loss_of(model, 0).backward()
    optimizer = make(model)
    loss_of(model, 1).backward()
    optimizer.step()
    return model, train(model, optimizer)


@program
def backward_names_its_inputs(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    for i in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, i).backward(inputs=[model.first.weight] if i % 2 else list(model.parameters()))
        optimizer.step()
    return model, []


@program
def a_gradient_of_zero_still_decays(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    seen = train(model, optimizer, 2)
    for _ in range(3):
        loss_of(model, 0).backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        seen += sizes(model)
    return model, seen


@program
def a_penalty_is_added_by_hand(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    for i in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.grad += 0.1 * p
                p.grad.add_(gaussian(*p.shape, seed=i), alpha=0.01)
        optimizer.step()
    return model, []


@program
def steps_without_any_gradient(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    optimizer.step()
    seen = sizes(model)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    optimizer.step()
    return model, seen + sizes(model)


@program
def hooks_on_gradients_run(make: Make) -> Trained:
    model, seen = SmallNet(), []
    model.first.weight.register_hook(lambda grad: -grad)
    model.second.weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
    return model, [*train(model, make(model)), *seen]


@program
def gradients_asked_for_elsewhere_do_not_count(make: Make) -> Trained:
    model, seen = SmallNet(), []
    optimizer = make(model)
    for i in range(STEPS):
        found = torch.autograd.grad(loss_of(model, 50 + i), list(model.parameters()))
        seen += [float(grad.norm()) for grad in found]
        seen.append(step(model, optimizer, i))
    return model, seen


@program
def gradients_of_gradients(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    for i in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, i)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(grad.square().sum() for grad in grads)).backward()
        optimizer.step()
    return model, []
