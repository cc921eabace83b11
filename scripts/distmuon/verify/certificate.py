"""The equivalence certificate: is the sharded run the single-process run? Rows that are never mixed.

exact          The same gradients are fed to both, two micro-batches on every DP rank. Everything after them must agree
               to the last bit: accumulation, reduction, the moves, the rounding of master weights.
float64        The same training in float64, momentum gather included. Different summation orders of matrix products
               are all that is left: at most 1e-10 of the movement.
unrounded      The same training in float32 throughout, beside a *control*: one process again, with nothing but the
               order of sums changed. At most 4 times as far as the control, which is about 1e-6 of the movement.
real dtype     The same in the run's own dtypes. What is rounded to bf16 moves the control by 1e-2 and more, and small
               mistakes hide in that: this row sees large ones. Where even 4 times the control is no bound, it says so.

`unrounded` trains a bf16 model in float32 too: with a bf16 forward pass its control would be as coarse as the last
row's. What a bf16 model has of its own, float32 accumulation and master weights, `exact` holds to the bit.

Exact sums need an order. gloo's are taken in that of the ranks; NCCL chooses its own, so that on NCCL the exact row
brings a reduction of its own (`Grid.in_rank_order`), and says nothing about NCCL's. The other rows use NCCL's.

The reference is plain single-device code: `muon.Muon`, `torch.optim.AdamW`, master weights, no map, no shard, no group.
Strategies that are other optimizers than Muon, over more than one TP rank, are held against those (`verify.blocks`); a
row more says how far from Muon they end, and does not pass.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from distmuon.launch import session
from distmuon.models.digits import Split, digits
from distmuon.models.recipe import FLOAT64_BOUND, Recipe
from distmuon.optim.muon import Muon
from distmuon.optim.param_groups import groups_for
from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.tensor_parallel import mark, tp_split_dim, whole_parameters
from distmuon.verify.blocks import BlockMuon, block_options
from distmuon.verify.drift import Drift
from distmuon.verify.training import Build, Run, build, initial_parameters, network, train, train_on_grid

EXACT_STEPS, EXACT_MICRO_BATCHES = 3, 2  # the second: of every DP rank, in every step


class Reference:
    """One process, whole matrices: the model, its master weights, and ordinary optimizers on them.

    batched: run Newton–Schulz on equal shapes together; the exact certificate compares one by one.
    tp: T, for recipes whose optimizer depends on it.
    """

    def __init__(self, recipe: Recipe, device: torch.device, batched: bool = True, tp: int = 1) -> None:
        self.model: nn.Module = network(recipe).to(device)
        start = initial_parameters(recipe)
        self.model.load_state_dict(start)
        self.parameters = dict(self.model.named_parameters())
        self.masters = {
            name: mark(nn.Parameter(p.detach().to(recipe.master_dtype).clone()), tp_split_dim(p))
            for name, p in self.parameters.items()
        }
        options: dict[str, Any] = {"lr": recipe.lr, "weight_decay": recipe.weight_decay}
        self.optimizers: list[torch.optim.Optimizer] = []
        for group in groups_for(self.model, recipe.optimizer):
            masters = [(name, self.masters[name]) for name, _ in group["params"]]
            if group["algorithm"] == "muon":
                dtypes: dict[str, Any] = {"input_dtype": recipe.gather_dtype, "compute_dtype": recipe.compute_dtype}
                if (in_blocks := block_options(recipe, tp)) is None:
                    self.optimizers.append(Muon(masters, batched=batched, **dtypes, **options))
                else:
                    self.optimizers.append(BlockMuon(masters, batched=batched, **dtypes, **in_blocks, **options))
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


def train_alone(recipe: Recipe, device: torch.device, data: Split, tp: int = 1) -> Run:
    """Train the reference in this process."""
    reference = Reference(recipe, device, tp=tp)
    order = range(recipe.micro_batches)
    losses, seconds = train(recipe, data, order, reference.model, reference.step, after_backward=reference.accumulate)
    return Run(losses, reference.whole(), seconds)


def train_control(recipe: Recipe, device: torch.device, data: Split, tp: int = 1) -> Run:
    """Train the reference with every batch in one piece and every layer's product as the sum of two halves.

    Sharding regroups the same two sums: DP that over rows, TP that over features. Less is no control: reversing the
    micro-batches changes no bit of a bf16 model (eight gradients of 8 bits each add up in float32 without rounding),
    and one piece alone moves AdamW in float32 by 0.5e-6 of the movement where eight TP ranks move it by 2.4e-6.
    """
    recipe = replace(recipe, micro_batches=1)
    reference = Reference(recipe, device, tp=tp)
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


def exact_steps(recipe: Recipe) -> int:
    """Return how many steps the exact certificate makes: enough for whole and block steps, where there are both."""
    return max(EXACT_STEPS, min(recipe.period, recipe.steps) + 1)


def synthetic_gradients(
    recipe: Recipe, step: int, dp_rank: int, micro_batch: int = 0
) -> dict[str, Tensor]:  # name -> G[I, J]
    """Return whole random gradients, in the run's dtype: the same wherever this is called."""
    seed = recipe.seed
    for number in (step, dp_rank, micro_batch):
        seed = (seed * 1_000_003 + number) % 2**63
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(w.shape, generator=generator, dtype=torch.float64).to(recipe.torch_dtype)
        for name, w in initial_parameters(recipe).items()
    }


