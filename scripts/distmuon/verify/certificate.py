"""The equivalence certificate: is the sharded run the single-process run? Three answers, never mixed.

exact          The same gradients are fed to both. Everything after them must agree to the last bit.
float64        The same training in float64, momentum gather included. Different summation orders of matrix products
               are all that is left: at most 1e-10 of the movement.
real dtype     The same training in the run's dtype, beside a *control*: one process again, with nothing but the order
               of sums changed. Rounding alone moves the result that far; at most 4 times that is allowed.

The reference is plain single-device code: `muon.Muon`, `torch.optim.AdamW`, master weights, no map, no shard, no group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from distmuon.launch import session
from distmuon.models.digits import Split, digits
from distmuon.models.networks import MLP
from distmuon.models.recipe import CONTROL_FACTOR, FLOAT64_BOUND, Recipe
from distmuon.optim.muon import Muon
from distmuon.optim.routing import groups_for
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.tensor_parallel import tp_split_dim, whole_parameters
from distmuon.verify.training import Run, build, initial_parameters, train, train_on_grid

EXACT_STEPS = 3


class Reference:
    """One process, whole matrices: the model, its master weights, and ordinary optimizers on them.

    batched: run Newton–Schulz on equal shapes together; the exact certificate compares one by one.
    """

    def __init__(self, recipe: Recipe, device: torch.device, batched: bool = True) -> None:
        self.model: nn.Module = MLP(recipe.widths).to(device=device, dtype=recipe.torch_dtype)
        start = initial_parameters(recipe)
        self.model.load_state_dict(start)
        self.parameters = dict(self.model.named_parameters())
        self.masters = {n: nn.Parameter(p.detach().to(recipe.master_dtype).clone()) for n, p in self.parameters.items()}
        options: dict[str, Any] = {"lr": recipe.lr, "weight_decay": recipe.weight_decay}
        self.optimizers: list[torch.optim.Optimizer] = []
        for group in groups_for(self.model, recipe.optimizer):
            masters = [(name, self.masters[name]) for name, _ in group["params"]]
            if group["algorithm"] == "muon":
                self.optimizers.append(Muon(masters, input_dtype=recipe.gather_dtype, batched=batched, **options))
            else:
                self.optimizers.append(torch.optim.AdamW(masters, **options))

    def accumulate(self) -> None:
        """Add the model's gradients to the masters', in the masters' dtype."""
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None
            master = self.masters[name]
            gradient = parameter.grad.to(master.dtype)
            master.grad = gradient.clone() if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Step on the masters and copy them into the model."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in self.parameters.items():
            parameter.copy_(self.masters[name])

    def whole(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}


def train_alone(recipe: Recipe, device: torch.device, data: Split) -> Run:
    """Train the reference in this process."""
    reference = Reference(recipe, device)
    order = range(recipe.micro_batches)
    losses, seconds = train(recipe, data, order, reference.model, reference.step, after_backward=reference.accumulate)
    return Run(losses, reference.whole(), seconds)


def train_control(recipe: Recipe, device: torch.device, data: Split) -> Run:
    """Train the reference with every batch in one piece and every layer's product as the sum of two halves.

    Sharding regroups the same two sums: DP that over rows, TP that over features. Less is no control: reversing the
    micro-batches changes no bit of a bf16 model (eight gradients of 8 bits each add up in float32 without rounding),
    and one piece alone moves AdamW in float32 by 0.5e-6 of the movement where eight TP ranks move it by 2.4e-6.
    """
    recipe = replace(recipe, micro_batches=1)
    reference = Reference(recipe, device)
    for layer in reference.model.modules():
        if hasattr(layer, "weight"):
            layer.forward = partial(_in_halves, layer)
    losses, seconds = train(
        recipe, data, range(1), reference.model, reference.step, after_backward=reference.accumulate
    )
    return Run(losses, reference.whole(), seconds)


def _in_halves(
    layer: Any,
    x: Tensor,  # [..., in]
) -> Tensor:  # [..., out]
    half = x.shape[-1] // 2
    return F.linear(x[..., :half], layer.weight[:, :half]) + F.linear(x[..., half:], layer.weight[:, half:], layer.bias)


def difference(
    found: Mapping[str, Tensor],  # name -> W[I, J]
    reference: Mapping[str, Tensor],  # name -> W[I, J]
    start: Mapping[str, Tensor],  # name -> W[I, J]
) -> float:
    """Return ||found - reference|| / ||reference - start|| over all parameters, Frobenius, in float64."""

    def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
        squares = [(a[name].double().cpu() - b[name].double().cpu()).square().sum() for name in reference]
        return float(torch.stack(squares).sum().sqrt())

    return distance(found, reference) / distance(reference, start)


