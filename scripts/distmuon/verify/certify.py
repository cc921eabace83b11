"""Is my sharded run the single-process run? One call, on every rank, for a model, data and an optimizer of yours."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from distmuon.optim.options import check_count
from distmuon.sharding.consistency import check_same, fingerprints, raise_together
from distmuon.sharding.grid import Grid
from distmuon.sharding.tensor_parallel import tp_split_dim
from distmuon.verify.blueprint import Blueprint, accepts
from distmuon.verify.certificate import Certificate, gather, gather_evidence, judge, with_own_ledger
from distmuon.verify.problem import Problem, rows_of, train_on_grid

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SAME = 1e-9  # relative: two losses in float64 that differ by more are two losses


def certify(
    make_model: Callable[..., nn.Module],
    batches: Iterable[Any],
    make_optimizer: Callable[..., Any],
    grid: Any,
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    steps: int | None = None,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.float32,
    make_reference: Callable[..., Any] | None = None,
    seed: int = 0,
) -> Certificate | None:
    """Train on the grid and in one process, compare, and return a certificate on rank 0; None elsewhere. Collective.

    All ranks call it alike, under torchrun or in a job of `launch.run`. It makes model and optimizer anew for each of
    its rows, and leaves yours alone. Rank 0 computes the single-process side last, while no collective is pending.

    make_model: () -> the whole model; `seed` is torch's meanwhile, so that every call gives the same. With an argument
        `tp`, a `Group`, it returns this rank's part, in layers of `sharding.tensor_parallel`, whose values do not
        matter, because each gets its slice of the whole model's. The model is cast to the dtype of each row.
    batches: global batches, alike on all ranks: tensors, or tuples or dicts of them, [rows, ...]. DP rank r takes the
        r-th part of the rows. Floating-point tensors are cast as the model is.
    make_optimizer: (model, grid) -> the optimizer under test, one of ours or torch.optim's AdamW or SGD. Shard the
        model there, too, for instance by `fully_shard(model, mesh=grid.mesh["dp"])`; where that returns another
        module, as DistributedDataParallel does, return (module, optimizer). For Muon it takes a third argument,
        `gather_dtype=None`, and gives it to the optimizer, because two rows ask for one.
    grid: a `Grid`, or what `Grid.of` makes one of: a World, a DeviceMesh with dimensions "dp" and "tp", a group.
    loss: (model, a batch or part of one) -> the mean over its rows; by default the cross-entropy of pairs of inputs
        and targets.
    steps: as many as there are batches, if not given. In fewer than ten, luck decides the coarsest row.
    micro_batches: in which every DP rank runs its part of a batch.
    dtype: of the model in your training: float32, bfloat16 or float64.
    make_reference: (whole model in float32 or float64) -> the optimizer of one process, or several. By default these
        are `Muon` and `torch.optim.AdamW`, with groups, options and `max_norm` read off the optimizer under test. A
        wrong option is then wrong on both sides, and not seen; give a reference of your own to check options as well.

    The rows are those of `verify.certificate`, and bytes: what the optimizer's own steps send, against a prediction
    where there is one (`DistributedMuon`, `Zero1AdamW`), and otherwise counted at torch's dispatcher. `print` shows
    all of it, `.passed` says whether no row fails, `.verdicts` what each says.

    A float32 row may fail although nothing is wrong, where a model makes a large difference of a small one. At ReLU's
    kink a difference of 1e-7 turns a unit on here and leaves it off there, and the control may not have met one; GELU
    and SiLU have no kink. The float64 row decides then.

    Raises ValueError on all ranks, with the value and the remedy, for batches that do not divide, ranks that give
    different things, a model that is not the same at every call or in every forward pass (dropout), buffers that a
    forward pass changes (BatchNorm, whose result depends on how a batch is cut), a loss that is no mean, and an
    optimizer that it cannot read.
    """
    grid = with_own_ledger(Grid.of(grid))
    with raise_together(grid, "certify", "call it alike on every rank"):
        _check_arguments(make_model, make_optimizer, make_reference, loss, steps, micro_batches)
        held = batches if isinstance(batches, Sequence) else list(itertools.islice(batches, steps))
        steps, pieces = len(held) if steps is None else steps, micro_batches * grid.dp.size
        problem = Problem(make_model, held, loss or _cross_entropy, make_optimizer, steps, pieces, dtype, seed)
        _check_numbers(problem, grid.dp.size)
        _check_model(problem, grid)
    lines = [("steps, micro-batches and dtype", f"{problem.steps}, {micro_batches} and {dtype}")]
    lines += zip(problem.start, _digests(problem.start.values()), strict=True)
    lines += [(f"batch {n}", " ".join(_digests(tree_leaves(problem.batches[n])))) for n in range(problem.steps)]
    check_same(grid, "inputs", lines, "seed what they are drawn from, and give every rank the whole batches")
    model, _, optimizer = problem.on_grid(grid)
    with raise_together(grid, "the optimizer", "make the same one on every rank"):
        own = Blueprint(make=make_reference) if make_reference else Blueprint.of(optimizer, model, grid.tp.size)
        _check_gather_dtype(own, make_optimizer)
        problem = replace(problem, blueprint=own)
    del model, optimizer
    evidence = gather_evidence(problem, grid, train_on_grid(problem, grid))
    ledgers = gather((evidence.exact.counted, evidence.exact.predicted), grid)
    return None if ledgers is None else judge(problem, evidence, grid.device, ledgers)


def _check_arguments(
    make_model: Any, make_optimizer: Any, make_reference: Any, loss: Any, steps: Any, micro_batches: Any
) -> None:
    """Raise ValueError for what is no function where one is asked for, and for numbers that are none."""
    functions = {"make_model": make_model, "make_optimizer": make_optimizer}
    functions |= {} if make_reference is None else {"make_reference": make_reference}
    for name, given in (functions | ({} if loss is None else {"loss": loss})).items():
        if not callable(given) or isinstance(given, nn.Module):  # a model can be called, too
            raise ValueError(f"{name} is a {type(given).__name__}; give a function, which is called for every row.")
    if steps is not None:
        check_count("steps", steps, 1)
    check_count("micro_batches", micro_batches, 1)


def _cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    if not (isinstance(batch, list | tuple) and len(batch) == 2):
        raise ValueError(
            f"a batch is a {type(batch).__name__}, and without a loss it has to be a pair of inputs and targets; give "
            "loss=(model, batch) -> the mean over rows."
        )
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def _check_numbers(problem: Problem, dp: int) -> None:
    """Raise ValueError for a dtype, a number of steps or pieces, or batches that do not go with them."""
    if problem.dtype not in DTYPES:
        raise ValueError(f"dtype is {problem.dtype}; give one of {', '.join(map(str, DTYPES))}.")
    if not 1 <= problem.steps <= len(problem.batches):
        raise ValueError(
            f"steps is {problem.steps}, and there are {len(problem.batches)} batches; give 1 step or more, and a batch "
            "for each."
        )
    micro_batches = problem.micro_batches // dp
    for number in range(problem.steps):
        rows = rows_of(problem.batches[number])
        if rows == 0 or rows % problem.micro_batches:
            raise ValueError(
                f"batch {number} has {rows or 'no common number of'} rows, for {dp} DP ranks with {micro_batches} "
                f"micro-batches each; give tensors [rows, ...] with a multiple of {problem.micro_batches} rows."
            )


@torch.no_grad()
def _check_model(problem: Problem, grid: Grid) -> None:
    """Raise ValueError unless the model is the same again, and its losses are those of one function of rows."""
    for name, p in problem.model(torch.device("cpu")).named_parameters():
        if name not in problem.start or not torch.equal(p, problem.start[name]):
            raise ValueError(
                f"make_model gives {name!r} other values when it is called again; draw them from torch's own "
                "generator, which is seeded for it, or load them."
            )
    cut = dict(problem.model(grid.device, tp=grid.tp).named_parameters())
    for name, start in problem.start.items():
        shape, dim = list(start.shape), tp_split_dim(cut[name]) if name in cut else None
        if dim is not None:
            shape[dim] //= grid.tp.size
        if name not in cut or list(cut[name].shape) != shape:
            found = f"of {tuple(cut[name].shape)}" if name in cut else "nowhere"
            raise ValueError(
                f"make_model(tp=...) has {name!r} {found}, and the whole model has it of {tuple(start.shape)}; let "
                "both have the same parameters, and mark those that are cut over TP (tp_split_dim)."
            )
    wide = replace(problem, dtype=torch.float64)
    model, batch = wide.model(grid.device), problem.batches[0]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    whole, again, *pieces = (
        _loss_of(each, model, batch, number, grid)
        for each, number in [(replace(wide, micro_batches=1), 0)] * 2 + [(wide, n) for n in range(wide.micro_batches)]
    )
    for name, buffer in model.named_buffers():
        if not torch.equal(buffer, before[name]):
            raise ValueError(
                f"a forward pass changes the buffer {name!r}, so its result depends on how a batch is cut, as "
                "BatchNorm's does; put such modules into eval() in make_model, or take LayerNorm or GroupNorm."
            )
    if abs(whole - again) > SAME * abs(whole):
        raise ValueError(
            f"two forward passes of one batch give the losses {whole:.6g} and {again:.6g}; take dropout and whatever "
            "else is drawn out of the model, or call eval() in make_model."
        )
    mean = sum(pieces) / len(pieces)
    if abs(whole - mean) > SAME * abs(whole):
        raise ValueError(
            f"the loss of a batch is {whole:.6g}, and the mean over its {len(pieces)} micro-batches is {mean:.6g}; "
            "let loss(model, batch) return the mean over rows."
        )


def _loss_of(problem: Problem, model: nn.Module, batch: Any, number: int, grid: Grid) -> float:
    loss = problem.loss(model, problem.piece(batch, number, grid.device))
    if loss.numel() != 1:
        raise ValueError(
            f"loss(model, batch) returns {tuple(loss.shape)}; let it return one number, the mean over rows."
        )
    return float(loss)


def _check_gather_dtype(blueprint: Blueprint, make_optimizer: Callable[..., Any]) -> None:
    if blueprint.has_muon and not accepts(make_optimizer, "gather_dtype"):
        raise ValueError(
            "make_optimizer takes no gather_dtype, without which Muon rounds in every row; let it take "
            "(model, grid, gather_dtype=None), and give that to the optimizer."
        )


def _digests(tensors: Iterable[Any]) -> list[str]:
    """Return a short text for each, which depends on every bit of a tensor."""
    return [f"{tuple(t.shape)} {fingerprints([t]).item():x}" if isinstance(t, Tensor) else repr(t) for t in tensors]
