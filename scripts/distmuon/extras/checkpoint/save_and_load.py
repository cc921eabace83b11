"""Save a training to a folder, and load it on any grid.

    save("runs/step-100", model, optimizer, notes={"step": 100})
    notes = load("runs/step-100", model, optimizer)
    saving = async_save("runs/step-200", model, optimizer)  # training goes on; saving.result() waits
    model.load_state_dict(weights("runs/step-100"))  # anywhere, without an optimizer or a grid

The folder appears at once and whole, or not at all: it is written under another name and renamed in the end, after its
bytes are on the disk. Loading looks at every byte before it writes to anything. Both are collective, but for `weights`
and `to_torch`.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from distmuon.extras.checkpoint.conversion import Loading
from distmuon.extras.checkpoint.files import CheckpointError, Lock, in_words, place
from distmuon.extras.checkpoint.manifest import MODEL, as_json, read_manifest
from distmuon.extras.checkpoint.storage import ManifestWriter, check_files, read_into
from distmuon.extras.checkpoint.tensors import LiveTensors, Optimizers, ShardView
from distmuon.optim.param_groups import reshard
from distmuon.sharding.boxes import all_of
from distmuon.sharding.warning import warn_user

Result = TypeVar("Result")

UNFINISHED = ".unfinished-"
LOCK = ".lock-"
_running: list[Future[None]] = []  # the save in the background, if there is one
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # said of every save by one process


def save(
    folder: str | Path, model: nn.Module, optimizer: Optimizers = None, notes: Mapping[str, Any] | None = None
) -> None:
    """Save the model's and the optimizer's tensors, the options of its groups, and `notes`, which JSON must hold.

    optimizer: one, several in a list, or None for the weights alone.
    All ranks call it, and see the same file system. Where ranks hold different values of a tensor that is not cut, such
    as running means, those of one rank are kept. Raises CheckpointError on all ranks for a folder that exists already,
    or that another process is saving, and for a tensor that could not be loaded again.
    """
    found, writer = _begin(folder, model, optimizer, notes)
    try:
        dcp.save(found, storage_writer=writer, no_dist=ranks() == 1)
    except CheckpointException as error:
        _discard(writer)
        raise CheckpointError(_words_of(writer, error)) from error
    except BaseException:
        _discard(writer)
        raise


def async_save(
    folder: str | Path, model: nn.Module, optimizer: Optimizers = None, notes: Mapping[str, Any] | None = None
) -> Future[None]:
    """Copy what `save` would save, and return while a thread writes it; training may go on at once.

    The future's `result()` waits until the folder is there, or raises CheckpointError, of which every rank also warns,
    should nobody ask. A later save waits for this one, and so must a program before it leaves the process group. The
    copy takes as much of the host's memory as this rank saves.
    """
    found, writer = _begin(folder, model, optimizer, notes)
    group = _background_group(dist.group.WORLD) if ranks() > 1 else None
    try:
        written: Any = dcp.async_save(found, storage_writer=writer, process_group=group, no_dist=group is None)
    except BaseException:
        _discard(writer)
        raise
    ended: Future[None] = Future()
    _running.append(ended)
    written.add_done_callback(lambda _: _end(ended, written.exception(), writer))
    return ended


def load(folder: str | Path, model: nn.Module, optimizer: Optimizers = None) -> dict[str, Any]:
    """Load what `save` has saved, on this grid or on another; return the notes.

    optimizer: one or several, with the same parameters as those that were saved, or None for the weights alone. Another
        optimizer than the one that saved goes on where it trains every parameter by the same algorithm, with a warning
        that says what was converted; see `conversion`.
    Everything is read into the host's memory first, which takes as much as `async_save` does. Raises CheckpointError on
    all ranks, before anything has changed, for a folder that is damaged, unfinished or another training's.
    """
    source = place(folder)
    manifest = raise_together(lambda: read_manifest(source))
    raise_together(lambda: check_files(source, manifest, rank(), ranks()))
    reshard(model)
    training = raise_together(lambda: LiveTensors(model, optimizer))
    loading = raise_together(lambda: Loading(manifest, training))

    def read() -> None:
        read_into(source, loading.stored, loading.staged)
        loading.check_ties()

    raise_together(read)
    loading.commit()
    if loading.said and rank() == 0:
        warn_user(f"{source}: {'; '.join(loading.said)}.")
    return manifest.notes


# ---- The way out ------------------------------------------------------------------------------------------


def weights(folder: str | Path) -> dict[str, Tensor]:
    """Return the model's tensors, whole and plain, by its own names, for any model's `load_state_dict`.

    For one process, of any number. Raises CheckpointError for a folder that is damaged or unfinished.
    """
    with refusing():
        source = place(folder)
        manifest = read_manifest(source)
        check_files(source, manifest)
        begin = f"{MODEL}/"
        stored = {name: tensor for name, tensor in manifest.tensors.items() if name.startswith(begin)}
        found = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in stored.items()}
        boxes = {name: ShardView(t.shape, t.dtype, [(all_of(t.shape), t)]) for name, t in found.items()}
        read_into(source, stored, boxes)
        return {name.removeprefix(begin): tensor for name, tensor in found.items()}


def to_torch(folder: str | Path, file: str | Path) -> None:
    """Write `weights` to a file that torch.load reads. In a shell: python -m distmuon.checkpoint FOLDER FILE."""
    found, target = weights(folder), place(file)
    with refusing():
        unfinished = target.with_name(f"{UNFINISHED}{target.name}")
        torch.save(found, unfinished)
        os.replace(unfinished, target)


def notes(folder: str | Path) -> dict[str, Any]:
    """Return the notes alone, for a program that asks before it loads. For one process, of any number."""
    with refusing():
        return read_manifest(place(folder)).notes


# ---- Saving -----------------------------------------------------------------------------------------------


def _begin(
    folder: str | Path, model: nn.Module, optimizer: Optimizers, notes: Mapping[str, Any] | None
) -> tuple[dict[str, ShardView], ManifestWriter]:
    """Return what is to be written, and who writes it, once an earlier save has ended."""
    wait(_running)
    _running.clear()
    reshard(model)
    target = place(folder)

    def collect() -> tuple[dict[str, ShardView], dict[str, Any]]:
        training = LiveTensors(model, optimizer)
        return training.tensors(), as_json({"groups": training.groups(), "notes": dict(notes or {})})

    found, kept = raise_together(collect)
    locks: list[Lock] = []
    name = on_rank_0(lambda: _prepare(target, locks))
    return found, ManifestWriter(target.parent / name, target, found, kept, *locks)


def _prepare(target: Path, locks: list[Lock]) -> str:
    """Return under which name to write, once nobody else writes what is to be called `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = lock_of(target)
    try:
        if target.exists():
            raise CheckpointError(f"{target} exists already, and nothing is overwritten; name another folder.")
        for left in target.parent.glob(f"{UNFINISHED}{glob.escape(target.name)}-????????"):
            shutil.rmtree(left)  # by who was killed while saving the same
    except BaseException:
        lock.release()
        raise
    locks.append(lock)
    return f"{UNFINISHED}{target.name}-{uuid.uuid4().hex[:8]}"


def lock_of(target: Path) -> Lock:
    """Return a lock on the name of a checkpoint. Raises CheckpointError where another process is saving it."""
    return Lock(
        target.with_name(LOCK + target.name),
        lambda holder: f"{target} is being saved by {holder} now; wait for it, or name another folder.",
    )


def _discard(writer: ManifestWriter) -> None:
    """Remove what was written, after a failure, of which torch tells all ranks once all have stopped writing."""
    if rank() == 0:
        shutil.rmtree(writer.path, ignore_errors=True)
        writer.release()


def _end(ended: Future[None], error: BaseException | None, writer: ManifestWriter) -> None:
    """End a save in the background: clean up after a failure, and say so, even if nobody asks."""
    if error is None:
        ended.set_result(None)
        return
    _discard(writer)
    warn_user(words := _words_of(writer, error), RuntimeWarning)
    ended.set_exception(CheckpointError(words))


def _words_of(writer: ManifestWriter, error: BaseException) -> str:
    """Return in a sentence why nothing was saved: torch wraps what the ranks have raised, with their tracebacks."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
    return f"{writer.target} was not saved: {kind}{in_words(error)}."


@functools.lru_cache(maxsize=1)  # a program may leave its process group and make another
def _background_group(everybody: Any) -> dist.ProcessGroup:
    """Return a group for the thread that saves: its collectives must not mix with those of training. Collective."""
    # a new group waits half an hour for a rank that hangs, and has no public way to ask how long this one waits
    limit = everybody._get_backend(everybody._device_types[0]).options._timeout
    return dist.new_group(backend="gloo", timeout=limit, group_desc="checkpoint")


# ---- What all ranks do together ---------------------------------------------------------------------------


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Let whatever is raised inside be a CheckpointError: a file system's refusal, a damaged file, no memory."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{type(error).__name__}: {in_words(error)}.") from error


def raise_together(act: Callable[[], Result]) -> Result:
    """Return what `act` returns; where any rank raises, all raise CheckpointError with the first one's words."""
    result, words = None, None
    try:
        with refusing():
            result = act()
    except CheckpointError as error:
        if ranks() == 1:
            raise
        words = str(error)
    if ranks() > 1:
        everybody: list[str | None] = [None] * ranks()
        dist.all_gather_object(everybody, words)
        if said := [theirs for theirs in everybody if theirs is not None]:
            raise CheckpointError(said[0])
    return result  # type: ignore[return-value]


def on_rank_0(act: Callable[[], Result]) -> Result:
    """Let rank 0 act; return to all ranks what it got."""
    found = [raise_together(lambda: act() if rank() == 0 else None)]
    if ranks() > 1:
        dist.broadcast_object_list(found, src=0)
    return found[0]  # type: ignore[return-value]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
