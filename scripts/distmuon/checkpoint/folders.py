"""Save a training to a folder, and load it on any grid.

    save("runs/step-100", model, optimizer, notes={"step": 100})
    notes = load("runs/step-100", model, optimizer)
    saving = async_save("runs/step-200", model, optimizer)  # training goes on; saving.result() waits

The folder appears at once and whole, or not at all: it is written under another name and renamed in the end, after its
bytes are on the disk. Loading looks at every byte before it writes to anything. Both are collective.
"""

from __future__ import annotations

import glob
import shutil
import uuid
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from distmuon.checkpoint.storage import (
    CheckpointError,
    ManifestReader,
    ManifestWriter,
    as_json,
    check_files,
    read_manifest,
)
from distmuon.checkpoint.tensors import make_states, owned, tensors
from distmuon.optim.routing import reshard
from distmuon.optim.sharded_optimizer import ShardedOptimizer

Result = TypeVar("Result")
UNFINISHED = ".unfinished-"
_running: list[Future[None]] = []  # the save in the background, if there is one
_background: dict[str, Any] = {}
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # said of every save by one process


def save(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, notes: Mapping[str, Any] | None = None
) -> None:
    """Save the model's and the optimizer's tensors, the options of its groups, and `notes`, which JSON must hold.

    All ranks call it, and see the same file system. Where ranks hold different values of a tensor that is not cut, such
    as running means, those of one rank are kept. Raises CheckpointError on all ranks for a folder that exists already.
    """
    found, writer = _begin(folder, model, optimizer, notes)
    try:
        dcp.save(found, storage_writer=writer, no_dist=not _several())
    except CheckpointException as error:
        _discard(writer)
        raise CheckpointError(_words_of(writer, error)) from error
    except BaseException:
        _discard(writer)
        raise


def async_save(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, notes: Mapping[str, Any] | None = None
) -> Future[None]:
    """Copy what `save` would save, and return while a thread writes it; training may go on at once.

    The future's `result()` waits until the folder is there, or raises CheckpointError, of which every rank also warns,
    should nobody ask. A later save waits for this one, and so must a program before it leaves the process group. The
    copy takes as much of the host's memory as this rank saves.
    """
    found, writer = _begin(folder, model, optimizer, notes)
    group = _background_group() if _several() else None
    written: Any = dcp.async_save(found, storage_writer=writer, process_group=group, no_dist=group is None)
    ended: Future[None] = Future()
    _running.append(ended)
    written.add_done_callback(lambda _: _end(ended, written.exception(), writer))
    return ended


def load(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load what `save` has saved, on this grid or on another; return the notes.

    The optimizer has the same groups of the same parameters. Raises CheckpointError on all ranks, before anything has
    changed, for a folder that is damaged, unfinished or another training's.
    """
    source = Path(folder)
    manifest = _together(lambda: read_manifest(source))
    _together(lambda: check_files(source, manifest, _rank(), _ranks()))
    kept = manifest["notes"]
    reshard(model)
    _together(lambda: _check_belongs(model, optimizer, manifest))
    make_states(model, optimizer, manifest["tensors"])
    found = tensors(model, optimizer)
    dcp.load(dict(found), storage_reader=ManifestReader(source, manifest), no_dist=not _several())
    for group, options in zip(optimizer.param_groups, kept["groups"], strict=True):
        group |= {name: _like(group.get(name), value) for name, value in options["options"].items()}
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.steps = kept["steps"] or 0  # MuonW, which may have saved this, does not count
    return kept["notes"]


# ---- Saving -----------------------------------------------------------------------------------------------


def _begin(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, notes: Mapping[str, Any] | None
) -> tuple[dict[str, Any], ManifestWriter]:
    """Return what is to be written, and who writes it, once an earlier save has ended."""
    wait(_running)
    _running.clear()
    reshard(model)
    target = Path(folder)

    def prepare() -> str:
        if target.exists():
            raise CheckpointError(f"{target} exists already, and nothing is overwritten; name another folder.")
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(f"{UNFINISHED}{glob.escape(target.name)}-????????"):
            shutil.rmtree(left)  # by who was killed while saving the same
        return f"{UNFINISHED}{target.name}-{uuid.uuid4().hex[:8]}"

    def collect() -> tuple[dict[str, Any], dict[str, Any]]:
        kept = {"groups": _options(model, optimizer), "notes": dict(notes or {})}
        return dict(tensors(model, optimizer)), as_json(kept | {"steps": getattr(optimizer, "steps", None)})

    found, kept = _together(collect)
    return found, ManifestWriter(target.parent / on_rank_0(prepare), target, kept)


def _discard(writer: ManifestWriter) -> None:
    """Remove what was written, after a failure, of which torch tells all ranks once all have stopped writing."""
    if _rank() == 0:
        shutil.rmtree(writer.path, ignore_errors=True)


def _end(ended: Future[None], error: BaseException | None, writer: ManifestWriter) -> None:
    """End a save in the background: clean up after a failure, and say so, even if nobody asks."""
    if error is None:
        ended.set_result(None)
        return
    _discard(writer)
    warnings.warn(words := _words_of(writer, error), RuntimeWarning, stacklevel=2)
    ended.set_exception(CheckpointError(words))


def _words_of(writer: ManifestWriter, error: BaseException) -> str:
    """Return in a sentence why nothing was saved: torch wraps what the ranks have raised, with their tracebacks."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{writer.target} was not saved: {type(error).__name__}: {error}"


def _background_group() -> dist.ProcessGroup:
    """Return a group for the thread that saves: its collectives must not mix with those of training. Collective."""
    everybody = dist.group.WORLD
    if _background.get("of") is not everybody:  # a program may leave its process group and make another
        # a new group waits half an hour for a rank that hangs, and has no public way to ask how long this one waits
        limit = everybody._get_backend(everybody._device_types[0]).options._timeout
        _background.update(of=everybody, group=dist.new_group(backend="gloo", timeout=limit, group_desc="checkpoint"))
    return _background["group"]


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


def on_rank_0(act: Callable[[], Result]) -> Result:
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