def backward(
    model: nn.Module,
    gradients: Mapping[str, Tensor],  # name -> G[I, J], whole
    tp: Group | None = None,
) -> None:
    """Let autograd bring these gradients to the model's parameters, cut over `tp`, as a loss would.

    The gradient of sum(p * g) is g, to the bit; how it is added to what is there already is the model's affair.
    """
    products = []
    for name, parameter in model.named_parameters():
        gradient, dim = gradients[name].to(parameter.device), tp_split_dim(parameter)
        if tp is not None and dim is not None:
            gradient = gradient.chunk(tp.size, dim)[tp.rank]
        products.append((parameter * gradient).sum())
    torch.stack(products).sum().backward()


def exact_on_grid(recipe: Recipe, grid: Grid, make: Build = build) -> dict[str, Tensor]:  # name -> W[I, J]
    """Feed made-up gradients, different on every DP rank, to the sharded optimizer; return the whole parameters.

    make: as for `train_on_grid`.
    """
    options = {"batched": False} if recipe.optimizer == "muon" else {}
    model, optimizer = make(recipe, grid.in_rank_order(), **options)
    for step in range(exact_steps(recipe)):
        for micro_batch in range(EXACT_MICRO_BATCHES):
            backward(model, synthetic_gradients(recipe, step, grid.dp.rank, micro_batch), grid.tp)
        optimizer.step()
    return whole_parameters(model, replace(grid.tp, ledger=Ledger()))


def exact_alone(recipe: Recipe, dp: int, device: torch.device, tp: int = 1) -> dict[str, Tensor]:  # name -> W[I, J]
    """Feed the mean of the same gradients to the reference: each rank's accumulated, these added in rank order."""
    reference = Reference(recipe, device, batched=False, tp=tp)
    for step in range(exact_steps(recipe)):
        totals: dict[str, Tensor] = {}
        for rank in range(dp):
            for micro_batch in range(EXACT_MICRO_BATCHES):
                backward(reference.model, synthetic_gradients(recipe, step, rank, micro_batch))
                reference.accumulate()
            for name, master in reference.masters.items():
                assert master.grad is not None
                totals[name] = totals[name] + master.grad if rank else master.grad
                master.grad = None
        for name, master in reference.masters.items():
            master.grad = totals[name] / dp
        reference.step()
    return reference.whole()


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


# ---- All of them ------------------------------------------------------------------------------------------


@dataclass
class Evidence:
    """What the ranks hand over to the judge: whole parameters after each kind of run. run: in the run's dtype.

    unrounded: None where nothing is rounded in `run` itself.
    """

    run: Run
    exact: dict[str, Tensor]
    float64: dict[str, Tensor]
    unrounded: dict[str, Tensor] | None
    replicas_agree: bool


