"""Schedulers, states that are saved, loaded and reset, hooks around a step."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer, lr_scheduler, swa_utils

from muon_conformance.programs.small import (
    STEPS,
    Make,
    SmallNet,
    Trained,
    loss_of,
    options_of,
    program,
    programs,
    set_lr,
    step,
    train,
)


def _sequence(optimizer: Optimizer) -> Any:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.ExponentialLR(optimizer, 0.5)], [2])


def _chain(optimizer: Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1, 2), lr_scheduler.StepLR(optimizer, 1, 0.7)]
    )


@programs(
    {
        "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda i: 0.5**i),
        "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda i: 0.5),
        "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.1),
        "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.3),
        "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8, 2.0),
        "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
        "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        "SequentialLR": _sequence,
        "ChainedScheduler": _chain,
        "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=9),
        "OneCycleLR, lr only": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=9, cycle_momentum=False),
        "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.3, step_size_up=2),
        "CyclicLR, lr only": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.3, step_size_up=2, cycle_momentum=False),
        "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=1e9),
        "SWALR": lambda o: swa_utils.SWALR(o, 0.3, anneal_epochs=3),
    }
)
def the_schedule_is(make: Make, choice: Callable[[Optimizer], Any]) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    scheduler = choice(optimizer)
    start, seen = options_of(optimizer), []
    for i in range(6):
        loss = step(model, optimizer, i)
        scheduler.step(*[loss] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
        seen.append(options_of(optimizer))
    assert seen[-2] != start
    return model, seen


@program
def an_option_is_set_between_steps(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    for i in range(STEPS):
        optimizer.param_groups[0] |= {"lr": 0.1 * i, "weight_decay": 0.5 * i}
        step(model, optimizer, i)
    return model, []


@program
def the_learning_rate_is_a_tensor(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for i in range(STEPS):
        step(model, optimizer, i)
        scheduler.step()
    return model, options_of(optimizer)


@program
def a_run_is_resumed_from_its_state(make: Make) -> Trained:
    model, other = SmallNet(), SmallNet()
    optimizer = make(model)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for i in range(2):
        step(model, optimizer, i)
        scheduler.step()
    resumed = make(other)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 2, first=2)
    seen = train(other, resumed, 2, first=2)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    return other, [*seen, *options_of(resumed)]


@program
def a_run_goes_back_to_where_it_was(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    train(model, optimizer, 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    seen = train(model, optimizer, 2, first=2)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    again = train(model, optimizer, 2, first=2)
    assert again == seen
    return model, seen


@program
def a_run_that_went_back_is_held_still(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    seen = train(model, optimizer, 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    seen += train(model, optimizer, 1, first=2)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    set_lr(optimizer, 0.0)  # what a schedule does to the groups that a load has brought
    return model, seen + train(model, optimizer, 2, first=2)


@programs(
    {
        "clear": lambda optimizer: optimizer.state.clear(),
        "assignment": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
        "zero_": lambda optimizer: [
            x.zero_() for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)
        ],
    }
)
def the_state_is_reset_by(make: Make, choice: Callable[[Optimizer], Any]) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    seen = train(model, optimizer, 2)
    choice(optimizer)
    return model, seen + train(model, optimizer, 2, first=2)


@program
def the_distributed_checkpoints_state_by_names(make: Make) -> Trained:
    model, other = SmallNet(), SmallNet()
    optimizer = make(model)
    seen = train(model, optimizer, 2)
    saved = copy.deepcopy(get_state_dict(model, optimizer))
    resumed = make(other)
    set_state_dict(other, resumed, model_state_dict=saved[0], optim_state_dict=saved[1])
    for one in (optimizer, resumed):  # torch has let the second take a step, before it loaded
        set_lr(one, 0.005)
    seen += train(other, resumed, 2, first=2)
    assert seen[2:] == train(model, optimizer, 2, first=2)
    return other, seen


@program
def hooks_around_a_step_run_and_may_change_its_arguments(make: Make) -> Trained:
    model = SmallNet()
    seen: list[Any] = []
    optimizer = make(model)

    def before(o: Optimizer, args: Any, kwargs: Any) -> Any:
        seen.append(1.0 if o is optimizer else 0.0)
        return (*args, lambda: 7.0), kwargs

    optimizer.register_step_pre_hook(before)
    handle = optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(2.0 if o is optimizer else 0.0))
    for i in range(2):
        loss_of(model, i).backward()
        seen.append(optimizer.step())
        optimizer.zero_grad()
        handle.remove()
    return model, seen
