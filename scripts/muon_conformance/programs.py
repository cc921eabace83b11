"""Training programs as users of torch write them, and the small model that they train.

A program is given `make`, which builds an optimizer over a model's parameters, and returns the model and what it saw
on the way: losses, learning rates, scales. Nothing in it knows which optimizer it runs: whatever keeps torch's
conventions is trained by it to the weights to which plain arithmetic would be.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.utils import prune
from torch.optim import Optimizer, lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint

from muon_conformance.reference import gaussian

Make = Callable[[nn.Module], Optimizer]
Trained = tuple[nn.Module, list[Any]]
PROGRAMS: dict[str, Callable[[Make], Trained]] = {}
STEPS = 4


def program(function: Callable[[Make], Trained]) -> Callable[[Make], Trained]:
    """Add a program under its own name."""
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


def programs(choices: dict[str, Any]) -> Callable[[Callable[[Make, Any], Trained]], None]:
    """Add a program for each of several values of its second argument."""

    def add(function: Callable[[Make, Any], Trained]) -> None:
        for name, choice in choices.items():
            PROGRAMS[f"{function.__name__.replace('_', ' ')} {name}"] = functools.partial(function, choice=choice)  # type: ignore[call-arg]

    return add


def each_step(move: Callable[..., Any]) -> Callable[..., Trained]:
    """Make a program of what happens in every step, (model, optimizer, i) -> what was seen, if anything."""

    @functools.wraps(move)
    def run(make: Make, **choice: Any) -> Trained:
        model, observed = SmallNet(), list[Any]()
        optimizer = make(model)
        for i in range(STEPS):
            observed += move(model, optimizer, i, **choice) or []
        return model, observed

    return run


def halfway(change: Callable[..., Any]) -> Callable[..., Trained]:
    """Make a program of what happens, (model, optimizer), between two steps and two more."""

    @functools.wraps(change)
    def run(make: Make, **choice: Any) -> Trained:
        model = SmallNet()
        optimizer = make(model)
        observed = train(model, optimizer, 2)
        change(model, optimizer, **choice)
        return model, observed + train(model, optimizer, 2, first=2)

    return run


class SmallNet(nn.Module):
    """Two matrices, [8, 6] and [4, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False)
        refill(self)

    def forward(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 4]
        return self.second(self.first(x).tanh())


def refill(model: nn.Module, seed: int = 0) -> None:
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(0.3 * gaussian(*p.shape, seed=seed + i))


def loss_of(model: nn.Module, i: int, rows: slice = slice(None)) -> Tensor:
    """Return the mean loss over some rows of batch `i`."""
    dtype = next(model.parameters()).dtype
    x, y = gaussian(8, 6, seed=10 + i, dtype=dtype), gaussian(8, 4, seed=90 + i, dtype=dtype)
    return (model(x[rows]) - y[rows]).square().mean()


def step(model: nn.Module, optimizer: Optimizer, i: int) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, i)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(model: nn.Module, optimizer: Optimizer, steps: int = STEPS, first: int = 0) -> list[float]:
    return [step(model, optimizer, i) for i in range(first, first + steps)]


def change_gradients(model: nn.Module, change: Callable[[Tensor], Tensor | None]) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = change(p.grad)


def sizes(model: nn.Module) -> list[float]:
    return [float(p.detach().norm()) for p in model.parameters()]


