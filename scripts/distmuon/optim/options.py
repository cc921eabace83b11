"""Options: their defaults, and what is refused of them, of Muon and of AdamW.

A group gets them when it is added (`complete_group`), and what it says is checked again when a step begins, because
schedulers, users and loaded states write to it between two steps.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from distmuon.optim.coefficients import quintics
from distmuon.optim.newton_schulz import COMPUTE_DTYPES, check_form
from distmuon.optim.normalization import INPUT_NORMS, OUTPUT_NORMS
from distmuon.sharding.matrices import check_matrices

MomentumKind = Literal["sum", "average"]
ScaleKind = Literal["match_rms", "original", "unit_rms"]
MOMENTA, SCALES = get_args(MomentumKind), get_args(ScaleKind)
MOMENTUM_DTYPES = (torch.bfloat16, torch.float32, torch.float64)  # hold a momentum of any size; float16 ends at 65504
NEARLY = 0.88  # how alike a typo and the option that was meant are, by difflib's ratio: beta and betas are at 0.89

MUON_DEFAULTS: dict[str, Any] = dict(
    lr=1e-3,
    momentum=0.95,
    nesterov=True,
    momentum_kind="sum",
    weight_decay=0.1,
    cautious_decay=False,
    scale="match_rms",
    ns_steps=5,
    ns_coefficients="muon",
    compute_dtype="auto",
    ns_form="auto",
    ns_norm="safe",
    input_norm=None,
    output_norm=None,
    normuon_beta2=None,
    batched=True,
    matrices="whole",
)  # fmt: skip
ADAMW_DEFAULTS: dict[str, Any] = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
OPTIONS = {"muon": MUON_DEFAULTS, "adamw": ADAMW_DEFAULTS}  # by algorithm
NS_OPTIONS = ("ns_steps", "ns_coefficients", "compute_dtype", "ns_form", "ns_norm")  # as `newton_schulz` takes them
NORM_OPTIONS = ("input_norm", "output_norm", "normuon_beta2")  # before and after it
SCHEDULED = ("initial_lr", "min_lr", "max_lr", "swa_lr", "base_momentum", "max_momentum")  # by torch's schedulers
GROUP_NOTES = ("params", "param_names", "name", "lr_scale", *SCHEDULED)  # what a group may carry besides its options

# ---- When a group is added ------------------------------------------------------------------------------


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
    if algorithm not in [*defaults]:  # a list, which can be asked for what has no hash
        raise ValueError(f"algorithm is {algorithm!r}; choose one of {', '.join(defaults)}.")
    refuse_unknown_in_group(group, (*defaults[algorithm], "algorithm"), f"{algorithm} in {who}")
    if algorithm == "adamw" and given.get("adamw_lr") is not None:
        group.setdefault("lr", given["adamw_lr"])
    for name, value in defaults[algorithm].items():
        group.setdefault(name, given.get(name, value))


def options_of(defaults: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names that an optimizer may be given: the options of its algorithms, and a rate for AdamW alone."""
    names = dict.fromkeys(name for options in defaults.values() for name in options)
    return [*names, *(["adamw_lr"] if len(defaults) > 1 else [])]


