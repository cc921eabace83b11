"""What `load_state_dict` takes: a state that the same optimizer has made of the same parameters.

torch matches states with parameters by their place and looks no further, so that a state of another optimizer, or of
the same parameters in another order, trains on as if it fitted. Here it is put in order by the parameters' names, or
refused before anything has changed. A state says what made it: "made_by" in each of its groups.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor

from distmuon.optim.options import check_complete
from distmuon.sharding.matrices import rows_in

STATE_KEYS = {"muon": ("momentum_buffer",), "adamw": ("step", "exp_avg", "exp_avg_sq")}  # what an algorithm keeps
ROW_MOMENTS = "row_exp_avg_sq"  # where NorMuon is on: of all rows of a parameter's matrices, [rows], in their order
UNPLACED = {"step", ROW_MOMENTS}  # which are no tensors like the parameter: whole on every rank, in dtypes of their own
MASTER_WEIGHT = "master_weight"  # and what is kept of a parameter that is narrower than float32
MADE_BY, NAMES = "made_by", "param_names"
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # in names of tensors, torch's alone
PARALLEL = "module"  # what DataParallel and DistributedDataParallel call the model inside; others use the name, too

Group = Mapping[str, Any]


class CheckedState(torch.optim.Optimizer):
    """The part of an optimizer that saves and loads.

    It does so in torch's own hooks, of which it is the last before a load and the first after one: other hooks may
    change a foreign state so that it fits, and see what was loaded.
    """

    MADE_BY: ClassVar[str]  # the name in a state of this optimizer
    DEFAULTS: Mapping[str, Any]  # of the options of each algorithm; of one that has a single algorithm, its options
    FIXED: ClassVar[Sequence[str]] = ()  # options that stay as they are once the optimizer is made
    steps: int | None = None  # updates made so far, where it counts them beside what is in the state

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's optimizers do, and in each group what made it."""
        first = self.register_state_dict_post_hook(lambda _, state: self._sign(state), prepend=True)
        try:
            return super().state_dict()
        finally:
            first.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned: a copy of it, in the order of this optimizer's parameters.

        Raises ValueError, saying what differs, before anything has changed.
        """
        if not isinstance(state_dict, Mapping):  # of which torch makes a copy before it asks anyone
            _refuse_no_state(state_dict)
        last = self.register_load_state_dict_pre_hook(lambda _, state: self._set_aside(state))
        first = self.register_load_state_dict_post_hook(lambda _: self._put_in(*self._incoming), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
            first.remove()
            self.__dict__.pop("_incoming", None)

    def _sign(self, state_dict: dict[str, Any]) -> None:
        """Write into a state, which torch has made anew, what made it."""
        for group in state_dict["param_groups"]:
            group[MADE_BY] = self.MADE_BY

    def _set_aside(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Check and order a state; keep its tensors from torch, which would round all to the parameters' dtype."""
        _refuse_no_state(state_dict)
        groups = self._in_order(state_dict)
        numbers = [number for group in groups for number in group["params"]]
        self._incoming = [state_dict["state"].get(number, {}) for number in numbers], state_dict
        unsigned = [{name: value for name, value in group.items() if name != MADE_BY} for group in groups]
        return state_dict | {"state": {}, "param_groups": unsigned}

    def _required(self, group: Group) -> tuple[str, Sequence[str]]:
        """Return a group's algorithm and the options that it needs. Raises ValueError for a group that lacks some."""
        check_complete(group, self.DEFAULTS, self.MADE_BY)
        return group["algorithm"], ["algorithm", *self.DEFAULTS[group["algorithm"]]]

    def _in_order(self, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the groups of a state as this optimizer has them; raise ValueError if it is not one of its own."""
        raise NotImplementedError

    def _put_in(self, states: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
        """Take a copy of what was loaded. states: of the parameters in order. state_dict: that they came in."""
        raise NotImplementedError


# ---- What fits --------------------------------------------------------------------------------------------


def _refuse_no_state(given: Any) -> None:
    """Raise ValueError for what does not look like a state of any optimizer's: another part of a checkpoint, or all."""
    parts = dict(given) if isinstance(given, Mapping) else {}
    state, groups = parts.get("state"), parts.get("param_groups")
    has_states = isinstance(state, Mapping) and all(isinstance(one, Mapping) for one in state.values())
    has_groups = isinstance(groups, list | tuple) and all(
        isinstance(one, Mapping) and "params" in one for one in groups
    )
    if has_states and has_groups:
        return
    what = f"a dict of {_listed_names(parts)}" if parts else f"a {type(given).__name__}"
    raise ValueError(
        f"this is no state of an optimizer, but {what}; give what its state_dict() returned, "
        '{"state": ..., "param_groups": ...}.'
    )


def _listed_names(parts: Mapping[Any, Any]) -> str:
    return ", ".join(map(repr, [*parts][:3])) + (" and others" if len(parts) > 3 else "")


def check_maker(groups: Sequence[Group], *makers: str) -> None:
    """Raise ValueError if the groups of a state say that another optimizer than these has made it."""
    for group in groups:
        if (made_by := group.get(MADE_BY, makers[0])) not in makers:
            raise ValueError(
                f"this state was made by {made_by}, and {makers[0]} would train on with parts of it; load it into "
                f"{made_by}, or take the weights alone and begin with a new state."
            )


def asked_by_torchs_checkpoint() -> bool:
    """Return whether torch.distributed.checkpoint is among the callers; nothing but the stack says so."""
    frame: FrameType | None = sys._getframe(1)
    while frame and not frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint."):
        frame = frame.f_back
    return frame is not None


def check_same_algorithm(optimizer: CheckedState, own: Group, saved: Group) -> str:
    """Return the algorithm of two groups; raise ValueError if it is not one, or if the saved one lacks an option."""
    algorithm, options = optimizer._required(own)
    who = optimizer.MADE_BY
    if (theirs := saved.get("algorithm", algorithm if "algorithm" not in own else None)) != algorithm:
        by = f"of {theirs!r}" if theirs else f"that names no algorithm, so {who} has not made it"
        raise ValueError(
            f"this state has a group {by}, where the optimizer has one of {algorithm!r}; load one of the same groups."
        )
    if missing := [name for name in options if name not in saved]:
        raise ValueError(
            f"this state's groups lack {', '.join(missing)}; another optimizer saved it, or an older {who}: add them "
            "by register_load_state_dict_pre_hook, if you know them."
        )
    return algorithm


def in_own_order(own: Sequence[Group], saved: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the saved groups, and what they say of each parameter, in the order of the optimizer's own.

    By name where both have names; a state by whose keys torch.distributed.checkpoint has matched them is in order.
    Otherwise by place, as torch does: then all that can be compared are sizes, here, and shapes. Raises ValueError.
    """
    by_key = any(isinstance(number, str) for group in saved for number in group["params"])
    have_names = all(NAMES in group for group in (*own, *saved)) and not by_key
    common = _all_names(own) & _all_names(saved) if have_names else set()
    if common:
        if odd := sorted(_all_names(own) ^ _all_names(saved)):
            where = "the optimizer" if odd[0] in _all_names(own) else "the state"
            raise ValueError(f"parameter {odd[0]!r} is in {where} alone; load a state of the same parameters.")
        return _by_name(own, saved)
    sizes = [[len(group["params"]) for group in groups] for groups in (own, saved)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"this state has groups of {_listed(sizes[1])} parameters, the optimizer of {_listed(sizes[0])}; load one "
            "of the same groups, and if another optimizer made it, the weights alone."
        )
    return [_renamed(theirs, mine) for mine, theirs in zip(own, saved, strict=True)]


def names_of(group: Group) -> list[str]:
    """Return the names of a group's parameters, or their places in it."""
    names = group.get(NAMES) or ()
    return list(names) if len(names) == len(group["params"]) else [f"#{i}" for i in range(len(group["params"]))]


def plain_name(name: str) -> str:
    """Return a parameter's name without what wrappers put into it, those of data parallelism included."""
    return without_wrappers(name).removeprefix(f"{PARALLEL}.")


def without_wrappers(name: str) -> str:
    """Return a name without what torch.compile, FSDP1 and checkpointed modules put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def kept(state: dict[str, Any], key: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return what a state has under this key: from the first step on, which begins with zeros like a tensor."""
    if key not in state:
        state[key] = torch.zeros_like(like, dtype=dtype)
    return state[key]


def rows_kept(parameter: Tensor, group: Group) -> int:
    """Return of how many rows NorMuon keeps something of a parameter; 0 where it is off."""
    is_on = group.get("normuon_beta2") is not None
    return rows_in(group["matrices"], parameter.shape) if is_on else 0


def kept_rows(state: dict[str, Any], rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:  # [rows]
    """Return what a state has of the rows for NorMuon: from the first step on, which begins with zeros.

    dtype: in which Newton–Schulz sees the matrices; what is kept is float32, or that if it is wider.
    """
    if ROW_MOMENTS not in state:
        state[ROW_MOMENTS] = torch.zeros(rows, dtype=torch.promote_types(dtype, torch.float32), device=device)
    return state[ROW_MOMENTS]


def check_shapes(name: str, held: Tensor, state: Mapping[str, Any], rows: int) -> None:
    """Raise RuntimeError, naming the parameter, if its state was made for another shape than is held of it here.

    rows: as for `check_kept`.
    """
    for key, value, shape in _misshapen(state, held.shape, rows):
        raise RuntimeError(
            f"parameter {name!r} wants {list(shape)} for its {key} now, and has {list(value.shape)} from before; "
            "let its state begin anew (optimizer.state.pop(parameter)), or make a new optimizer."
        )


def _by_name(own: Sequence[Group], saved: Sequence[Group]) -> list[dict[str, Any]]:
    left = list(saved)
    found = []
    for mine in own:
        names = [plain_name(name) for name in mine[NAMES]]
        same = [group for group in left if {plain_name(name) for name in group[NAMES]} == set(names)]
        if not same:
            raise ValueError(
                f"this state divides the same parameters into other groups: none has those of {names[0]!r} and no "
                "others; load one of the same groups."
                if names
                else "this state has no group without parameters, and the optimizer has; load one of the same groups."
            )
        left.remove(same[0])
        numbers = {plain_name(name): n for name, n in zip(same[0][NAMES], same[0]["params"], strict=True)}
        found.append(_renamed(same[0], mine) | {"params": [numbers[name] for name in names]})
    if left:
        raise ValueError(f"this state has {len(left)} more groups than the optimizer; load one of the same groups.")
    return found


def _renamed(saved: Group, own: Group) -> dict[str, Any]:
    """Return a saved group under the optimizer's own names of its parameters, if it has any."""
    return {name: value for name, value in saved.items() if name != NAMES} | {k: own[k] for k in (NAMES,) if k in own}


def _all_names(groups: Sequence[Group]) -> set[str]:
    return {plain_name(name) for group in groups for name in group[NAMES]}


def _listed(numbers: Sequence[int]) -> str:
    return " + ".join(map(str, numbers)) or "no"


def check_kept(name: str, held: Tensor, state: Mapping[str, Any], algorithm: str, rows: int = 0) -> None:
    """Raise ValueError, naming the parameter, unless this is what its algorithm keeps, and of the shape of `held`.

    rows: of how many NorMuon must have kept something; 0 where it is off, or works elsewhere.
    """
    if not state.keys() - {MASTER_WEIGHT}:  # it never had a gradient
        return
    wanted = [*STATE_KEYS[algorithm], *([ROW_MOMENTS] if rows else [])]
    if missing := [key for key in wanted if not isinstance(state.get(key), Tensor)]:
        raise ValueError(
            f"the state of {name!r} has {', '.join(state)} and lacks {', '.join(missing)}, which {algorithm!r} keeps; "
            "load one of the same groups."
        )
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"the state of {name!r} has {key} = {value!r}, which is no tensor; another optimizer's?")
    for key, value, shape in _misshapen(state, held.shape, rows):
        raise ValueError(
            f"{key} of {name!r} has the shape {list(value.shape)} in this state, and {list(shape)} is what is "
            "held of the parameter here; load a state of the same model."
        )


def _misshapen(
    state: Mapping[str, Any], shape: Sequence[int], rows: int
) -> Iterator[tuple[str, Tensor, Sequence[int]]]:
    """Yield what has another shape than a parameter's, or NorMuon's rows if they are read: (key, it, what it wants)."""
    wanted = {"step": None, ROW_MOMENTS: (rows,) if rows else None}
    for key, value in state.items():
        want = wanted.get(key, tuple(shape))
        if want is not None and isinstance(value, Tensor) and value.shape != want:
            yield key, value, want