@dataclass(frozen=True)
class Certificate:
    """The verdicts; differences are relative to the movement. reference: the single-process run, for its losses.

    drifts: of the runs that are held against a control, by row: "unrounded", and the run's dtype. A float64 run has
    none, and one in which nothing is rounded no second one.
    from_muon: for another optimizer, how far from Muon's run in float64 its own ends; None for Muon itself.
    """

    exact: bool
    float64_relative_difference: float
    drifts: dict[str, Drift]
    replicas_agree: bool
    reference: Run
    from_muon: float | None = None

    @property
    def verdicts(self) -> dict[str, bool | None]:
        """What each row says, in the order of the page; None: it has no power here."""
        return {
            "exact": self.exact,
            "float64": self.float64_relative_difference <= FLOAT64_BOUND,
            **{row: drift.passed for row, drift in self.drifts.items()},
            "replicas": self.replicas_agree,
            **({} if self.from_muon is None else {"muon": self.from_muon <= FLOAT64_BOUND}),
        }

    @property
    def passed(self) -> bool:
        """Whether no row fails. Three rows always have power: exact, float64, replicas."""
        return False not in self.verdicts.values()


def gather_evidence(recipe: Recipe, grid: Grid, data: Split, run: Run, make: Build = build) -> Evidence:
    """Make the runs on the grid that the judge will need besides `run`. Collective. make: as for `train_on_grid`."""
    wide = replace(recipe, dtype="float64")
    return Evidence(
        run,
        exact_on_grid(recipe, grid, make),
        run.parameters if recipe.dtype == "float64" else train_on_grid(wide, grid, data, make=make).parameters,
        None if recipe.unrounded == recipe else train_on_grid(recipe.unrounded, grid, data, make=make).parameters,
        replicas_agree(run.parameters, grid),
    )


@contextlib.contextmanager
def judging(device: torch.device, threads: int) -> Iterator[None]:
    """Compute here as a rank did, or the last bits may differ. threads: as many as it had; they stay set."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest")
    with session.environment(session.directory()):  # torch leaves a folder behind, which must be one of ours
        yield


@dataclass(frozen=True)
class References:
    """What one process makes of a recipe: its runs, those beside a control with it, and the exact row's steps.

    muon: of a recipe whose optimizer is not Muon, the same recipe with Muon; None: it is.
    """

    runs: dict[Recipe, Run]
    controls: dict[Recipe, Run]
    exact: dict[str, Tensor]
    muon: Recipe | None = None

    @classmethod
    def make(cls, recipe: Recipe, dp: int, device: torch.device, full: bool = True, tp: int = 1) -> References:
        """Train here, alone; call it where no process group is left waiting.

        full: for all rows, not for exact and unrounded alone. tp: see `Reference`.
        """
        data, _ = digits(Grid.alone(str(device)), recipe.seed)
        trained = {recipe.unrounded} | ({recipe, replace(recipe, dtype="float64")} if full else set())
        runs = {each: train_alone(each, device, data, tp) for each in trained}
        controls = {each: train_control(each, device, data, tp) for each in trained if each.dtype != "float64"}
        muon = None
        if full and block_options(recipe, tp) is not None:
            muon = replace(recipe, dtype="float64", strategy=Recipe.strategy)
            runs[muon] = train_alone(muon, device, data, tp)
        return cls(runs, controls, exact_alone(recipe, dp, device, tp), muon)

    def distance(self, recipe: Recipe, found: Mapping[str, Tensor]) -> float:
        """Return how far `found` is from this process's run of the recipe, in units of that run's movement."""
        return difference(found, self.runs[recipe].parameters, initial_parameters(recipe))

    def drift(self, recipe: Recipe, found: Mapping[str, Tensor]) -> Drift:
        """Return the same beside the control's."""
        return Drift(self.distance(recipe, found), self.distance(recipe, self.controls[recipe].parameters))


def compare(recipe: Recipe, evidence: Evidence, references: References) -> Certificate:
    """Hold what the ranks have handed over against what one process has made."""
    drifts = {}
    if evidence.unrounded is not None:
        drifts["unrounded"] = references.drift(recipe.unrounded, evidence.unrounded)
    if recipe.dtype != "float64":
        drifts[recipe.dtype] = references.drift(recipe, evidence.run.parameters)
    return Certificate(
        exact=identical(evidence.exact, references.exact),
        float64_relative_difference=references.distance(replace(recipe, dtype="float64"), evidence.float64),
        drifts=drifts,
        replicas_agree=evidence.replicas_agree,
        reference=references.runs[recipe],
        from_muon=None if references.muon is None else references.distance(references.muon, evidence.float64),
    )


def judge(recipe: Recipe, evidence: Evidence, dp: int, device: torch.device, tp: int = 1) -> Certificate:
    """Make the references and compare: see both."""
    return compare(recipe, evidence, References.make(recipe, dp, device, tp=tp))