def options_among(arguments: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return those of a constructor's arguments, its `locals()`, that are defaults of the groups. See `options_of`."""
    return {name: arguments[name] for name in options_of(defaults)}


# ---- When a step begins ---------------------------------------------------------------------------------


def check_complete(group: Mapping[str, Any], defaults: Mapping[str, Iterable[str]], who: str) -> None:
    """Raise ValueError unless a group has all options of its algorithm, and none that looks like a typo of one.

    defaults: the options of each algorithm. A group may hold whatever else its user keeps there, as torch has it.
    """
    algorithm = group.get("algorithm", "")
    if algorithm not in [*defaults]:
        raise ValueError(f"a group has algorithm={algorithm!r}; {who} runs {' or '.join(map(repr, defaults))}.")
    options = [*defaults[algorithm], "algorithm"]
    if missing := [name for name in options if name not in group]:
        raise ValueError(
            f"a group with algorithm={algorithm!r} lacks {', '.join(missing)}; set them too, or make a new optimizer."
        )
    for name in group.keys() - {*options}:
        if meant := _nearest(name, tuple(options)):
            raise ValueError(f"a group has the option {name!r}, which nothing reads; write {meant!r} if that is meant.")


@contextlib.contextmanager
def options_on_host(groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Let options that are numbers on a device be the same numbers in the host's memory until the block ends.

    A step looks at an option in many places, and each look would wait until the device has done all that it was given.
    This waits once, for all of them. They stay tensors of their dtypes, because torch's AdamW, too, computes 1 - lr *
    weight_decay and lr / (1 - beta1^t) in the dtype of a tensor lr: as Python's numbers they would move the last bit.
    """
    options = [(group, name, group[name]) for group in groups for name in group.keys() - {*GROUP_NOTES}]
    numbers = {id(number): number for _, _, option in options for number in _parts(option) if _is_away(number)}
    here = dict[int, Tensor]()
    for device in {number.device for number in numbers.values()}:
        found = [number for number in numbers.values() if number.device == device]
        wide = functools.reduce(torch.promote_types, (number.dtype for number in found))  # which holds each exactly
        read = torch.stack([number.detach().reshape(()).to(wide) for number in found]).to("cpu")
        for number, value in zip(found, read.unbind(), strict=True):
            here[id(number)] = value.to(number.dtype).view(number.shape)
    changed = []
    for group, name, option in options:
        if any(id(number) in here for number in _parts(option)):
            parts = [here.get(id(number), number) for number in _parts(option)]
            group[name] = tuple(parts) if isinstance(option, tuple | list) else parts[0]
            changed.append((group, name, option, group[name]))
    try:
        yield
    finally:
        for group, name, option, ours in changed:
            if group.get(name) is ours:
                group[name] = option


def check_options(group: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError, naming it, for an option that a group's algorithm does not have."""
    CHECKS[group["algorithm"]](group)


def check_muon_options(group: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError, naming the value and what is allowed, for options that Muon does not have."""
    if group["momentum_kind"] not in MOMENTA:
        raise ValueError(f"momentum_kind is {group['momentum_kind']!r}; choose one of {', '.join(MOMENTA)}.")
    if group["scale"] not in SCALES:
        raise ValueError(f"scale is {group['scale']!r}; choose one of {', '.join(SCALES)}.")
    for name in ("lr", "weight_decay", "momentum"):
        check_number(name, group[name])
    if not all(0 <= group[name] < math.inf for name in ("lr", "weight_decay")) or not 0 <= group["momentum"] < 1:
        raise ValueError(
            f"lr={group['lr']}, weight_decay={group['weight_decay']}, momentum={group['momentum']}: "
            "lr and weight_decay must be 0 or more, and finite, momentum in [0, 1)."
        )
    for name, known in (("input_norm", INPUT_NORMS), ("output_norm", OUTPUT_NORMS)):
        if group[name] is not None and group[name] not in known:
            raise ValueError(f"{name} is {group[name]!r}; choose one of {', '.join(known)}, or None.")
    if (beta2 := group["normuon_beta2"]) is not None:
        check_number("normuon_beta2", beta2)
        if not 0 <= beta2 < 1:
            raise ValueError(
                f"normuon_beta2 is {plain(beta2)!r}; give 0 or more and less than 1, or None for no NorMuon."
            )
    for name in ("nesterov", "cautious_decay", "batched"):
        check_flag(name, group[name])
    check_matrices(group["matrices"])
    quintics(group["ns_coefficients"], group["ns_steps"])
    check_dtype("compute_dtype", group["compute_dtype"], "auto", COMPUTE_DTYPES)
    check_form(group["ns_form"], group["ns_norm"])


def check_adamw_options(group: Mapping[str, Any]) -> None:
    """Raise ValueError for a learning rate, beta, eps or decay that torch refuses, or that would ruin the weights.

    Raises TypeError for one that is no number.
    """
    try:
        beta1, beta2 = group["betas"]
    except (TypeError, ValueError):
        raise ValueError(f"AdamW refuses its group: betas is {group['betas']!r}; give two numbers.") from None
    not_below_0 = {name: group[name] for name in ("lr", "eps", "weight_decay")}
    below_1 = {"betas[0]": beta1, "betas[1]": beta2} | {k: group[k] for k in ("momentum",) if k in group}
    for name, value in (not_below_0 | below_1).items():
        check_number(name, value)
    for name, value in not_below_0.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"AdamW refuses its group: {name} is {plain(value)}; give 0 or more.")
    for name, value in below_1.items():
        if not 0 <= value < 1:
            raise ValueError(f"AdamW refuses its group: {name} is {plain(value)}; give 0 or more, and less than 1.")


CHECKS = {"muon": check_muon_options, "adamw": check_adamw_options}


def check_dtype(name: str, dtype: Any, default: Any, allowed: Sequence[torch.dtype] = MOMENTUM_DTYPES) -> None:
    """Raise TypeError, naming what is allowed, if the option `name` is neither its default nor such a dtype."""
    if dtype != default and dtype not in allowed:
        raise TypeError(f"{name} is {dtype!r}; give {default!r} or one of {', '.join(map(str, allowed))}.")


def check_number(name: str, value: Any) -> None:
    """Raise TypeError for an option that is no real number, ValueError for a tensor of several elements."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} is a tensor of {value.numel()} elements; give one.")
    if not hasattr(value, "__float__") or (isinstance(value, Tensor) and value.is_complex()):
        text = " (what was read from a file as text: YAML takes 1e-3 for text, and 1.0e-3 for a number)"
        raise TypeError(f"{name} is {value!r}; give a number{text if isinstance(value, str) else ''}.")


def check_count(name: str, value: Any, least: int) -> None:
    """Raise ValueError for what is no whole number, or less than `least`."""
    try:
        known = not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        known = False
    if not known:
        raise ValueError(f"{name} is {value!r}; give a whole number, {least} or more.")


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError for an option that is neither True nor False."""
    try:
        known = value in (True, False)
    except (RuntimeError, ValueError):  # of an array, several
        known = False
    if not known:
        raise ValueError(f"{name} is {value!r}; give True or False.")


def plain(option: Any) -> Any:
    """Return an option as a number, or numbers, where it is a tensor."""
    return option.tolist() if isinstance(option, Tensor) else option


def _parts(option: Any) -> Sequence[Any]:
    return option if isinstance(option, tuple | list) else (option,)


def _is_away(number: Any) -> bool:
    """Return whether this is a number that lies on a device."""
    is_one = isinstance(number, Tensor) and number.is_floating_point() and number.numel() == 1
    return is_one and number.device.type not in ("cpu", "meta")


@functools.cache
def _nearest(name: str, options: tuple[str, ...]) -> str | None:
    return next(iter(difflib.get_close_matches(name, options, 1, NEARLY)), None)
