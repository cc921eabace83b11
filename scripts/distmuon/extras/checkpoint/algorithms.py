"""Which optimizer may go on with a group that another one has left: what is the same in meaning, and no more.

A state belongs to an algorithm. "muon" and "adamw" keep the same of a parameter whoever runs them (Muon, MuonW,
DistributedMuon; Zero1AdamW, the AdamW groups of the other two, torch.optim.AdamW), so any of them goes on where another
has stopped. What is neither belongs to the class that made it: torch.optim.Muon scales its momentum otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distmuon.extras.checkpoint.files import CheckpointError, in_words
from distmuon.extras.checkpoint.manifest import DTYPES, StoredGroup
from distmuon.extras.checkpoint.tensors import LiveTensors, Owned
from distmuon.optim.muon import Muon
from distmuon.optim.muonw import MuonW
from distmuon.optim.options import CHECKS, GROUP_NOTES
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.optim.states import STATE_KEYS, CheckedState

OPTIONS = {"muon": {"lr", "weight_decay", "momentum", "nesterov"}, "adamw": {"lr", "weight_decay", "betas", "eps"}}
NO_OPTIONS = ("params", "param_names")

# ---- What a group is, and what is kept of it --------------------------------------------------------------


def algorithm_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """Return by what a group is trained: an algorithm that several optimizers run, or the name of the class."""
    if isinstance(optimizer, MuonW | ShardedOptimizer):
        return group["algorithm"]
    if isinstance(optimizer, Muon):
        return "muon"
    if type(optimizer) is torch.optim.AdamW and not group["amsgrad"] and not group["maximize"]:
        return "adamw"
    return name_of(optimizer)


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Return what an optimizer is called in a checkpoint and in sentences."""
    if isinstance(optimizer, CheckedState):
        return optimizer.MADE_BY
    made_by = type(optimizer)
    return f"torch.optim.{made_by.__name__}" if made_by.__module__.startswith("torch.optim") else made_by.__name__


def groups_to_keep(training: LiveTensors) -> list[dict[str, Any]]:
    """Return, of every group, its parameters' names, options, and what trained it, as JSON holds them."""
    names = {id(owned.tensor): owned.name for owned in training.owned}
    return [
        {
            "parameters": [names[id(p)] for p in group["params"]],
            "options": {name: _plain(name, value) for name, value in group.items() if name not in NO_OPTIONS},
            "algorithm": algorithm_of(optimizer, group),
            "made_by": name_of(optimizer),
            "steps": getattr(optimizer, "steps", None) if isinstance(optimizer, ShardedOptimizer) else None,
        }
        for optimizer in training.optimizers
        for group in optimizer.param_groups
    ]


def _plain(name: str, value: Any) -> Any:
    """Return an option as JSON holds it. Raises CheckpointError, naming it, where it cannot."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(name, one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"the option {name} is {value!r}, which JSON does not hold; leave it out of the group.")


def _like(now: Any, value: Any) -> Any:
    """Return an option as the optimizer has it, from what JSON has kept."""
    if isinstance(value, str) and value.startswith("torch.") and value.removeprefix("torch.") in DTYPES:
        return DTYPES[value.removeprefix("torch.")]
    if isinstance(value, list):
        return tuple(_like(None, one) for one in value)
    return torch.tensor(value, dtype=now.dtype, device=now.device) if isinstance(now, Tensor) else value


# ---- What becomes of a group that was saved --------------------------------------------------------------


def check_algorithm(saved: StoredGroup, owned: Owned) -> None:
    """Raise CheckpointError, naming both, where a parameter was trained by another algorithm than it is here."""
    here, now = algorithm_of(owned.optimizer, owned.group), name_of(owned.optimizer)
    was = _algorithm_by_options(saved.options) if saved.algorithm is None else saved.algorithm
    if was is None and here not in STATE_KEYS and saved.options.keys() == owned.group.keys() - set(NO_OPTIONS):
        return
    if was != here:
        then = " in ".join(dict.fromkeys(filter(None, (was or "another optimizer", saved.made_by))))
        today = " in ".join(dict.fromkeys((here, now)))
        raise CheckpointError(
            f"{owned.name!r} was trained by {then}, and is trained here by {today}, whose state means something else; "
            "give the optimizer the groups that were saved, or load the weights alone: load(folder, model)."
        )


def _algorithm_by_options(options: Mapping[str, Any]) -> str | None:
    """Return what has trained a group of the first format, which did not say; None where no optimizer of ours did."""
    if "momentum_kind" in options:
        return "muon"
    adamw = options.get("decoupled_weight_decay") and not options.get("amsgrad") and not options.get("maximize")
    return options.get("algorithm", "adamw" if adamw else None)


def options_for(sources: Sequence[StoredGroup], owned: Owned) -> dict[str, Any]:
    """Return a group's new options: those of the groups that its parameters were in, where these were alike."""
    group, source = owned.group, sources[0]
    for other in sources[1:]:
        differing = [name for name in source.options if other.options.get(name) != source.options[name]]
        if differing or other.options.keys() != source.options.keys():
            name = differing[0] if differing else "their options"
            raise CheckpointError(
                f"{owned.name!r} and others of its group were in groups with another {name} each; divide the "
                "optimizer's groups as they were saved."
            )
    if missing := sorted(OPTIONS.get(algorithm_of(owned.optimizer, group), set()) - source.options.keys()):
        raise CheckpointError(
            f"the checkpoint's options for {owned.name!r} lack {', '.join(missing)}; take another checkpoint."
        )
    ours = isinstance(owned.optimizer, Muon | MuonW | ShardedOptimizer)
    options = dict(source.options)
    converted = source.made_by not in (None, name_of(owned.optimizer))
    if converted:
        options.pop("algorithm", None)
    if converted and source.algorithm == "adamw" and "momentum" in options:  # a scheduler cycles it, in our groups
        options["betas"] = [options.pop("momentum"), options["betas"][1]]
    if ours or converted:
        options = {name: value for name, value in options.items() if name in (*group, *GROUP_NOTES, "momentum")}
    found = {name: _like(group.get(name), value) for name, value in options.items()}
    _check_options(found, owned)
    return found


def _check_options(options: Mapping[str, Any], owned: Owned) -> None:
    """Raise CheckpointError for a value that the group could not have."""
    group, algorithm = owned.group, algorithm_of(owned.optimizer, owned.group)
    for name, value in options.items():
        now = group.get(name)
        if not _alike(now, value) or (name == "algorithm" and value != now):
            raise CheckpointError(f"the option {name} is {value!r} in the checkpoint, and {now!r} here; take another.")
    try:
        CHECKS.get(algorithm, dict)({**group, **options})
    except Exception as error:
        raise CheckpointError(f"the checkpoint's options for {owned.name!r} are refused: {in_words(error)}.") from None
    if isinstance(owned.optimizer, ShardedOptimizer) and options.get("matrices") != group.get("matrices"):
        raise CheckpointError(
            f"the option matrices of {owned.name!r} is {options.get('matrices')!r} in the checkpoint and "
            f"{group.get('matrices')!r} here, where the map is laid out already; make the optimizer with the former."
        )


def _alike(now: Any, value: Any) -> bool:
    """Return whether a group that has a number, a truth or a pair of numbers now would get one again."""
    if isinstance(now, bool):
        return isinstance(value, bool)
    if _is_number(now):
        return _is_number(value) and math.isfinite(value)
    if isinstance(now, list | tuple) and all(map(_is_number, now)):
        return isinstance(value, tuple) and len(value) == len(now) and all(map(_alike, now, value))
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Tensor) and not isinstance(value, bool)
