"""The equivalence certificate: is the sharded run the single-process run? Rows that are never mixed.

exact          The same gradients are fed to both, two micro-batches on every DP rank. Everything after them must agree
               to the last bit: accumulation, reduction, the moves, the rounding of master weights. An optimizer that
               does not reduce gradients itself, such as MuonW on FSDP2, is given reduced ones, because FSDP2 and DDP
               add them up in orders of their own.
float64        The same training in float64, momentum gather included. Different summation orders of matrix products
               are all that is left: at most 1e-10 of the movement. Where more comes out, a control (see the next row)
               says whether the model enlarges rounding: AdamW moves a weight whose gradient is zero but for rounding,
               such as the bias of attention's keys, as far as any other. Then it is 4 times the control.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from distmuon.launch import session
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.sharding.buffers import dtype_name
from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.meshes import own_box
from distmuon.sharding.tensor_parallel import tp_split_dim
from distmuon.verify.blueprint import predict_steps, set_option
from distmuon.verify.bounds import CONTROL_FACTOR, FLOAT64_BOUND, POWERLESS, Drift
from distmuon.verify.byte_table import byte_lines, ledger_rows
from distmuon.verify.counter import CollectiveCounter
from distmuon.verify.problem import Problem, Run, train, train_on_grid, whole_weights

EXACT_MICRO_BATCHES = 2  # of every DP rank, in every step
Ledgers = Sequence[tuple[Ledger, Ledger | None]]  # of every rank: what was sent, and what was predicted
OUTCOMES = {True: "pass", False: "FAIL", None: "no power here"}


class Reference:
    """One process, whole matrices: the model, its master weights, and ordinary optimizers on them.

    exact: run Newton–Schulz on one matrix after the other, and do not clip, as the exact row compares.
    """

    def __init__(self, problem: Problem, device: torch.device, exact: bool = False) -> None:
        self.problem, self.max_norm = problem, None if exact else problem.blueprint.max_norm
        self.model = problem.model(device)
        self.parameters = dict(self.model.named_parameters())
        wide = replace(problem, dtype=torch.promote_types(problem.dtype, torch.float32)).model(device)
        self.masters = dict(wide.named_parameters())
        with torch.no_grad():
            for name, weight in problem.start.items():
                self.parameters[name].copy_(weight)
                self.masters[name].copy_(weight)
        self.optimizers = problem.blueprint.optimizers(wide, problem.wire, exact)

    def accumulate(self) -> None:
        """Add the model's gradients to the masters', in the masters' dtype."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            master = self.masters[name]
            gradient = parameter.grad.to(master.dtype)
            master.grad = gradient.clone() if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Step on the masters and copy them into the model."""
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.masters.values(), self.max_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        for name, parameter in self.parameters.items():
            self.masters[name].grad = None
            parameter.copy_(self.masters[name])

    def train(self) -> Run:
        """Train, all micro-batches in this process."""
        micro_batches = range(self.problem.micro_batches)
        losses, seconds = train(self.problem, micro_batches, self.model, self.step, after_backward=self.accumulate)
        return Run(losses, self.whole(), seconds)

    def whole(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}


def train_alone(problem: Problem, device: torch.device) -> Run:
    """Train the reference in this process."""
    return Reference(problem, device).train()


def train_control(problem: Problem, device: torch.device) -> Run:
    """Train the reference with every batch in one piece and every linear layer's product as the sum of two halves.

    Sharding regroups the same two sums: DP that over rows, TP that over features. Less is no control: reversing the
    micro-batches changes no bit of a bf16 model (eight gradients of 8 bits each add up in float32 without rounding),
    and one piece alone moves AdamW in float32 by 0.5e-6 of the movement where eight TP ranks move it by 2.4e-6.
    A batch that is one piece already, of a model without linear layers, is taken in two.
    """
    with _InHalves() as halves:
        run = train_alone(replace(problem, micro_batches=1), device)
    if halves.number or problem.micro_batches > 1:
        return run
    return train_alone(replace(problem, micro_batches=2), device)


class _InHalves(TorchFunctionMode):
    """Takes every `F.linear` as the sum of two, over half of the features each. number: how many it has met."""

    number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        self.number += 1
        return _in_halves(*args, **(kwargs or {}))


def _in_halves(
    input: Tensor,  # [..., in]
    weight: Tensor,  # [out, in]
    bias: Tensor | None = None,  # [out]
) -> Tensor:  # [..., out]
    half = input.shape[-1] // 2
    return F.linear(input[..., :half], weight[:, :half]) + F.linear(input[..., half:], weight[:, half:], bias)


def difference(
    trained: Mapping[str, Tensor],  # name -> W[I, J]
    reference: Mapping[str, Tensor],  # name -> W[I, J]
    start: Mapping[str, Tensor],  # name -> W[I, J]
) -> float:
    """Return ||found - reference|| / ||reference - start|| over all parameters, Frobenius, in float64."""

    def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
        squares = [(a[name].double().cpu() - b[name].double().cpu()).square().sum() for name in reference]
        return float(torch.stack(squares).sum().sqrt())

    return distance(trained, reference) / distance(reference, start)


def identical(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return whether all tensors are bitwise equal."""
    return a.keys() == b.keys() and all(torch.equal(a[name].cpu(), b[name].cpu()) for name in a)


