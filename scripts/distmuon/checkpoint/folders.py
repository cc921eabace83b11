"""Save a training to a folder, and load it on any grid.

    save("runs/step-100", model, optimizer, notes={"step": 100})
    notes = load("runs/step-100", model, optimizer)

The folder appears at once and whole, or not at all: it is written under another name and renamed in the end, after its
bytes are on the disk. Loading looks at every byte before it writes to anything. Both are collective.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from distmuon.checkpoint.storage import CheckpointError, ManifestReader, ManifestWriter, check_files, read_manifest
from distmuon.checkpoint.tensors import make_states, owned, tensors
from distmuon.optim.sharded_optimizer import ShardedOptimizer

Result = TypeVar("Result")
UNFINISHED = ".unfinished-"


def save(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, notes: Mapping[str, Any] | None = None
) -> None:
    """Save the model's and the optimizer's tensors, the options of its groups, and `notes`, which JSON must hold.

    All ranks call it, and see the same file system. Where ranks hold different values of a tensor that is not cut, such
    as running means, those of one rank are kept. Raises CheckpointError on all ranks for a folder that exists already.
    """
    target = Path(folder)

    def prepare() -> str:
        if target.exists():
            raise CheckpointError(f"{target} exists already, and nothing is overwritten; name another folder.")
        target.parent.mkdir(parents=True, exist_ok=True)
        return f"{UNFINISHED}{target.name}-{uuid.uuid4().hex[:8]}"

    found, options = _together(lambda: (tensors(model, optimizer), _options(model, optimizer)))
    unfinished = target.parent / _on_rank_0(prepare)
    kept = {"groups": options, "notes": dict(notes or {}), "steps": getattr(optimizer, "steps", None)}
    try:
        dcp.save(dict(found), storage_writer=ManifestWriter(unfinished, kept), no_dist=not _several())
    except BaseException:
        if _rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _on_rank_0(lambda: _publish(unfinished, target))


def load(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load what `save` has saved, on this grid or on another; return the notes.

    The optimizer has the same groups of the same parameters. Raises CheckpointError on all ranks, before anything has
    changed, for a folder that is damaged, unfinished or another training's.
    """
    source = Path(folder)
    manifest = _together(lambda: read_manifest(source))
    _together(lambda: check_files(source, manifest, _rank(), _ranks()))
    kept = manifest["notes"]
    _together(lambda: _check_belongs(model, optimizer, manifest))
    make_states(model, optimizer, manifest["tensors"])
    found = tensors(model, optimizer)
    dcp.load(dict(found), storage_reader=ManifestReader(source, manifest), no_dist=not _several())
    for group, options in zip(optimizer.param_groups, kept["groups"], strict=True):
        group |= {name: _like(group.get(name), value) for name, value in options["options"].items()}
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.steps = kept["steps"]
    return kept["notes"]


# ---- What belongs together --------------------------------------------------------------------------------


def _check_belongs(model: nn.Module, optimizer: torch.optim.Optimizer, manifest: Mapping[str, Any]) -> None:
    """Raise CheckpointError, naming what differs, unless this is a checkpoint of such a training."""
    saved, here = manifest["notes"]["groups"], _options(model, optimizer)
    if [group["parameters"] for group in saved] != [group["parameters"] for group in here]:
        theirs, ours = ({name for group in groups for name in group["parameters"]} for groups in (saved, here))
        differing = sorted(theirs ^ ours)
        what = f"{differing[0]!r} is in one of them alone" if differing else "they are divided otherwise"
        raise CheckpointError(f"the checkpoint has other parameters in its groups than the optimizer: {what}.")
    for name, boxed in tensors(model, optimizer).items():
        if not name.startswith("model/"):
            continue
        if (found := manifest["tensors"].get(name)) is None:
            raise CheckpointError(f"the checkpoint lacks {name!r}; load one of the same model.")
        looks = list(boxed.shape), str(boxed.dtype).removeprefix("torch.")
        if looks != (found["shape"], found["dtype"]):
            raise CheckpointError(
                f"{name!r} is {found['dtype']} {found['shape']} in the checkpoint and {looks[1]} {looks[0]} here; load "
                "one of the same model."
            )


def _options(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return, of every group, its options and its parameters' names, as JSON holds them."""
    names = {id(p): name for name, p in owned(model, optimizer)}
    return [
        {
            "parameters": [names[id(p)] for p in group["params"]],
            "options": {k: _plain(k, v) for k, v in group.items() if k not in ("params", "param_names")},
        }
        for group in optimizer.param_groups
    ]


def _plain(name: str, value: Any) -> Any:
    """Return an option as JSON holds it. Raises CheckpointError, naming it, where it cannot."""
    if isinstance(value, torch.Tensor):
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
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    if isinstance(value, list):
        return tuple(_like(None, one) for one in value)
    return torch.tensor(value) if isinstance(now, torch.Tensor) else value


# ---- Ranks ------------------------------------------------------------------------------------------------


def _publish(unfinished: Path, target: Path) -> None:
    """Let the folder appear under its name, now that all of it is on the disk."""
    _sync(unfinished)
    os.rename(unfinished, target)
    _sync(target.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _together(act: Callable[[], Result]) -> Result:
    """Return what `act` returns; where any rank raises, all raise CheckpointError with the first one's words."""
    result, words = None, None
    try:
        result = act()
    except Exception as error:
        if not _several():
            raise
        words = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    if _several():
        everybody: list[str | None] = [None] * _ranks()
        dist.all_gather_object(everybody, words)
        if said := [theirs for theirs in everybody if theirs is not None]:
            raise CheckpointError(said[0])
    return result  # type: ignore[return-value]


def _on_rank_0(act: Callable[[], Result]) -> Result:
    """Let rank 0 act; return to all ranks what it got."""
    result = _together(lambda: act() if _rank() == 0 else None)
    if not _several():
        return result  # type: ignore[return-value]
    found = [result]
    dist.broadcast_object_list(found, src=0)
    return found[0]  # type: ignore[return-value]


def _several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _rank() -> int:
    return dist.get_rank() if _several() else 0


def _ranks() -> int:
    return dist.get_world_size() if _several() else 1
