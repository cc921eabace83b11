"""Which parameter goes to Muon, which to AdamW, and why; the map that follows; a clear word where that cannot work."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distmuon.optim.options import GROUP_NOTES, MOMENTUM_DTYPES
from distmuon.optim.roles import MATRICES, Role, roles_of
from distmuon.optim.states import names_of
from distmuon.sharding.buffers import specs_of
from distmuon.sharding.layout import Layout, ParamSpec, plan
from distmuon.sharding.matrices import Matrices, localize
from distmuon.sharding.warning import warn_user

EMBEDDING_NAME = re.compile(
    r"(^|\.)((embed\w*|\w*embedding\w*|wte|wpe|lm_head|unembed\w*)(\.|$)|(head|classifier)(\.weight)?$)"
)
GROUPS: dict[str, dict[str, Any]] = {  # what `split_parameters` makes, in this order
    "map": {"algorithm": "muon"},
    "stack": {"algorithm": "muon", "matrices": MATRICES["stack"]},
    "kernel": {"algorithm": "muon", "matrices": MATRICES["kernel"]},
    "rest": {"algorithm": "adamw"},
    "without decay": {"algorithm": "adamw", "weight_decay": 0.0},
}
COMMON = ("lr", "weight_decay")  # options that Muon and AdamW both have


class Trained(list[tuple[str, nn.Parameter]]):
    """The parameters of a group with their names. left_out: those of the model that were frozen, for nobody to train.

    An optimizer that is made of such groups looks, step by step, whether one of those gets gradients after all.
    """

    def __init__(
        self, params: Iterable[tuple[str, nn.Parameter]], left_out: Iterable[tuple[str, nn.Parameter]]
    ) -> None:
        super().__init__(params)
        self.left_out = [(name, weakref.ref(p)) for name, p in left_out]


def split_parameters(
    model: nn.Module,
    explain: bool = False,
    heads: Iterable[str] | None = None,
    *,
    frozen: bool = False,
    decay_vectors: bool = True,
    matrices: Mapping[str, Matrices] | None = None,
) -> list[dict]:
    """Return named parameter groups: maps between hidden vectors for Muon, everything else for AdamW.

        split_parameters(model, explain=True)  # prints where each parameter goes, why, and how much that is

    Muon's step is steepest descent for a map between hidden vectors. Embeddings and output heads have one-hot
    vectors on one side, norms and biases are not maps at all: the paper leaves all of them to AdamW. `roles` says how
    each is recognised. Stacked experts and the kernels of convolutions are maps, too, in groups of their own, because
    the option `matrices` is a group's. A fused query, key and value goes as one matrix, unless you say what it holds:

        split_parameters(model, matrices={"qkv": ("rows", 3)})  # three in every qkv.weight

    explain: print a line for each parameter, with the reason, and a summary.
    heads: last names of the modules that map to the outputs, instead of the usual ones. What the structure or the model
        itself says is heard before.
    frozen: take frozen parameters (`requires_grad=False`), too, so that they train once they are unfrozen. Otherwise
        they are left out, and an optimizer made of the groups warns if one gets a gradient later.
    decay_vectors: False puts norms, biases and what its model marks `_no_weight_decay` into a group without decay.
    matrices: {how a name ends: the option `matrices` of those}, for hidden matrices that are several in one, see
        `sharding.matrices`; the name of the module or of the parameter, in whole words.
    Returns [{"params": [(name, parameter)], "algorithm": "muon"}, perhaps the same with matrices="stacked", with
    matrices="flattened" and with each of `matrices`, {..., "algorithm": "adamw"}, perhaps the same with
    weight_decay=0.0], no group empty.
    Warns where Muon would get less than half of what is neither embedding nor head. Raises ValueError for flat
    parameters of FSDP1 and placeholders of DeepSpeed's ZeRO-3, in which nothing has its shape; and for an end in
    `matrices` that no hidden matrix has.
    """
    reshard(model)
    modules = dict(model.named_modules())
    for name, p in model.named_parameters():
        _refuse_flat(modules[name.rpartition(".")[0]], name, p)
    routed = list(roles_of(model, heads))
    left_out = [(name, p) for name, p, _ in routed if not p.requires_grad and not (frozen and _could_train(p))]
    taken = [each for each in routed if each[0] not in {name for name, _ in left_out}]
    several = {f".{end}": {"algorithm": "muon", "matrices": option} for end, option in (matrices or {}).items()}
    options = {kind: GROUPS[kind] for kind in MATRICES} | several | GROUPS  # in the order of the groups
    chosen: dict[str, list[tuple[str, nn.Parameter]]] = {kind: [] for kind in options}
    for name, p, role in taken:
        ends = (end for end in several if role.kind == "map" and f".{name}".endswith((end, f"{end}.weight")))
        chosen[next(ends, None) or _kind_of_group(p, role, decay_vectors)].append((name, p))
    if missing := [end[1:] for end in several if not chosen[end]]:
        raise ValueError(
            f"matrices names {', '.join(map(repr, missing))}, and no hidden matrix that is trained has a name "
            "that ends so; split_parameters(model, explain=True) lists them."
        )
    if explain:
        _print_roles(taken, len(left_out))
    _warn_of_little(taken)
    groups = [{"params": params} | options[kind] for kind, params in chosen.items() if params]
    for group in groups[:1]:
        group["params"] = Trained(group["params"], left_out)
    return groups


def _kind_of_group(parameter: Tensor, role: Role, decay_vectors: bool) -> str:
    if role.kind in MATRICES:
        return role.kind
    bare = role.kind == "vector" or getattr(parameter, "_no_weight_decay", False)
    return "without decay" if bare and not decay_vectors else "rest"


def _could_train(parameter: nn.Parameter) -> bool:
    """Say whether a frozen parameter could be trained: not if it is quantized, in float16 or without values."""
    natural = parameter.dtype in (torch.bfloat16, torch.float32, torch.float64)
    return natural and not parameter.is_meta and parameter.layout == torch.strided


def _refuse_flat(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Raise ValueError for a parameter that is a piece of storage, or none, and not what its module computes with."""
    if hasattr(parameter, "ds_id") and parameter.numel() == 0:
        raise ValueError(
            f"parameter {name!r} is a placeholder of DeepSpeed's ZeRO-3, which keeps the values elsewhere; Muon needs "
            "whole matrices or DTensors, so shard the model with FSDP2 (fully_shard) instead."
        )
    flat = type(parameter).__name__ == "FlatParameter" or getattr(parameter, "_is_flat_param", False)
    if flat or (isinstance(module, nn.Linear) and name.endswith("weight") and parameter.ndim == 1):
        raise ValueError(
            f"parameter {name!r} is a flat one of FullyShardedDataParallel (FSDP1), in which all matrices of a module "
            "lie in one row, so Muon would get nothing; shard the model with FSDP2 (fully_shard) instead."
        )