# ---- The exact certificate --------------------------------------------------------------------------------


class Exact(NamedTuple):
    """What the exact row's steps leave on a grid.

    parameters: whole. ranks, micro_batches: whose gradients were fed; 1 and 1 to an optimizer that is given the mean.
    counted, predicted: what the optimizer's steps have sent on this rank; None: of it nothing is predicted.
    """

    parameters: dict[str, Tensor]
    ranks: int
    micro_batches: int
    counted: Ledger
    predicted: Ledger | None


def synthetic_gradients(
    problem: Problem, step: int, dp_rank: int, micro_batch: int = 0
) -> dict[str, Tensor]:  # name -> G[I, J]
    """Return whole random gradients, in the run's dtype: the same wherever this is called."""
    seed = problem.seed
    for number in (step, dp_rank, micro_batch):
        seed = (seed * 1_000_003 + number) % 2**63
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(w.shape, generator=generator, dtype=torch.float64).to(problem.dtype)
        for name, w in problem.start.items()
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
        if not parameter.requires_grad:
            continue
        gradient, dim = gradients[name].to(parameter.device), tp_split_dim(parameter)
        if tp is not None and dim is not None:
            gradient = gradient.chunk(tp.size, dim)[tp.rank]
        products.append((parameter * gradient).sum())
    torch.stack(products).sum().backward()


def give(
    model: nn.Module,
    gradients: Mapping[str, Tensor],  # name -> G[I, J], whole
) -> None:
    """Make these gradients, as if they were reduced already, those of the model's parameters, sharded as they are."""
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        whole = gradients[name].to(p.device)
        if isinstance(p, DTensor):
            part = whole[tuple(side.as_slice for side in own_box(name, p))].contiguous().view(p.to_local().shape)
            placed: dict[str, Any] = {"run_check": False, "shape": p.shape, "stride": p.stride()}
            p.grad = DTensor.from_local(part, p.device_mesh, p.placements, **placed)
        else:
            p.grad = whole


def exact_on_grid(problem: Problem, grid: Grid) -> Exact:
    """Feed made-up gradients, different on every DP rank, to the sharded optimizer. Collective."""
    grid = with_own_ledger(grid.in_rank_order())
    model, _, optimizer = problem.on_grid(grid)
    set_option(optimizer, "batched", False)
    reduces, counter = isinstance(optimizer, ShardedOptimizer), CollectiveCounter()
    if reduces:
        optimizer.max_norm = None
    fed = (grid.dp.size, EXACT_MICRO_BATCHES) if reduces else (1, 1)
    for step in range(problem.exact_steps):
        if reduces:
            for micro_batch in range(EXACT_MICRO_BATCHES):
                backward(model, synthetic_gradients(problem, step, grid.dp.rank, micro_batch), grid.tp)
            optimizer.step()
        else:
            give(model, synthetic_gradients(problem, step, 0))
            with counter:
                optimizer.step()
    predicted = predict_steps(optimizer, problem.exact_steps)
    counted = grid.ledger if reduces else counter.ledger
    return Exact(whole_weights(model, grid), *fed, counted, predicted)


