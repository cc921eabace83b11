"""What loading a checkpoint will change in a training, and what it refuses.

Parameters are matched by name, whatever their order and groups. A group takes the options that its parameters were
trained with, and refuses where these were several. The numbers of a state may become wider, which is exact, and never
narrower.

A state belongs to an algorithm. "muon" and "adamw" keep the same of a parameter whoever runs them (Muon, MuonW,
DistributedMuon; Zero1AdamW, the AdamW groups of the other two, torch.optim.AdamW), so any of them goes on where another
has stopped. What is neither belongs to the class that made it: torch.optim.Muon scales its momentum otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distmuon.extras.checkpoint.files import CheckpointError, in_words
from distmuon.extras.checkpoint.manifest import (
    DTYPES,
    MODEL,
    OPTIMIZER,
    Manifest,
    StoredGroup,
    StoredTensor,
)
from distmuon.extras.checkpoint.tensors import LiveTensors, Owned, ShardView, steps_of
from distmuon.optim.options import CHECKS, GROUP_NOTES
from distmuon.optim.states import MASTER_WEIGHT, ROW_MOMENTS, STATE_KEYS, CheckedState
from distmuon.sharding.buffers import dtype_name

OPTIONS = {"muon": {"lr", "weight_decay", "momentum", "nesterov"}, "adamw": {"lr", "weight_decay", "betas", "eps"}}
SCALAR = "step"  # kept where torch keeps it: on the host, but for capturable and fused optimizers


class Loading:
    """All that a checkpoint will change in a training, found right before any of it is changed.

    Raises CheckpointError, naming what differs, where it would be another training.

    stored: the checkpoint's tensors, by the names that the training has for them.
    live, staged: by name, the memory that each is to reach, and the host's memory that it is read into first.
    said: sentences on what is not quite as it was saved.
    """

    def __init__(self, manifest: Manifest, training: LiveTensors) -> None:
        self.training = training
        self.stored, self.groups = manifest.tensors, manifest.groups
        self.live: dict[str, ShardView] = {}
        self.staged: dict[str, ShardView] = {}
        self.said: list[str] = []
        self._changes: list[Callable[[], None]] = []  # of the optimizers, once their tensors are here
        self._without_masters = False
        self._match_model()
        if training.optimizers:
            kept: dict[str, dict[str, StoredTensor]] = {}
            for name, stored in self.stored.items():
                owner, _, key = name.rpartition("/")
                kept.setdefault(owner, {})[key] = stored
            self._match_groups(kept)
            for owned in training.owned:
                self._match_state(kept.get(f"{OPTIMIZER}/{owned.name}", {}), owned)
            if self._without_masters:
                self.said.append("it keeps no master weights, so they are made from the parameters that it has")
            if any(live.dtype != self.staged[name].dtype for name, live in self.live.items()):
                self.said.append("its state is kept in a wider dtype from now on")

    def check_ties(self) -> None:
        """Raise CheckpointError where what is one tensor here was two in the checkpoint, once both are read."""
        first: dict[int, str] = {}
        for name, value in self.training.live.items():
            other = first.setdefault(id(value), name)
            one, two = (self.staged[f"{MODEL}/{each}"] for each in (other, name))
            if other != name and not _same_bits(one, two):
                raise CheckpointError(
                    f"{other!r} and {name!r} are one tensor here, and two in the checkpoint; untie them, or load one "
                    "of the same model."
                )

    @torch.no_grad()
    def commit(self) -> None:
        """Change everything, from memory alone."""
        for name, live in self.live.items():
            live.copy_from(self.staged[name])
        for change in self._changes:
            change()

    def _move(self, name: str, live: ShardView) -> None:
        """Let a stored tensor reach this memory, if it is of the same shape."""
        stored = self.stored[name]
        same_dtype = stored.dtype == live.dtype or name.startswith(f"{OPTIMIZER}/")
        if tuple(live.shape) != stored.shape or not same_dtype:
            raise CheckpointError(
                f"{name!r} is {_looks(stored.dtype, stored.shape)} in the checkpoint and "
                f"{_looks(live.dtype, live.shape)} here; load one of the same model."
            )
        self.live[name], self.staged[name] = live, live.blank(stored.dtype)

    def _match_model(self) -> None:
        """Every tensor of the model is there, with its shape and dtype, and the checkpoint has no more of them."""
        for short, boxed in self.training.boxes.items():
            name = f"{MODEL}/{short}"
            if name not in self.stored:
                raise CheckpointError(f"the checkpoint lacks {name!r}; load one of the same model.")
            self._move(name, boxed)
        for name in self.stored:
            if name.startswith(f"{MODEL}/") and name not in self.live:
                raise CheckpointError(
                    f"the checkpoint has {name!r}, which the model has not; load one of the same model."
                )

    def _match_groups(self, kept: Mapping[str, Any]) -> None:
        """Give every group the options of its parameters, found by name."""
        if not self.groups:
            raise CheckpointError(
                "the checkpoint keeps weights alone; load them without an optimizer: load(folder, model)."
            )
        saved = {name: group for group in self.groups for name in group.parameters}
        here = {owned.name: owned.tensor for owned in self.training.owned}
        for name in sorted(saved.keys() ^ here.keys()):
            never_trained = not here[name].requires_grad if name in here else not kept.get(f"{OPTIMIZER}/{name}")
            if not never_trained:
                raise CheckpointError(
                    "the checkpoint has other parameters in its groups than the optimizer: "
                    f"{name!r} is in one of them alone."
                )
        known = [owned for owned in self.training.owned if owned.name in saved]
        made_by = {(saved[owned.name].made_by, owned.made_by) for owned in known}
        if others := sorted(f"{was} (now {now})" for was, now in made_by if was != now):
            self.said.append(
                f"its state was made by {', '.join(others)}, by the same algorithm for every parameter, and is "
                "converted"
            )
        divided = []
        for optimizer in self.training.optimizers:
            steps: list[int] = []
            for group in optimizer.param_groups:
                members = [owned for owned in known if owned.group is group]
                for owned in members:
                    _check_algorithm(saved[owned.name], owned)
                if not members:
                    continue  # of no parameter, or of frozen ones: it keeps its own options
                sources = {id(saved[owned.name]): saved[owned.name] for owned in members}
                self._changes.append(partial(group.update, _options_for(list(sources.values()), members[0])))
                steps += [source.steps or 0 for source in sources.values()]
                divided.append({owned.name for owned in members})
            if steps_of(optimizer) is not None:
                # MuonW, which may have saved this, does not count
                self._changes.append(partial(setattr, optimizer, "steps", max(steps, default=0)))
        together = [here.keys() & group.parameters for group in self.groups]
        if any(names and names not in divided for names in together):
            self.said.append("its groups were divided otherwise; parameters are matched by name")

    def _match_state(self, found: Mapping[str, StoredTensor], owned: Owned) -> None:
        """Find memory for what is kept of a parameter: the optimizer's own where it fits, else new."""
        _check_keys(found, owned)
        if owned.view.values is None:
            return
        now, state = owned.state, {}
        for key, stored in found.items():
            if key == ROW_MOMENTS and owned.view.rows and not owned.view.row_boxes:
                continue  # another rank orthogonalizes it
            state[key] = _memory_for(key, stored, now.get(key), owned)
            self._move(f"{OPTIMIZER}/{owned.name}/{key}", owned.shard_view(key, state[key]))
        if MASTER_WEIGHT in now and MASTER_WEIGHT not in found:
            state[MASTER_WEIGHT] = now[MASTER_WEIGHT]
        if state or now:
            self._changes.append(partial(owned.replace_state, state))
        if MASTER_WEIGHT not in found:
            self._changes.append(owned.view.follow_parameter_)
            self._without_masters |= bool(found) and owned.view.keeps_master


