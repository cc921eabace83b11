"""Which parameter goes to Muon, which to AdamW, and why; the map that follows; a clear word where that cannot work."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distmuon.optim.states import names_of
from distmuon.sharding.buffers import specs_of
from distmuon.sharding.layout import Layout, ParamSpec, plan
from distmuon.sharding.matrices import Matrices, of_block

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
EMBEDDING_NAME = re.compile(
    r"(^|\.)((embed\w*|\w*embedding\w*|wte|wpe|lm_head|unembed\w*)(\.|$)|(head|classifier)(\.weight)?$)"
)
SCHEDULED = ("initial_lr", "min_lr", "max_lr", "swa_lr", "base_momentum", "max_momentum")  # by torch's schedulers
GROUP_NOTES = ("params", "param_names", "name", "lr_scale", *SCHEDULED)  # what a group may carry besides its options


def split_parameters(model: nn.Module, explain: bool = False, heads: Iterable[str] = ("head", "lm_head")) -> list[dict]:
    """Return two named parameter groups: hidden matrices for Muon, everything else for AdamW.

    Muon's step is steepest descent for a map between hidden vectors. Embeddings and output heads have one-hot
    vectors on one side, norms and biases are not maps at all: the paper leaves all of them to AdamW.

    Frozen parameters (`requires_grad=False`) are left out: unfrozen later, they stay as they are.
    What holds several matrices (experts, kernels, heads) goes by its shape alone: 3-D to AdamW, 2-D as one matrix. Make
    groups of your own for those, with the option `matrices` (see `sharding.matrices`).

    heads: last name of the modules that map to the outputs.
    explain: print one line per parameter with the reason.
    Returns [{"params": [(name, parameter)], "algorithm": "muon"}, {..., "algorithm": "adamw"}], without empty groups.
    """
    reshard(model)
    tables = {id(p) for module in model.modules() if isinstance(module, EMBEDDINGS) for p in module.parameters(False)}
    chosen: dict[str, list[tuple[str, nn.Parameter]]] = {"muon": [], "adamw": []}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            name = f"{module_name}.{leaf}" if module_name else leaf
            algorithm, reason = _choose(module_name, parameter, id(parameter) in tables, tuple(heads))
            chosen[algorithm].append((name, parameter))
            if explain:
                print(f"{name:32s} {'x'.join(map(str, parameter.shape)):>10s}  {algorithm:5s}  {reason}")
    return [{"params": params, "algorithm": algorithm} for algorithm, params in chosen.items() if params]


def reshard(model: nn.Module) -> None:
    """Let every module of FSDP2 hold its shards. After a forward pass without a backward one, as in evaluation, the
    outermost module still holds whole parameters, which are other tensors than those that are trained."""
    for module in model.modules():
        if callable(again := getattr(module, "reshard", None)):
            again()


def groups_for(model: nn.Module, optimizer: str) -> list[dict]:
    """Return the named groups of a run: those of `split_parameters` for "muon", and for "adamw" all of them AdamW's."""
    groups = split_parameters(model)
    return groups if optimizer == "muon" else [group | {"algorithm": "adamw"} for group in groups]