def with_own_ledger(grid: Grid) -> Grid:
    """Return the same grid with a ledger of its own."""
    ledger = Ledger()
    groups = {name: replace(getattr(grid, name), ledger=ledger) for name in ("dp", "tp", "world")}
    return replace(grid, ledger=ledger, **groups)


def exact_alone(
    problem: Problem, device: torch.device, ranks: int, micro_batches: int = EXACT_MICRO_BATCHES
) -> dict[str, Tensor]:  # name -> W[I, J]
    """Feed the mean of the same gradients to the reference: each rank's accumulated, these added in rank order."""
    reference = Reference(problem, device, exact=True)
    masters = reference.masters
    for step in range(problem.exact_steps):
        totals: dict[str, Tensor] = {}
        for rank in range(ranks):
            for micro_batch in range(micro_batches):
                backward(reference.model, synthetic_gradients(problem, step, rank, micro_batch))
                reference.accumulate()
            for name, gradient in ((name, m.grad) for name, m in masters.items() if m.grad is not None):
                totals[name] = totals[name] + gradient if rank else gradient
                masters[name].grad = None
        for name, total in totals.items():
            masters[name].grad = total / ranks
        reference.step()
    return reference.whole()


def replicas_agree(parameters: Mapping[str, Tensor], grid: Grid) -> bool:
    """Return, on rank 0, whether every rank sees bitwise the same whole parameters. Collective."""
    digest = hashlib.sha256()
    for name in sorted(parameters):
        digest.update(parameters[name].cpu().view(torch.uint8).numpy().tobytes())
    digests = gather(digest.hexdigest(), grid)
    return digests is None or len(set(digests)) == 1


def gather(value: Any, grid: Grid) -> list[Any] | None:
    """Return every rank's value on the grid's rank 0, in rank order; None elsewhere. Collective."""
    if grid.world.size == 1:
        return [value]
    values: list[Any] | None = [None] * grid.world.size if grid.world.rank == 0 else None
    dist.gather_object(value, values, group=grid.world.process_group, group_dst=0)
    return values


# ---- All of them ------------------------------------------------------------------------------------------


@dataclass
class Evidence:
    """What the ranks hand over to the judge: whole parameters after each kind of run. run: in the run's dtype.

    unrounded: None where nothing is rounded in `run` itself.
    """

    run: Run
    exact: Exact
    float64: dict[str, Tensor]
    unrounded: dict[str, Tensor] | None
    replicas_agree: bool
    ranks: int = 1