def _print_roles(routed: Sequence[tuple[str, nn.Parameter, Role]], left_out: int) -> None:
    sums = {"Muon": [0, 0], "AdamW": [0, 0]}
    for name, p, role in routed:
        who = "Muon" if role.kind in MATRICES else "AdamW"
        print(f"{name:32s} {'x'.join(map(str, p.shape)):>10s}  {who.lower():5s}  {role.reason}")
        sums[who][0] += p.numel()
        sums[who][1] += 1
    (muon, of_muon), (adamw, of_adamw) = sums.values()
    total = max(1, muon + adamw)
    print(
        f"Muon {muon:,} elements ({muon / total:.1%}) of {of_muon} parameters, AdamW {adamw:,} ({adamw / total:.1%}) "
        f"of {of_adamw}" + (f"; {left_out} frozen ones are left out" if left_out else "")
    )


def _warn_of_little(routed: Sequence[tuple[str, nn.Parameter, Role]]) -> None:
    """Warn where Muon gets little of what it might be expected to get: a model's author may know of more maps."""
    inner = [each for each in routed if each[2].kind not in ("table", "head", "vector")]
    mine = sum(p.numel() for _, p, role in inner if role.kind in MATRICES)
    total = sum(p.numel() for _, p, _ in inner)
    if not routed or (mine and 2 * mine >= total):
        return
    others = [each for each in inner or routed if each[2].kind not in MATRICES]
    name, p, role = max(others, key=lambda each: each[1].numel())
    little = f"{mine:,} of the {total:,} elements outside of embeddings, heads, norms and biases"
    warn_user(
        f"Muon gets {little if mine else 'nothing'}, and AdamW trains the rest, most of it in {name!r} of shape "
        f"{tuple(p.shape)} ({role.reason}). split_parameters(model, explain=True) gives all reasons; put what is a map "
        "between hidden vectors into a Muon group of your own.",
    )