def options_of(optimizer: Optimizer) -> list[float]:
    """Return what every scheduler moves."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def set_lr(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


# ---- Gradients: dropped, changed, held, clipped, scaled, added up -------------------------------------------


@program
def plain_training(make: Make) -> Trained:
    model = SmallNet()
    return model, train(model, make(model))


@program
def a_closure(make: Make) -> Trained:
    model, observed = SmallNet(), []
    optimizer = make(model)

    def closure(i: int) -> Any:
        assert torch.is_grad_enabled()
        observed.append(i)
        optimizer.zero_grad()
        loss = loss_of(model, i)
        loss.backward()
        return loss

    for i in range(STEPS):
        loss: Any = optimizer.step(functools.partial(closure, i))
        observed.append(loss.item())
    optimizer.zero_grad()
    assert optimizer.step() is None
    return model, observed


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
@each_step
def gradients_are_dropped_by(model: nn.Module, optimizer: Optimizer, i: int, choice: Callable[..., Any]) -> Any:
    (100 * loss_of(model, 50 + i)).backward()
    choice(model, optimizer)
    loss_of(model, i).backward()
    optimizer.step()
    optimizer.zero_grad()


@programs(
    {
        "mul_": lambda grad: grad.mul_(-1),
        "another tensor": lambda grad: -grad.clone(),
        "copy_": lambda grad: grad.copy_(grad.sign()),
        "None": lambda grad: None,
        "a tensor of other strides": lambda grad: -grad.t().contiguous().t(),
    }
)
@each_step
def gradients_are_changed_by(model: nn.Module, optimizer: Optimizer, i: int, choice: Callable[[Tensor], Any]) -> Any:
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    loss_of(model, i).backward()
    observed = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
    if i % 2:
        change_gradients(model, choice)
    optimizer.step()
    return observed


@program
@each_step
def micro_batches_add_up(model: nn.Module, optimizer: Optimizer, i: int) -> Any:
    for rows in (slice(0, 4), slice(4, 8)):
        (loss_of(model, i, rows) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


@programs({"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_})
@each_step
def torch_clips_the(model: nn.Module, optimizer: Optimizer, i: int, choice: Callable[..., Any]) -> Any:
    optimizer.zero_grad()
    (10 * loss_of(model, i)).backward()
    total = choice(model.parameters(), 0.05 * (i + 1))
    optimizer.step()
    return [0.0 if total is None else float(total)]


@programs({"": False, "and clips": True})
def a_scaler_meets_an_infinity(make: Make, choice: bool) -> Trained:
    model, observed = SmallNet(), []
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
        observed += [scaler.get_scale(), *sizes(model)]
    return model, observed


@program
@each_step
def two_losses_share_a_graph(model: nn.Module, optimizer: Optimizer, i: int) -> Any:
    optimizer.zero_grad()
    loss = loss_of(model, i)
    loss.backward(retain_graph=True)
    loss.square().backward()
    optimizer.step()


@program
@each_step
def backward_makes_a_graph(model: nn.Module, optimizer: Optimizer, i: int) -> Any:
    optimizer.zero_grad()
    loss_of(model, i).backward(create_graph=True)
    optimizer.step()


@programs({"dropped": lambda o: o.zero_grad(), "stepped over": lambda o: o.step()})
@each_step
def gradients_that_are_held_keep_their_values_when(
    model: nn.Module, optimizer: Optimizer, i: int, choice: Callable[[Optimizer], Any]
) -> Any:
    loss_of(model, i).backward()
    held = [p.grad for p in model.parameters()]
    choice(optimizer)
    optimizer.zero_grad()
    loss_of(model, 50 + i).backward()
    observed = [float(grad.norm()) for grad in held if grad is not None]
    for p, grad in zip(model.parameters(), held, strict=True):
        assert p.grad is not None
        assert grad is not None
        p.grad = grad - 0.5 * p.grad
    optimizer.step()
    optimizer.zero_grad()
    return observed


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
@each_step
def backward_names_its_inputs(model: nn.Module, optimizer: Optimizer, i: int) -> Any:
    optimizer.zero_grad()
    loss_of(model, i).backward(inputs=[model.get_parameter("first.weight")] if i % 2 else list(model.parameters()))
    optimizer.step()


@program
def a_gradient_of_zero_still_decays(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    observed = train(model, optimizer, 2)
    for _ in range(3):
        loss_of(model, 0).backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        observed += sizes(model)
    return model, observed


@program
@each_step
def a_penalty_is_added_by_hand(model: nn.Module, optimizer: Optimizer, i: int) -> Any:
    optimizer.zero_grad()
    loss_of(model, i).backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p.grad += 0.1 * p
            p.grad.add_(gaussian(*p.shape, seed=i), alpha=0.01)
    optimizer.step()


@program
def steps_without_any_gradient(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    optimizer.step()
    observed = sizes(model)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    optimizer.step()
    return model, observed + sizes(model)


@program
def hooks_on_gradients_run(make: Make) -> Trained:
    model, observed = SmallNet(), []
    model.first.weight.register_hook(lambda grad: -grad)
    model.second.weight.register_post_accumulate_grad_hook(lambda p: observed.append(float(p.grad.norm())))
    return model, [*train(model, make(model)), *observed]


@program
@each_step
def gradients_asked_for_elsewhere_do_not_count(model: nn.Module, optimizer: Optimizer, i: int) -> Any:
    found = torch.autograd.grad(loss_of(model, 50 + i), list(model.parameters()))
    return [float(grad.norm()) for grad in found] + [step(model, optimizer, i)]


@program
@each_step
def gradients_of_gradients(model: nn.Module, optimizer: Optimizer, i: int) -> Any:
    optimizer.zero_grad()
    loss = loss_of(model, i)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(grad.square().sum() for grad in grads)).backward()
    optimizer.step()


# ---- Models: frozen, shared, compiled, loaded, averaged, swapped --------------------------------------------


@program
def a_layer_is_frozen_and_thawed(make: Make) -> Trained:
    model, observed = SmallNet(), []
    optimizer = make(model)
    for i in range(6):
        model.first.requires_grad_(i not in (0, 2, 3))
        observed += [step(model, optimizer, i), *sizes(model)]
    return model, observed


@program
def a_layer_is_frozen_before_there_is_an_optimizer(make: Make) -> Trained:
    model = SmallNet()
    model.first.requires_grad_(False)
    optimizer = make(model)
    observed = [*train(model, optimizer, 2), *sizes(model)]
    model.first.requires_grad_(True)
    return model, observed + train(model, optimizer, 2, first=2)


@program
def a_layer_is_used_now_and_then(make: Make) -> Trained:
    class Skips(SmallNet):
        skips = True

        def forward(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 4]
            self.skips = not self.skips
            return self.second(torch.cat([x, x[:, :2]], 1) if self.skips else self.first(x).tanh())

    model = Skips()
    optimizer = make(model)
    return model, [x for i in range(6) for x in (step(model, optimizer, i), *sizes(model))]


@programs(
    {
        "weight_norm": nn.utils.parametrizations.weight_norm,
        "spectral_norm": nn.utils.parametrizations.spectral_norm,
        "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    }
)
def a_layer_is_reparametrized_by(make: Make, choice: Callable[[nn.Module], Any]) -> Trained:
    model = SmallNet()
    choice(model.second)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # power iterations
        return model, train(model, make(model))


@program
def weights_are_shared(make: Make) -> Trained:
    class Tied(SmallNet):
        def forward(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 4]
            return self.second(self.first(self.first(x).tanh() @ self.first.weight).tanh())

    model = Tied()
    return model, train(model, make(model))


@programs({"reentrant": True, "not reentrant": False})
def activations_are_checkpointed(make: Make, choice: bool) -> Trained:
    class Lean(SmallNet):
        def forward(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 4]
            x = x.requires_grad_()
            return self.second(checkpoint(lambda x: self.first(x).tanh(), x, use_reentrant=choice))

    model = Lean()
    return model, train(model, make(model))


@program
def weights_are_not_contiguous(make: Make) -> Trained:
    model = SmallNet()
    model.first.weight = nn.Parameter(gaussian(6, 8, seed=5).t())
    return model, train(model, make(model))


@program
def a_tensor_is_trained_that_is_no_Parameter(make: Make) -> Trained:
    class Bare(SmallNet):
        def __init__(self) -> None:
            super().__init__()
            self.first.weight.requires_grad_(False)
            self.loose = [gaussian(8, 6, seed=6).requires_grad_()]

        def parameters(self, recurse: bool = True) -> Any:
            return iter([*super().parameters(recurse), *getattr(self, "loose", [])])

        def forward(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 4]
            return self.second((x @ self.loose[0].t()).tanh())

    model = Bare()
    return model, train(model, make(model))


@program
def the_model_is_compiled(make: Make) -> Trained:
    model = SmallNet()
    compiled: Any = torch.compile(model, backend="aot_eager")
    return model, train(compiled, make(model))


@programs(
    {
        "data.copy_": lambda p, value: p.data.copy_(value),
        "copy_": lambda p, value: p.copy_(value),
        "data =": lambda p, value: setattr(p, "data", value.clone()),
        "vector_to_parameters": lambda p, value: nn.utils.vector_to_parameters(value.flatten(), [p]),
        "data = a view": lambda p, value: setattr(p, "data", torch.stack([value, value])[1]),
    }
)
@halfway
def weights_are_set_by(model: Any, optimizer: Optimizer, choice: Callable[[nn.Parameter, Tensor], Any]) -> None:
    for seed, p in enumerate(model.parameters()):
        with torch.no_grad():
            choice(p, gaussian(*p.shape, seed=40 + seed))


@program
@halfway
def parameters_are_swapped(model: Any, optimizer: Optimizer) -> None:
    model.zero_grad()
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@programs({"deepcopy": copy.deepcopy, "pickle": lambda pair: pickle.loads(pickle.dumps(pair))})
def a_model_and_its_optimizer_are_copied_by(make: Make, choice: Callable[[Any], Any]) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    observed = train(model, optimizer, 2)
    model, optimizer = choice((model, optimizer))
    for lr in (0.0, 0.05):
        set_lr(optimizer, lr)
        observed += train(model, optimizer, 2, first=2)
    return model, observed


@program
@halfway
def a_parameter_is_replaced_in_its_group(model: Any, optimizer: Optimizer) -> None:
    old = model.second.weight
    model.second.weight = nn.Parameter(0.5 * old.detach())
    for group in optimizer.param_groups:
        group["params"] = [model.second.weight if p is old else p for p in group["params"]]


@program
@halfway
def a_parameter_is_taken_out_of_its_group(model: Any, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not model.second.weight]


@programs({"copied": False, "assigned": True})
@halfway
def a_models_state_is_loaded_and(model: Any, optimizer: Optimizer, choice: bool) -> None:
    other = SmallNet()
    refill(other, 40)
    model.load_state_dict(
        other.state_dict(), assign=choice
    )  # assigned: the optimizer keeps the old ones, in torch and here


@program
@halfway
def the_model_is_widened_and_narrowed_again(model: Any, optimizer: Optimizer) -> None:
    model.double().float()


@program
def weights_are_averaged_and_swapped_in(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    observed = []
    for i in range(STEPS):
        observed.append(step(model, optimizer, i))
        average.update_parameters(model)
    observed.append(loss_of(average, 0).item())
    for p, mean in zip(model.parameters(), average.module.parameters(), strict=True):
        p.data.copy_(mean.data)
    return model, observed + train(model, optimizer, 2)


@program
def a_copy_of_the_model_is_no_part_of_the_training(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    observed = train(model, optimizer, 2)
    teacher = copy.deepcopy(model)
    loss_of(teacher, 9).backward()
    observed += train(model, optimizer, 2, first=2)
    return model, [
        *observed,
        loss_of(teacher, 0).item(),
        *(float(p.grad.norm()) for p in teacher.parameters() if p.grad is not None),
    ]


# ---- Schedulers; states that are saved, loaded and reset; hooks around a step -------------------------------


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
    start, observed = options_of(optimizer), []
    for i in range(6):
        loss = step(model, optimizer, i)
        scheduler.step(*[loss] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
        observed.append(options_of(optimizer))
    assert observed[-2] != start
    return model, observed


@program
@each_step
def an_option_is_set_between_steps(model: nn.Module, optimizer: Optimizer, i: int) -> Any:
    optimizer.param_groups[0] |= {"lr": 0.1 * i, "weight_decay": 0.5 * i}
    step(model, optimizer, i)


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
    observed = train(other, resumed, 2, first=2)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    return other, [*observed, *options_of(resumed)]


@program
def a_run_goes_back_to_where_it_was(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    train(model, optimizer, 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    observed = train(model, optimizer, 2, first=2)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    again = train(model, optimizer, 2, first=2)
    assert again == observed
    return model, observed


@program
def a_run_that_went_back_is_held_still(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    observed = train(model, optimizer, 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    observed += train(model, optimizer, 1, first=2)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    set_lr(optimizer, 0.0)  # what a schedule does to the groups that a load has brought
    return model, observed + train(model, optimizer, 2, first=2)


@programs(
    {
        "clear": lambda optimizer: optimizer.state.clear(),
        "assignment": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
        "zero_": lambda optimizer: [
            x.zero_() for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)
        ],
    }
)
@halfway
def the_state_is_reset_by(model: Any, optimizer: Optimizer, choice: Callable[[Optimizer], Any]) -> None:
    choice(optimizer)


@program
def the_distributed_checkpoints_state_by_names(make: Make) -> Trained:
    model, other = SmallNet(), SmallNet()
    optimizer = make(model)
    observed = train(model, optimizer, 2)
    saved = copy.deepcopy(get_state_dict(model, optimizer))
    resumed = make(other)
    set_state_dict(other, resumed, model_state_dict=saved[0], optim_state_dict=saved[1])
    for one in (optimizer, resumed):  # torch has let the second take a step, before it loaded
        set_lr(one, 0.005)
    observed += train(other, resumed, 2, first=2)
    assert observed[2:] == train(model, optimizer, 2, first=2)
    return other, observed


@program
def hooks_around_a_step_run_and_may_change_its_arguments(make: Make) -> Trained:
    model = SmallNet()
    observed: list[Any] = []
    optimizer = make(model)

    def before(o: Optimizer, args: Any, kwargs: Any) -> Any:
        observed.append(1.0 if o is optimizer else 0.0)
        return (*args, lambda: 7.0), kwargs

    optimizer.register_step_pre_hook(before)
    handle = optimizer.register_step_post_hook(lambda o, args, kwargs: observed.append(2.0 if o is optimizer else 0.0))
    for i in range(2):
        loss_of(model, i).backward()
        observed.append(optimizer.step())
        optimizer.zero_grad()
        handle.remove()
    return model, observed