@dataclass(frozen=True)
class Certificate:
    """The verdicts; differences are relative to the movement. reference: the single-process run, for its losses.

    drifts: of the runs that are held against a control, by row: "unrounded", and the run's dtype. A float64 run has
    none, and one in which nothing is rounded no second one.
    from_muon: for another optimizer, how far from Muon's run in float64 its own ends; None for Muon itself.
    ledgers: of every rank, what the optimizer's steps of the exact row have sent, and what was predicted, or None.
    steps: of each row. ranks: of the grid. given: what the exact row feeds. float64_bound: what that row allows.
    Printed, it is a table.
    """

    exact: bool
    float64_relative_difference: float
    drifts: dict[str, Drift]
    replicas_agree: bool
    reference: Run
    from_muon: float | None = None
    ledgers: Ledgers = ()
    steps: Mapping[str, int] = field(default_factory=dict)
    ranks: int = 1
    given: str = "gradients"
    float64_bound: float = FLOAT64_BOUND

    @property
    def ledger_differences(self) -> list[str]:
        """One sentence for each row of a rank's ledger that is not as predicted."""
        return [
            f"rank {rank}: {line}"
            for rank, (counted, predicted) in enumerate(self.ledgers)
            for line in ([] if predicted is None else counted.differences(predicted))
        ]

    @property
    def verdicts(self) -> dict[str, bool | None]:
        """What each row says, in the order of the page; None: it has no power here."""
        predicted = any(prediction is not None for _, prediction in self.ledgers)
        return {
            "exact": self.exact,
            "float64": self.float64_relative_difference <= self.float64_bound < POWERLESS,
            **{row: drift.passed for row, drift in self.drifts.items()},
            "replicas": self.replicas_agree,
            **({} if self.from_muon is None else {"muon": self.from_muon <= self.float64_bound}),
            **({"bytes": not self.ledger_differences if predicted else None} if self.ledgers else {}),
        }

    @property
    def passed(self) -> bool:
        """Whether no row fails. Three rows always have power: exact, float64, replicas."""
        return False not in self.verdicts.values()

    def lines(self) -> list[str]:
        """Return one line per verdict: what was compared, what came out, what is allowed."""

        def moved(row: str, measured: float, allowed: str) -> tuple[str, str]:
            return f"{_steps(self.steps[row])}, difference / movement", f"{measured:.0e}, at most {allowed}"

        def beside(row: str, drift: Drift) -> tuple[str, str]:
            return moved(row, drift.difference, f"{CONTROL_FACTOR * drift.control:.0e}, {by_control}")

        def bitwise(what: str, equal: bool) -> tuple[str, str]:
            return what, "bitwise equal" if equal else "not equal"

        by_control = f"{CONTROL_FACTOR:g} x control"
        wide = f"{self.float64_bound:.0e}" + (f", {by_control}" if self.float64_bound > FLOAT64_BOUND else "")
        seen_by = f"{self.ranks:,} rank" + "s" * (self.ranks != 1)
        predicted = self.verdicts.get("bytes")
        as_predicted = {None: "counted, no prediction", True: "counted = predicted", False: "not as predicted"}[
            predicted
        ]
        texts = {
            "exact": bitwise(f"{_steps(self.steps['exact'])} on the same {self.given}", self.exact),
            "float64": moved("float64", self.float64_relative_difference, wide),
            **{row: beside(row, drift) for row, drift in self.drifts.items()},
            "replicas": bitwise(f"whole parameters, as seen by {seen_by}", self.replicas_agree),
            "muon": moved("float64", self.from_muon or 0.0, wide),
            "bytes": ("every collective of the optimizer", as_predicted),
        }
        outcomes = {row: OUTCOMES[passed] for row, passed in self.verdicts.items()}
        if "bytes" in outcomes and predicted is None:
            outcomes["bytes"] = "-"
        return [f"  {row:9s} {texts[row][0]:37s} {texts[row][1]:35s} {said}" for row, said in outcomes.items()]

    def __str__(self) -> str:
        counted, predicted = zip(*self.ledgers, strict=True) if self.ledgers else ((), ())
        rows = ledger_rows(counted, None if None in predicted else predicted)
        return "\n".join([
            "Is the sharded run the single-process run?",
            *self.lines(),
            "Bytes that a rank sends in a step of the optimizer, mean over ranks:",
            *byte_lines(rows, self.ranks, self.steps["exact"]),
            *(f"  FAIL {line}" for line in self.ledger_differences[:10]),
            "Verified: the sharded run is the single-process run." if self.passed else "NOT verified: see FAIL above.",
        ])  # fmt: skip


def _steps(number: int) -> str:
    return f"{number:,} step" + "s" * (number != 1)


