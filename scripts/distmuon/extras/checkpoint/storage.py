"""The files of a checkpoint: torch.distributed.checkpoint's, with a manifest in JSON in place of its pickle.

`__0_0.distcp` has the chunks that rank 0 wrote, each as torch.save writes a tensor. For manifest.json see `manifest`.

torch writes what it knows of a checkpoint as a pickle, `.metadata`, and running a stranger's pickle is running a
stranger's program. Tensors are read with `weights_only`, and nothing else is in these files. Nor does torch notice a
bit that has flipped; sha256 does.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from distmuon.extras.checkpoint.files import CheckpointError, Lock, in_words, open_plain, sha256, sync
from distmuon.extras.checkpoint.manifest import FORMAT, MANIFEST, Chunk, Manifest, StoredFile, StoredTensor, signed_text
from distmuon.extras.checkpoint.tensors import ShardView
from distmuon.sharding.boxes import extent, overlap, within
from distmuon.sharding.buffers import dtype_name


class ManifestWriter(FileSystemWriter):
    """Writes chunks as torch does, then a manifest, and lets the folder appear under its name.

    unfinished: where it is written. target: what it is called in the end. tensors: what this rank saves; of those
    without elements torch writes nothing. notes: whatever else is to be kept, as JSON. lock: rank 0's, on the target.
    """

    def __init__(
        self,
        unfinished: Path,
        target: Path,
        tensors: Mapping[str, ShardView],
        notes: Mapping[str, Any],
        lock: Lock | None = None,
    ) -> None:
        super().__init__(unfinished)
        self.target, self.notes, self.lock = target, notes, lock
        self.looks = {name: (boxed.dtype, tuple(boxed.shape)) for name, boxed in tensors.items()}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy, in the host's memory, for `dcp.async_save`: training goes on and writes to the original."""
        copies = {name: boxed.blank(boxed.dtype) for name, boxed in state_dict.items()}
        for name, copy in copies.items():
            copy.copy_from(state_dict[name])
        return copies

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks, and take the sha256 of its files: rank 0 alone would need hours for a large model.

        Raises what the system says, as of a full disk, and not what torch makes of it.
        """
        try:
            written = super().write_data(plan, planner).wait()
        except RuntimeError as error:  # of its zip archive, which is closed at the wrong place once a write has failed
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        signed: dict[str, StoredFile] = {}
        for name in {result.storage_data.relative_path for result in written}:
            file = Path(self.path, name)
            signed[name] = StoredFile(file.stat().st_size, sha256(file))
        done: Future[list[WriteResult]] = Future()
        both = [(result.storage_data, signed[result.storage_data.relative_path]) for result in written]
        done.set_result([replace(result, storage_data=pair) for result, pair in zip(written, both, strict=True)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and rename the folder, on the coordinator, once all ranks have written."""
        stored, files = {}, dict[str, StoredFile]()
        for result in itertools.chain.from_iterable(results):
            info, signed = result.storage_data
            stored[result.index], files[info.relative_path] = info, signed
        tensors = {
            name: {"dtype": dtype_name(dtype), "shape": list(shape), "chunks": []}
            for name, (dtype, shape) in self.looks.items()
        }
        for name, found in metadata.state_dict_metadata.items():
            assert isinstance(found, TensorStorageMetadata), name  # `notes` hold the rest
            chunks = []
            for chunk in found.chunks:
                info = stored[MetadataIndex(name, chunk.offsets)]
                chunks.append([list(chunk.offsets), list(chunk.sizes), info.relative_path, info.offset, info.length])
            dtype = dtype_name(found.properties.dtype)
            tensors[name] = {"dtype": dtype, "shape": list(found.size), "chunks": chunks}
        listed = {name: list(files[name]) for name in sorted(files)}
        manifest = {"format": FORMAT, "torch": torch.__version__, "tensors": tensors, "files": listed}
        manifest["notes"] = self.notes
        text = signed_text(manifest)
        with open(Path(self.path, MANIFEST), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self.publish()

    def publish(self) -> None:
        """Let the folder appear under its name, now that all of it is on the disk."""
        sync(Path(self.path))
        os.rename(self.path, self.target)
        sync(self.target.parent)
        self.release()

    def release(self) -> None:
        """Let others save under this name, or be refused because it exists now."""
        if self.lock is not None:
            self.lock.release()


# ---- Reading ----------------------------------------------------------------------------------------------


def check_files(folder: Path, manifest: Manifest, rank: int = 0, ranks: int = 1) -> None:
    """Raise CheckpointError, naming the file, unless this rank's share of the files is what the manifest says."""
    for number, (name, stated) in enumerate(sorted(manifest.files.items())):
        if number % ranks == rank:
            file = folder / name
            with open_plain(file) as stream:
                found = os.fstat(stream.fileno()).st_size
            if found != stated.length:
                raise CheckpointError(f"{file} has {found} bytes, not {stated.length}; take another checkpoint.")
            if sha256(file) != stated.sha256:
                raise CheckpointError(f"{file} is damaged: it is not what its sha256 says; take another checkpoint.")


def read_into(folder: Path, stored: Mapping[str, StoredTensor], wanted: Mapping[str, ShardView]) -> None:
    """Fill the boxes of every wanted tensor, of the stored dtype, from the chunks that they overlap.

    One chunk at a time is in memory beside them. Raises CheckpointError for a chunk that is not what the manifest says.
    """
    by_file: dict[str, list[tuple[Chunk, str]]] = {}
    for name, boxed in wanted.items():
        for chunk in stored[name].chunks:
            if any(overlap(box, chunk.box) is not None for box, _ in boxed.held.values()):
                by_file.setdefault(chunk.file, []).append((chunk, name))
    for file, chunks in by_file.items():
        with open_plain(folder / file) as stream:
            for chunk, name in sorted(chunks, key=lambda pair: pair[0].offset):
                stream.seek(chunk.offset)
                try:
                    tensor = _tensor_in(stream.read(chunk.length), stored[name].dtype, extent(chunk.box))
                except Exception as error:
                    raise CheckpointError(
                        f"{folder / file} cannot give its chunk of {name!r}: {in_words(error)}; take another "
                        "checkpoint."
                    ) from error
                for box, values in wanted[name].held.values():
                    if (common := overlap(box, chunk.box)) is not None:
                        values[within(common, box)].copy_(tensor[within(common, chunk.box)])


def _tensor_in(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the plain tensor that torch.save has written. Raises whatever torch does, ValueError for another one."""
    found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    plain = isinstance(found, Tensor) and found.layout == torch.strided and found.device.type == "cpu"
    if not plain or found.is_quantized or (found.dtype, tuple(found.shape)) != (dtype, shape):
        raise ValueError(f"it is no {dtype_name(dtype)} {list(shape)}, as the manifest says")
    return found.detach()
