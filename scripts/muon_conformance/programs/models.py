"""What a model goes through under its optimizer: frozen, shared, compiled, loaded, averaged, swapped."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

from muon_conformance.programs.small import (
    STEPS,
    Make,
    SmallNet,
    Trained,
    loss_of,
    program,
    programs,
    refill,
    set_lr,
    sizes,
    step,
    train,
)
from muon_conformance.reference import gaussian


@program
def a_layer_is_frozen_and_thawed(make: Make) -> Trained:
    model, seen = SmallNet(), []
    optimizer = make(model)
    for i in range(6):
        model.first.requires_grad_(i not in (0, 2, 3))
        seen += [step(model, optimizer, i), *sizes(model)]
    return model, seen


@program
def a_layer_is_frozen_before_there_is_an_optimizer(make: Make) -> Trained:
    model = SmallNet()
    model.first.requires_grad_(False)
    optimizer = make(model)
    seen = [*train(model, optimizer, 2), *sizes(model)]
    model.first.requires_grad_(True)
    return model, seen + train(model, optimizer, 2, first=2)


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
def weights_are_set_by(make: Make, choice: Callable[[nn.Parameter, Tensor], Any]) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    seen = train(model, optimizer, 2)
    for seed, p in enumerate(model.parameters()):
        with torch.no_grad():
            choice(p, gaussian(*p.shape, seed=40 + seed))
    return model, seen + train(model, optimizer, 2, first=2)


@program
def parameters_are_swapped(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    seen = train(model, optimizer, 2)
    model.zero_grad()
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    return model, seen + train(model, optimizer, 2, first=2)


@programs({"deepcopy": copy.deepcopy, "pickle": lambda pair: pickle.loads(pickle.dumps(pair))})
def a_model_and_its_optimizer_are_copied_by(make: Make, choice: Callable[[Any], Any]) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    seen = train(model, optimizer, 2)
    model, optimizer = choice((model, optimizer))
    for lr in (0.0, 0.05):
        set_lr(optimizer, lr)
        seen += train(model, optimizer, 2, first=2)
    return model, seen


@program
def a_parameter_is_replaced_in_its_group(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    seen, old = train(model, optimizer, 2), model.second.weight
    model.second.weight = nn.Parameter(0.5 * old.detach())
    for group in optimizer.param_groups:
        group["params"] = [model.second.weight if p is old else p for p in group["params"]]
    return model, seen + train(model, optimizer, 2, first=2)


@program
def a_parameter_is_taken_out_of_its_group(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    seen = train(model, optimizer, 2)
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not model.second.weight]
    return model, seen + train(model, optimizer, 2, first=2)


@programs({"copied": False, "assigned": True})
def a_models_state_is_loaded_and(make: Make, choice: bool) -> Trained:
    model, other = SmallNet(), SmallNet()
    optimizer = make(model)
    seen = train(model, optimizer, 2)
    refill(other, 40)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=choice)
    seen += train(model, optimizer, 2, first=2)  # assigned: the optimizer keeps the old parameters, in torch and here
    return model, seen


@program
def the_model_is_widened_and_narrowed_again(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    seen = train(model, optimizer, 2)
    model.double().float()
    return model, seen + train(model, optimizer, 2, first=2)


@program
def weights_are_averaged_and_swapped_in(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    seen = []
    for i in range(STEPS):
        seen.append(step(model, optimizer, i))
        average.update_parameters(model)
    seen.append(loss_of(average, 0).item())
    for p, mean in zip(model.parameters(), average.module.parameters(), strict=True):
        p.data.copy_(mean.data)
    return model, seen + train(model, optimizer, 2)


@program
def a_copy_of_the_model_is_no_part_of_the_training(make: Make) -> Trained:
    model = SmallNet()
    optimizer = make(model)
    seen = train(model, optimizer, 2)
    teacher = copy.deepcopy(model)
    loss_of(teacher, 9).backward()
    seen += train(model, optimizer, 2, first=2)
    return model, [
        *seen,
        loss_of(teacher, 0).item(),
        *(float(p.grad.norm()) for p in teacher.parameters() if p.grad is not None),
    ]