def gather_evidence(problem: Problem, grid: Grid, run: Run) -> Evidence:
    """Make the runs on the grid that the judge will need besides `run`, which is of this problem. Collective."""
    return Evidence(
        run,
        exact_on_grid(problem, grid),
        run.parameters if problem.wide is problem else train_on_grid(problem.wide, grid).parameters,
        None if problem.unrounded is problem else train_on_grid(problem.unrounded, grid).parameters,
        replicas_agree(run.parameters, grid),
        grid.world.size,
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
    """What one process makes of a problem: its runs, those beside a control with it, and the exact row's steps.

    muon: of a problem whose optimizer is not Muon, the same in float64 with Muon; None: it is.
    """

    problem: Problem
    device: torch.device
    runs: dict[Problem, Run]
    controls: dict[Problem, Run]
    exact: dict[str, Tensor]
    muon: Problem | None = None

    @classmethod
    def make(
        cls,
        problem: Problem,
        device: torch.device,
        ranks: int,
        micro_batches: int = EXACT_MICRO_BATCHES,
        full: bool = True,
    ) -> References:
        """Train here, alone; call it where no process group is left waiting.

        ranks, micro_batches: whose gradients the exact row feeds. full: for all rows, and not for exact and unrounded
            alone.
        """
        trained = dict.fromkeys([problem.unrounded, *([problem, problem.wide] if full else [])])
        runs = {each: train_alone(each, device) for each in trained}
        controls = {each: train_control(each, device) for each in trained if each.dtype != torch.float64}
        muon = None
        if full and (as_muon := problem.blueprint.as_muon) is not None:
            muon = replace(problem.wide, blueprint=as_muon)
            runs[muon] = train_alone(muon, device)
        return cls(problem, device, runs, controls, exact_alone(problem, device, ranks, micro_batches), muon)

    def distance(self, problem: Problem, found: Mapping[str, Tensor]) -> float:
        """Return how far `found` is from this process's run of the problem, in units of that run's movement."""
        return difference(found, self.runs[problem].parameters, problem.start)

    def drift(self, problem: Problem, found: Mapping[str, Tensor]) -> Drift:
        """Return the same beside the control's."""
        if problem not in self.controls:
            self.controls[problem] = train_control(problem, self.device)
        return Drift(self.distance(problem, found), self.distance(problem, self.controls[problem].parameters))

    def compare(self, evidence: Evidence, ledgers: Ledgers = ()) -> Certificate:
        """Hold what the ranks have handed over against what this process has made. ledgers: as in `Certificate`."""
        problem = self.problem
        drifts, name = {}, dtype_name(problem.dtype)
        if evidence.unrounded is not None:
            drifts["unrounded"] = self.drift(problem.unrounded, evidence.unrounded)
        if problem.dtype != torch.float64:
            drifts[name] = self.drift(problem, evidence.run.parameters)
        wide, bound = self.distance(problem.wide, evidence.float64), FLOAT64_BOUND
        if not wide <= bound:
            bound = max(bound, CONTROL_FACTOR * self.drift(problem.wide, evidence.float64).control)
        steps = {"exact": problem.exact_steps, "float64": problem.steps, name: problem.steps}
        return Certificate(
            exact=identical(evidence.exact.parameters, self.exact),
            float64_relative_difference=wide,
            drifts=drifts,
            replicas_agree=evidence.replicas_agree,
            reference=self.runs[problem],
            from_muon=None if self.muon is None else self.distance(self.muon, evidence.float64),
            ledgers=ledgers,
            steps=steps | {"unrounded": problem.unrounded.steps},
            ranks=evidence.ranks,
            given="gradients" if evidence.exact.micro_batches > 1 else "reduced gradients",
            float64_bound=bound,
        )


def judge(problem: Problem, evidence: Evidence, device: torch.device, ledgers: Ledgers = ()) -> Certificate:
    """Make the references and compare: see both."""
    fed = evidence.exact.ranks, evidence.exact.micro_batches
    return References.make(problem, device, *fed).compare(evidence, ledgers)