def reshard(model: nn.Module) -> None:
    """Let every module of FSDP2 hold its shards. After a forward pass without a backward one, as in evaluation, the
    outermost module still holds whole parameters, which are other tensors than those that are trained.

    Raises TypeError for what is no model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is {_shortly(model)}; give an nn.Module.")
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
        found[index] = spec._replace(matrices=localize(matrices, *where))
    return found, muon


def named(group: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Return a group's parameters with their names, or with their places in it."""
    return zip(names_of(group), group["params"], strict=True)


@contextlib.contextmanager
def withdrawn_if_refused(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Take the groups back that are added inside, where one of them is refused."""
    before = len(optimizer.param_groups)
    try:
        yield
    except (TypeError, ValueError):
        del optimizer.param_groups[before:]
        raise


def name_like_the_others(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Give a group's parameters names, or take theirs away, as the groups before have it: torch wants all or none."""
    if not optimizer.param_groups or isinstance(group["params"], Tensor | set):
        return
    params, count = list(group["params"]), len(optimizer.param_groups)
    have, want = any(isinstance(p, tuple) for p in params), "param_names" in optimizer.param_groups[0]
    if want and not have and "param_names" not in group:
        params = [(f"group{count}.{i}", p) for i, p in enumerate(params)]
    elif have and not want:
        params = [p[1] if isinstance(p, tuple) else p for p in params]
    group["params"] = params


def divided(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a group whose params are a list, and that names no algorithm, as one for Muon and one for AdamW, by shape.

    So that a new layer's parameters can be added as torch's users do: matrices for Muon, vectors for AdamW. A group
    with an option that only one of the two has, or with more dimensions, is left as it is.
    """
    if "algorithm" in group or isinstance(group["params"], Tensor | set) or group.keys() - {*COMMON, *GROUP_NOTES}:
        return [group]
    if any(p.ndim > 2 for _, p in map(_pair, group["params"])):
        return [group]
    of: dict[str, list[Any]] = {"muon": [], "adamw": []}
    for each in group["params"]:
        name, p = _pair(each)
        is_matrix = p.ndim == 2 and 1 not in p.shape and p.numel() > 0 and not EMBEDDING_NAME.search(name)
        of["muon" if is_matrix else "adamw"].append(each)
    return [group | {"params": params, "algorithm": algorithm} for algorithm, params in of.items() if params]


def _pair(parameter: Any) -> tuple[str, Any]:
    return parameter if isinstance(parameter, tuple) else ("", parameter)


class Watch:
    """Looks on as an optimizer steps, and says once in a sentence what else nobody would notice.

    That it trains nothing, or that a layer of its model is trained by nobody. Models change after their optimizer is
    made: they are wrapped, get adapters, are moved and loaded in ways that make new parameters, are unfrozen.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._who, self._has_looked = type(optimizer).__name__, False
        self._left_out: list[tuple[str, weakref.ref[nn.Parameter]]] = []

    def take(self, group: Mapping[str, Any]) -> None:
        """Remember what `split_parameters` has left out of a group that is about to be added."""
        self._left_out += getattr(group["params"], "left_out", ())

    def look(self, moves: bool) -> None:
        """Take note of a step. moves: whether any parameter of the optimizer has a gradient."""
        if not moves and not self._has_looked:
            warn_user(
                f"no parameter of this {self._who} has a gradient, so step() changes nothing: backward() was not "
                "called, or the model has other parameters than when the optimizer was made; wrapping, adapters "
                "(LoRA), to_empty and load_state_dict(assign=True) make new ones, so make the optimizer after them.",
            )
        self._has_looked = True
        trained = [name for name, ref in self._left_out if (p := ref()) is not None and p.grad is not None]
        if trained:
            others = f" (and {len(trained) - 1} more)" if trained[1:] else ""
            warn_user(
                f"parameter {trained[0]!r}{others} was frozen when split_parameters ran, so this {self._who} does not "
                "train it, though it has a gradient now; make a new optimizer after unfreezing, or groups with frozen "
                "parameters from the start: split_parameters(model, frozen=True).",
            )
            self._left_out = []


def refuse_model(params: Any, who: str, instead: str) -> None:
    """Raise TypeError, naming what to give instead, for a model in the place of parameters, or nothing like them."""
    if isinstance(params, nn.Module):
        model = type(params).__name__
        raise TypeError(f"{who} takes parameters and was given a model ({model}); give it {instead}.")
    if not isinstance(params, Iterable):
        raise TypeError(f"{who} takes parameters and was given {_shortly(params)}; give it {instead}.")


def list_params(group: Any, who: str) -> None:
    """Let a group's params be a list, or the one tensor or the set that they are, of which torch says what is wrong.

    Raises TypeError, saying what is there, for what is no tensor and no pair (name, tensor).
    """
    if not isinstance(group, dict) or "params" not in group:
        raise TypeError(f'a group of {who} is {_shortly(group)}; give a dict with "params", a list of parameters.')
    params, names = group["params"], group.get("param_names")
    if isinstance(params, set):
        return
    if isinstance(params, Tensor | str | Mapping) or not isinstance(params, Iterable):
        params = [params]
    elif not isinstance(params, list):
        params = group["params"] = list(params)
    if names and not (isinstance(names, list | tuple) and len(names) == len(params)):
        raise TypeError(
            f"param_names of a group of {who} is {_shortly(names)}, for {len(params)} parameter(s); give a list with a "
            "name for each, or pairs (name, parameter) as params."
        )
    for one in params:
        p = one[1] if isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) else one
        if isinstance(p, nn.Module):
            raise TypeError(
                f"params of a group of {who} holds a module ({type(p).__name__}); give its parameters: "
                "list(module.named_parameters())."
            )
        if not isinstance(p, Tensor):
            raise TypeError(f"params of a group of {who} holds {_shortly(one)}; give tensors, or pairs (name, tensor).")


def _shortly(value: Any) -> str:
    return f"{' '.join(repr(value).split()):.60} ({type(value).__name__})"


def refuse_meta(name: str, parameter: Tensor) -> None:
    """Raise ValueError, naming the parameter and the remedy, if it has no storage."""
    if parameter.is_meta:
        raise ValueError(f"parameter {name!r} is on the meta device; give it storage first (to_empty), then values.")


def check_muon_parameter(
    name: str, parameter: Tensor, matrices: Matrices = "whole", tp: int = 1, warn: bool = True
) -> None:
    """Raise ValueError, naming the parameter and the remedy, if Newton–Schulz cannot or should not take it.

    matrices: the group's option. tp: T, where the parameter is TP-local.
    warn: of an embedding or output head, recognised by its name: it runs, but not well.
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
            f"parameter {name!r} {problem}; Muon takes dense real 2-D matrices. Put it in an AdamW group: "
            "split_parameters(model) makes both, and so does MuonW(model), given the model and not its parameters()."
        )
    localize(matrices, name, tuple(parameter.shape), getattr(parameter, "tp_split_dim", None) if tp > 1 else None, tp)
    if warn and EMBEDDING_NAME.search(name):
        warn_user(f"parameter {name!r} looks like an embedding or output head; the paper gives those to AdamW.")


def check_muon_parameters(group: Mapping[str, Any], known: Mapping[Tensor, Any] | None = None) -> None:
    """Raise ValueError, naming it, for a whole parameter of a group that Muon cannot take; warn of what it should not.

    known: the states of a training that has begun. What has one was checked before, and nothing is warned of again.
    """
    for name, parameter in named(group):
        if known is not None and parameter in known:
            continue
        check_muon_parameter(name, parameter, group["matrices"], warn=known is None)
        if parameter.dtype not in MOMENTUM_DTYPES:
            raise ValueError(
                f"parameter {name!r} is {parameter.dtype}, which holds no momentum (it ends at 65504); "
                "train it in bfloat16 or float32, and let torch.autocast compute in float16."
            )