def identical(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return whether all tensors are bitwise equal."""
    return a.keys() == b.keys() and all(torch.equal(a[name].cpu(), b[name].cpu()) for name in a)


# ---- The exact certificate --------------------------------------------------------------------------------


def made_up_gradients(recipe: Recipe, step: int, dp_rank: int) -> dict[str, Tensor]:  # name -> G[I, J]
    """Return whole random gradients for one step of one DP rank, in the run's dtype: the same wherever it is called."""
    generator = torch.Generator().manual_seed(((recipe.seed * 1_000_003 + step) * 1_000_003 + dp_rank) % 2**63)
    return {
        name: torch.randn(w.shape, generator=generator, dtype=torch.float64).to(recipe.torch_dtype)
        for name, w in initial_parameters(recipe).items()
    }


def exact_on_grid(recipe: Recipe, grid: Grid) -> dict[str, Tensor]:  # name -> W[I, J]
    """Feed made-up gradients, different on every DP rank, to the sharded optimizer; return the whole parameters."""
    options = {"batched": False} if recipe.optimizer == "muon" else {}
    model, optimizer = build(recipe, grid, **options)
    for step in range(EXACT_STEPS):
        gradients = made_up_gradients(recipe, step, grid.dp.rank)
        for name, parameter in model.named_parameters():
            gradient, dim = gradients[name], tp_split_dim(parameter)
            mine = gradient if dim is None else gradient.chunk(grid.tp.size, dim)[grid.tp.rank]
            parameter.grad = mine.to(grid.device)
        optimizer.step()
    return whole_parameters(model, replace(grid.tp, ledger=Ledger()))


def exact_alone(recipe: Recipe, dp: int, device: torch.device) -> dict[str, Tensor]:  # name -> W[I, J]
    """Feed the mean of the same D gradients to the reference: added in rank order, then divided, as the ranks do."""
    reference = Reference(recipe, device, batched=False)
    for step in range(EXACT_STEPS):
        copies = [made_up_gradients(recipe, step, rank) for rank in range(dp)]
        for name, master in reference.masters.items():
            total = copies[0][name].to(master.dtype)
            for copy in copies[1:]:
                total += copy[name].to(master.dtype)
            master.grad = (total / dp).to(device)
        reference.step()
    return reference.whole()


def exact_verdict(found: Mapping[str, Tensor], recipe: Recipe, dp: int, device: torch.device, threads: int) -> bool:
    """Return whether `found`, the exact run on a grid, is bitwise this process's. threads: as many as a rank had."""
    torch.set_num_threads(threads)  # or the last bits may differ
    with session.environment(session.directory()):  # torch leaves a folder behind, which must be one of ours
        return identical(found, exact_alone(recipe, dp, device))


def replicas_agree(parameters: Mapping[str, Tensor], grid: Grid) -> bool:
    """Return, on rank 0, whether every rank sees bitwise the same whole parameters. Collective."""
    digest = hashlib.sha256()
    for name in sorted(parameters):
        digest.update(parameters[name].cpu().view(torch.uint8).numpy().tobytes())
    if grid.world.size == 1:
        return True
    digests: list[str] | None = [""] * grid.world.size if grid.world.rank == 0 else None
    dist.gather_object(digest.hexdigest(), digests)
    return digests is None or len(set(digests)) == 1


# ---- All three --------------------------------------------------------------------------------------------


@dataclass
class Evidence:
    """What the ranks hand over to the judge: whole parameters after each kind of run. run: in the run's dtype."""

    run: Run
    exact: dict[str, Tensor]
    float64: dict[str, Tensor]
    replicas_agree: bool


@dataclass(frozen=True)
class Certificate:
    """The verdicts; differences are relative to the movement. reference: the single-process run, for its losses."""

    dtype: str
    exact: bool
    float64_relative_difference: float
    relative_difference: float
    control_relative_difference: float
    replicas_agree: bool
    reference: Run

    @property
    def verdicts(self) -> dict[str, bool]:
        verdicts = {
            "exact": self.exact,
            "float64": self.float64_relative_difference <= FLOAT64_BOUND,
            "replicas": self.replicas_agree,
        }
        if self.dtype != "float64":
            verdicts[self.dtype] = self.relative_difference <= CONTROL_FACTOR * self.control_relative_difference
        return verdicts


def gather_evidence(recipe: Recipe, grid: Grid, data: Split, run: Run) -> Evidence:
    """Make the runs on the grid that the judge will need besides `run`. Collective."""
    exact = exact_on_grid(recipe, grid)
    float64 = run if recipe.dtype == "float64" else train_on_grid(replace(recipe, dtype="float64"), grid, data)
    return Evidence(run, exact, float64.parameters, replicas_agree(run.parameters, grid))


def judge(recipe: Recipe, evidence: Evidence, dp: int, device: torch.device) -> Certificate:
    """Make every reference run in this process, alone, and compare. Call it where no process group is left waiting."""
    data, _ = digits(Grid.alone(str(device)), recipe.seed)
    wide = replace(recipe, dtype="float64")
    reference, control = train_alone(recipe, device, data), train_control(recipe, device, data)
    wide_reference = reference if recipe.dtype == "float64" else train_alone(wide, device, data)
    return Certificate(
        dtype=recipe.dtype,
        exact=identical(evidence.exact, exact_alone(recipe, dp, device)),
        float64_relative_difference=difference(evidence.float64, wide_reference.parameters, initial_parameters(wide)),
        relative_difference=difference(evidence.run.parameters, reference.parameters, initial_parameters(recipe)),
        control_relative_difference=difference(control.parameters, reference.parameters, initial_parameters(recipe)),
        replicas_agree=evidence.replicas_agree,
        reference=reference,
    )