# ---- Groups -----------------------------------------------------------------------------------------------


def _check_algorithm(saved: StoredGroup, owned: Owned) -> None:
    """Raise CheckpointError, naming both, where a parameter was trained by another algorithm than it is here."""
    if saved.algorithm != owned.algorithm:
        then = " in ".join(dict.fromkeys((saved.algorithm, saved.made_by)))
        today = " in ".join(dict.fromkeys((owned.algorithm, owned.made_by)))
        raise CheckpointError(
            f"{owned.name!r} was trained by {then}, and is trained here by {today}, whose state means something else; "
            "give the optimizer the groups that were saved, or load the weights alone: load(folder, model)."
        )


def _options_for(sources: Sequence[StoredGroup], owned: Owned) -> dict[str, Any]:
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
    if missing := sorted(OPTIONS.get(owned.algorithm, set()) - source.options.keys()):
        raise CheckpointError(
            f"the checkpoint's options for {owned.name!r} lack {', '.join(missing)}; take another checkpoint."
        )
    ours = isinstance(owned.optimizer, CheckedState)  # whose groups have known options, and others whatever they like
    options = dict(source.options)
    converted = source.made_by != owned.made_by
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
    group, algorithm = owned.group, owned.algorithm
    for name, value in options.items():
        now = group.get(name)
        if not _alike(now, value) or (name == "algorithm" and value != now):
            raise CheckpointError(f"the option {name} is {value!r} in the checkpoint, and {now!r} here; take another.")
    try:
        CHECKS.get(algorithm, dict)({**group, **options})
    except Exception as error:
        raise CheckpointError(f"the checkpoint's options for {owned.name!r} are refused: {in_words(error)}.") from None
    for name in getattr(owned.optimizer, "FIXED", ()):
        if options.get(name) != group.get(name):
            raise CheckpointError(
                f"the option {name} of {owned.name!r} is {options.get(name)!r} in the checkpoint and "
                f"{group.get(name)!r} here, where the map is laid out already; make the optimizer with the former."
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


def _like(now: Any, value: Any) -> Any:
    """Return an option as the optimizer has it, from what JSON has kept."""
    if isinstance(value, str) and value.startswith("torch.") and value.removeprefix("torch.") in DTYPES:
        return DTYPES[value.removeprefix("torch.")]
    if isinstance(value, list):
        return tuple(_like(None, one) for one in value)
    return torch.tensor(value, dtype=now.dtype, device=now.device) if isinstance(now, Tensor) else value


# ---- States -----------------------------------------------------------------------------------------------


def _check_keys(found: Mapping[str, StoredTensor], owned: Owned) -> None:
    """Raise CheckpointError for a state that is not the algorithm's, not all of it, or more than is kept here."""
    algorithm = owned.algorithm
    if algorithm not in STATE_KEYS:
        return
    keys, shape = found.keys() - {MASTER_WEIGHT, ROW_MOMENTS}, owned.view.shape
    if keys and keys != set(STATE_KEYS[algorithm]):
        differing = sorted(keys ^ set(STATE_KEYS[algorithm]))[0]
        raise CheckpointError(
            f"the checkpoint's state of {owned.name!r} is not {algorithm}'s: {differing!r} is missing, or too much."
        )
    shapes = {SCALAR: (), ROW_MOMENTS: (owned.view.rows,)}  # of others than tensors like the parameter
    for key, stored in found.items():
        if stored.shape != shapes.get(key, shape) or not stored.dtype.is_floating_point:
            raise CheckpointError(
                f"the checkpoint keeps {key!r} of {owned.name!r} as {_looks(stored.dtype, stored.shape)}, of a "
                f"parameter of {list(shape)}; load one of the same model."
            )
    if MASTER_WEIGHT in found and not owned.view.keeps_master:
        raise CheckpointError(
            f"the checkpoint keeps {dtype_name(found[MASTER_WEIGHT].dtype)} master weights of {owned.name!r}, and "
            f"{owned.made_by} keeps none here, so they would be lost; load it into one that does, or load "
            "the weights alone: load(folder, model)."
        )


def _memory_for(key: str, stored: StoredTensor, now: Tensor | None, owned: Owned) -> Tensor:
    """Return a tensor that can take the stored one in: what the optimizer has, or a new one as it would make it.

    Raises CheckpointError where that would round.
    """
    if now is not None:
        live = owned.shard_view(key, now)
        if tuple(live.shape) == stored.shape and (live.dtype == stored.dtype or _widens(stored.dtype, live.dtype)):
            return now
    group, ours = owned.group, owned.algorithm in STATE_KEYS
    shape = owned.view.shape
    if key == SCALAR or stored.shape == () != shape:
        host = not (group.get("capturable") or group.get("fused"))
        return torch.zeros((), dtype=stored.dtype, device="cpu" if host else owned.tensor.device)
    if key == ROW_MOMENTS:
        size = sum(run.size for _, run in owned.view.row_boxes)
        return torch.zeros(size, dtype=stored.dtype, device=owned.tensor.device)
    kept = owned.view.kept_dtype
    if ours and stored.dtype != kept and not _widens(stored.dtype, kept):
        raise CheckpointError(
            f"the checkpoint keeps {key!r} of {owned.name!r} in {dtype_name(stored.dtype)}, and "
            f"{owned.made_by} in {dtype_name(kept)} here, which would round it; load it into one that "
            "keeps it as wide, or load the weights alone: load(folder, model)."
        )
    if stored.shape == shape:
        return owned.view.new_state(kept if ours else stored.dtype)
    if isinstance(owned.tensor, DTensor) or not owned.view.is_whole:
        raise CheckpointError(f"the checkpoint keeps {key!r} of {owned.name!r} in another shape than the parameter's.")
    return torch.zeros(stored.shape, dtype=stored.dtype, device=owned.tensor.device)


def _widens(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Return whether every number of one dtype is one of the other."""
    floats = narrow.is_floating_point and wide.is_floating_point
    return floats and narrow.itemsize > 1 and torch.promote_types(narrow, wide) == wide


def _looks(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{dtype_name(dtype)} {list(shape)}"


def _same_bits(one: ShardView, two: ShardView) -> bool:
    pairs = zip(one.held.values(), two.held.values(), strict=True)
    return all(_bits(a).equal(_bits(b)) for (_, a), (_, b) in pairs)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
