"""The files of a checkpoint: torch.distributed.checkpoint's, with a manifest in JSON in place of its pickle.

    manifest.json    every tensor: dtype, shape, chunks; every file: length, sha256; notes; and its own sha256
    __0_0.distcp     the chunks that rank 0 wrote, each as torch.save writes a tensor

torch writes what it knows of a checkpoint as a pickle, `.metadata`, and running a stranger's pickle is running a
stranger's program. Tensors are read with `weights_only`, and nothing else is in these files. Nor does torch notice a
bit that has flipped; sha256 does.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

MANIFEST = "manifest.json"
FORMAT = "distmuon checkpoint 1"


class CheckpointError(ValueError):
    """A checkpoint cannot be saved there, or is not to be believed. Raised on every rank, before anything changes."""


class ManifestWriter(FileSystemWriter):
    """Writes chunks as torch does, then a manifest, and lets the folder appear under its name.

    unfinished: where it is written. target: what it is called in the end. notes: whatever else is to be kept, as JSON.
    """

    def __init__(self, unfinished: Path, target: Path, notes: Mapping[str, Any]) -> None:
        super().__init__(unfinished)
        self.target, self.notes = target, notes

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy, in the host's memory, for `dcp.async_save`: training goes on and writes to the original."""
        return {name: boxed.copied() for name, boxed in state_dict.items()}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks. Raises what the system says, as of a full disk, and not what torch makes of it."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # of its zip archive, which is closed at the wrong place once a write has failed
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and rename the folder, on the coordinator, once all ranks have written."""
        stored = {result.index: result.storage_data for of_rank in results for result in of_rank}
        folder = Path(self.path)
        tensors = {}
        for name, found in metadata.state_dict_metadata.items():
            assert isinstance(found, TensorStorageMetadata), name  # `notes` hold the rest
            chunks = []
            for chunk in found.chunks:
                info = stored[MetadataIndex(name, chunk.offsets)]
                chunks.append([list(chunk.offsets), list(chunk.sizes), info.relative_path, info.offset, info.length])
            dtype = str(found.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(found.size), "chunks": chunks}
        files = {file.name: [file.stat().st_size, sha256(file)] for file in sorted(folder.iterdir())}
        manifest = {"format": FORMAT, "torch": torch.__version__, "tensors": tensors, "files": files}
        manifest["notes"] = self.notes
        text = json.dumps(manifest | {"sha256": _digest(manifest)}, indent=1)
        with open(folder / MANIFEST, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self.publish()

    def publish(self) -> None:
        """Let the folder appear under its name, now that all of it is on the disk."""
        _sync(Path(self.path))
        os.rename(self.path, self.target)
        _sync(self.target.parent)


class ManifestReader(FileSystemReader):
    """Reads chunks as torch does, by a manifest that was read and checked before."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        super().__init__(folder)
        self.manifest = manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the manifest in torch's words."""
        tensors: dict[str, Any] = {}
        stored: dict[MetadataIndex, _StorageInfo] = {}
        for name, found in self.manifest["tensors"].items():
            chunks = []
            for offsets, sizes, file, offset, length in found["chunks"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                stored[MetadataIndex(name, offsets)] = _StorageInfo(file, offset, length)
            properties = TensorProperties(dtype=getattr(torch, found["dtype"]))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(found["shape"]), chunks)
        return Metadata(tensors, planner_data={}, storage_data=stored, storage_meta=StorageMeta(load_id=self.load_id))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest; raise CheckpointError, saying what is wrong, for one that cannot be believed."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; give that of a checkpoint.")
    if not (folder / MANIFEST).is_file():
        remedy = "it was not written by this project, or never finished: take another"
        raise CheckpointError(f"{folder} has no {MANIFEST}; {remedy}.")
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        stated = manifest.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged ({error}); take another checkpoint.") from None
    if stated != _digest(manifest):
        raise CheckpointError(
            f"{folder / MANIFEST} is damaged: it is not what its sha256 says; take another checkpoint."
        )
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{folder} has the format {manifest['format']!r}, this is {FORMAT!r}; load it where it was."
        )
    return manifest


def check_files(folder: Path, manifest: Mapping[str, Any], rank: int = 0, ranks: int = 1) -> None:
    """Raise CheckpointError, naming the file, unless this rank's share of the files is what the manifest says."""
    for number, (name, (length, digest)) in enumerate(sorted(manifest["files"].items())):
        if number % ranks != rank:
            continue
        file = folder / name
        if Path(name).name != name:
            raise CheckpointError(f"{folder / MANIFEST} names a file outside its folder, {name!r}; do not load it.")
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; take another checkpoint.")
        if (found := file.stat().st_size) != length:
            raise CheckpointError(f"{file} has {found} bytes, not {length}; take another checkpoint.")
        if sha256(file) != digest:
            raise CheckpointError(f"{file} is damaged: it is not what its sha256 says; take another checkpoint.")


def as_json(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what reading will find. Raises CheckpointError for what JSON does not hold."""
    try:
        return json.loads(json.dumps(notes))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the notes cannot be kept as JSON ({error}); leave that out of them.") from None


def sha256(file: Path) -> str:
    """Return the digest of a file's bytes."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