def by_algorithm(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return {"muon": hidden matrices, "adamw": all else} without names, for optimizers of one device."""
    return {"muon": [], "adamw": []} | {
        group["algorithm"]: [parameter for _, parameter in group["params"]] for group in split_parameters(model)
    }


def plan_groups(
    groups: Sequence[dict], dp: int, bucket_size: int, tp: int = 1, planner: Callable[..., Layout] | None = None
) -> tuple[Layout, list[int]]:
    """Return the map of these named groups on `dp` ranks, and the indices in it of Muon's parameters; starts nothing.

    The parameters may be on torch's "meta" device: a map needs no storage. bucket_size: elements. planner: a
    strategy's own, which may ask for T (`tp`); None: `layout.plan`.
    """
    specs = specs_of([pair for group in groups for pair in group["params"]])
    specs, muon = specs_in_groups(specs, groups, tp)
    return planner(specs, muon, dp, tp, bucket_size) if planner else plan(specs, dp, bucket_size), muon


def specs_in_groups(
    specs: Sequence[ParamSpec], groups: Sequence[Mapping[str, Any]], tp: int
) -> tuple[list[ParamSpec], list[int]]:
    """Return the specs of all parameters with what their groups say of them, and the indices of Muon's.

    Raises ValueError where a group's option `matrices` does not fit a parameter, TP-local on `tp` ranks.
    """
    group_of = [group for group in groups for _ in group["params"]]
    muon = [index for index, group in enumerate(group_of) if group["algorithm"] == "muon"]
    found = list(specs)
    for index in muon:
        spec, matrices = specs[index], group_of[index].get("matrices", "whole")
        where = spec.name, spec.shape, spec.tp_split_dim, tp
        found[index] = spec._replace(matrices=of_block(matrices, *where))
    return found, muon


def _choose(module_name: str, parameter: Tensor, is_table: bool, heads: tuple[str, ...]) -> tuple[str, str]:
    if is_table:  # wherever it is held: a tied output layer may come first
        return "adamw", "embedding: a table of rows, looked up one by one"
    if module_name.rsplit(".", 1)[-1] in heads:
        return "adamw", "output head: its rows are separate classes"
    if parameter.ndim != 2:
        return "adamw", f"{parameter.ndim}-D: not a map between hidden vectors"
    return "muon", "hidden matrix"


def refuse_unknown(options: Mapping[str, Any], known: Iterable[str], who: str) -> None:
    """Raise TypeError, naming each of `options` that `who` does not have, and those that it has."""
    if unknown := {name: value for name, value in options.items() if name not in known}:
        found = ", ".join(f"{name!r} ({value!r})" for name, value in unknown.items())
        raise TypeError(f"unknown option(s) {found}; {who} has {', '.join(known)}.")


def refuse_unknown_in_group(group: Mapping[str, Any], known: Iterable[str], who: str) -> None:
    """Raise TypeError as `refuse_unknown` does; parameters, names and schedulers' notes are no options."""
    refuse_unknown(
        {name: value for name, value in group.items() if name not in GROUP_NOTES}, known, f"a group of {who}"
    )


def complete_group(
    group: dict[str, Any], defaults: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any], who: str
) -> None:
    """Set a group's algorithm, by default the first, and its options: its own, else those given, else the defaults.

    defaults: by algorithm. given: to the optimizer, `who`, for all groups.
    Raises ValueError for another algorithm, TypeError for an unknown option.
    """
    algorithm = group.setdefault("algorithm", next(iter(defaults)))
    if algorithm not in defaults:
        raise ValueError(f"algorithm is {algorithm!r}; choose one of {', '.join(defaults)}.")
    refuse_unknown_in_group(group, (*defaults[algorithm], "algorithm"), f"{algorithm} in {who}")
    for name, value in defaults[algorithm].items():
        group.setdefault(name, given.get(name, value))


def named(group: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Return a group's parameters with their names, or with their places in it."""
    return zip(names_of(group), group["params"], strict=True)


@contextlib.contextmanager
def withdrawn_if_refused(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Take the optimizer's latest group back where it is refused inside."""
    try:
        yield
    except (TypeError, ValueError):
        optimizer.param_groups.pop()
        raise


def refuse_meta(name: str, parameter: Tensor) -> None:
    """Raise ValueError, naming the parameter and the remedy, if it has no storage."""
    if parameter.is_meta:
        raise ValueError(f"parameter {name!r} is on the meta device; give it storage first (to_empty), then values.")


def check_muon_parameter(name: str, parameter: Tensor, matrices: Matrices = "whole", tp: int = 1) -> None:
    """Raise ValueError, naming the parameter and the remedy, if Newton–Schulz cannot or should not take it.

    matrices: the group's option. tp: T, where the parameter is TP-local.
    An embedding or output head, recognised by its name, only gets a warning: it runs, but not well.
    """
    problem = None
    refuse_meta(name, parameter)
    if parameter.layout != torch.strided:
        problem = f"is sparse ({parameter.layout})"
    elif not parameter.is_floating_point():
        problem = f"has dtype {parameter.dtype}"
    elif parameter.ndim < 2:
        problem = f"has {parameter.ndim} dimension(s), shape {tuple(parameter.shape)}"
    elif parameter.numel() == 0:
        problem = f"is empty, shape {tuple(parameter.shape)}"
    if problem:
        raise ValueError(
            f"parameter {name!r} {problem}; Muon takes dense real 2-D matrices. Put it in an AdamW group; "
            "split_parameters(model) makes both."
        )
    of_block(matrices, name, tuple(parameter.shape), getattr(parameter, "tp_split_dim", None) if tp > 1 else None, tp)
    if EMBEDDING_NAME.search(name):
        warnings.warn(
            f"parameter {name!r} looks like an embedding or output head; the paper gives those to AdamW.", stacklevel=3
        )
