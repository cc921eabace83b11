"""What a checkpoint says of itself, and whether it can be so: read as a stranger's letter.

    {"format", "torch", "sha256",
     "tensors": {name: {"dtype", "shape", "chunks": [[offsets, sizes, file, offset in it, length], ...]}},
     "files": {name: [length, sha256]},
     "notes": {"groups": [{"parameters", "options", "algorithm", "made_by", "steps"}, ...], "notes": the user's}}

A signature shows that nothing was damaged, and not that the signer meant well or made no mistake. So every field is
looked at before anything is believed: types, dtypes, chunks that fill each tensor exactly, chunks that fill each file
exactly, file names without a path. What fits here can be read; whether it fits a model, `conversion` says.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distmuon.extras.checkpoint.files import CheckpointError, in_words, open_plain
from distmuon.sharding.boxes import Box, all_of
from distmuon.sharding.buffers import dtype_name
from distmuon.sharding.layout import Range

MANIFEST = "manifest.json"
FORMAT = "distmuon checkpoint 2"
MODEL, OPTIMIZER = "model", "optimizer"
DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
        torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
        torch.complex32, torch.complex64, torch.complex128,
    )
}  # fmt: skip
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
DIGEST = re.compile(r"[0-9a-f]{64}")
LARGEST = 2**63
GROUP_FIELDS = ("parameters", "options", "algorithm", "made_by", "steps")


class Chunk(NamedTuple):
    """A box of a tensor, and where its bytes are: `length` of them from `offset` on."""

    box: Box
    file: str
    offset: int
    length: int


class StoredTensor(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class StoredFile(NamedTuple):
    length: int
    sha256: str


class StoredGroup(NamedTuple):
    """A group of an optimizer's. algorithm, made_by: see `conversion`. steps: which a sharded optimizer had made; None
    for others."""

    parameters: tuple[str, ...]
    options: dict[str, Any]
    algorithm: str
    made_by: str
    steps: int | None


class Manifest(NamedTuple):
    """tensors: by "model/NAME" and "optimizer/NAME/KEY". groups: of all optimizers; none where weights alone are kept.
    notes: the user's."""

    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile]
    groups: list[StoredGroup]
    notes: dict[str, Any]


# ---- Reading and signing ----------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """Return a checkpoint's manifest; raise CheckpointError, saying what is wrong, for one that cannot be believed."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; give that of a checkpoint.")
    file = folder / MANIFEST
    if not file.exists():
        remedy = "it was not written by this project, or never finished: take another"
        raise CheckpointError(f"{folder} has no {MANIFEST}; {remedy}.")
    with open_plain(file) as stream:
        data = stream.read()
    try:
        content = json.loads(data.decode())
        _require(isinstance(content, dict) and "sha256" in content, "it is not signed")
        stated = content.pop("sha256")
        _require(stated == digest(content), "it is not what its sha256 says")
        version = content.get("format")
        if version == FORMAT:
            return parse(content)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {in_words(error)}; take another checkpoint.") from None
    raise CheckpointError(f"{folder} has the format {version!r}, this is {FORMAT!r}; load it where it was.")


def digest(content: Mapping[str, Any]) -> str:
    """Return the signature of a manifest."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def signed_text(content: dict[str, Any]) -> str:
    """Return a manifest as it is written. Raises CheckpointError where loading would refuse it: then it is too late."""
    try:
        parse(json.loads(json.dumps(content)))
    except ValueError as error:
        raise CheckpointError(f"it could not be loaded again: {error}; report this, with your model.") from None
    return json.dumps(content | {"sha256": digest(content)}, indent=1)


def as_json(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what reading will find. Raises CheckpointError for what JSON does not hold."""
    try:
        return json.loads(json.dumps(notes))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the notes cannot be kept as JSON ({error}); leave that out of them.") from None


# ---- Every field ------------------------------------------------------------------------------------------


def parse(content: Mapping[str, Any]) -> Manifest:
    """Return what a manifest without its signature says. Raises ValueError where it cannot be so."""
    _fields(content, ("format", "torch", "tensors", "files", "notes"), "the manifest")
    _require(isinstance(content["torch"], str), "torch's version is no text")
    files = {name: _file(name, found) for name, found in _items(content["files"], "files")}
    tensors = {name: _tensor(name, found) for name, found in _items(content["tensors"], "tensors")}
    notes = content["notes"]
    _fields(notes, ("groups", "notes"), "the notes")
    _items(notes["notes"], "the user's notes")
    _require(isinstance(notes["groups"], list), "the groups are no list")
    groups = [_group(number, found) for number, found in enumerate(notes["groups"])]
    _check_names(tensors, groups)
    _check_files_are_filled(tensors, files)
    return Manifest(tensors, files, groups, notes["notes"])


def _file(name: str, found: Any) -> StoredFile:
    _require(FILE_NAME.fullmatch(name) is not None, f"it names a file outside its folder, {name!r}")
    _require(isinstance(found, list) and len(found) == 2, f"it does not say what {name} is")
    length, stated = found
    _require(_is_count(length), f"the length of {name} is no number")
    _require(isinstance(stated, str) and DIGEST.fullmatch(stated) is not None, f"the sha256 of {name} is none")
    return StoredFile(length, stated)


def _tensor(name: str, found: Any) -> StoredTensor:
    _fields(found, ("dtype", "shape", "chunks"), repr(name))
    dtype, shape, chunks = found["dtype"], found["shape"], found["chunks"]
    _require(isinstance(dtype, str) and dtype in DTYPES, f"{name!r} has a dtype that is none: {dtype!r}")
    _require(_are_counts(shape) and math.prod(shape) < LARGEST, f"{name!r} has a shape that is none")
    _require(isinstance(chunks, list), f"{name!r} has no list of chunks")
    parsed = tuple(_chunk(name, chunk, len(shape)) for chunk in chunks)
    whole = all_of(shape)
    filled = fills([chunk.box for chunk in parsed], whole) if math.prod(shape) else not parsed
    _require(filled, f"the chunks of {name!r} do not fill it exactly")
    return StoredTensor(DTYPES[dtype], tuple(shape), parsed)


def _chunk(name: str, found: Any, dims: int) -> Chunk:
    _require(isinstance(found, list) and len(found) == 5, f"{name!r} has a chunk that is none")
    offsets, sizes, file, offset, length = found
    fits = _are_counts(offsets) and _are_counts(sizes) and len(offsets) == len(sizes) == dims and 0 not in sizes
    _require(fits, f"{name!r} has a chunk in no place")
    _require(isinstance(file, str) and _is_count(offset) and _is_count(length), f"{name!r} has a chunk in no file")
    box = tuple(Range(start, start + size) for start, size in zip(offsets, sizes, strict=True))
    return Chunk(box, file, offset, length)


def _group(number: int, found: Any) -> StoredGroup:
    where = f"group {number}"
    _fields(found, GROUP_FIELDS, where)
    names = found["parameters"]
    _require(isinstance(names, list) and all(isinstance(name, str) for name in names), f"{where} names no parameters")
    options = dict(_items(found["options"], f"the options of {where}"))
    _require(not {"params", "param_names"} & options.keys(), f"{where} has parameters among its options")
    _require(all(map(_is_option, options.values())), f"{where} has an option that is none")
    kinds = all(isinstance(found[key], str) for key in ("algorithm", "made_by"))
    _require(kinds, f"{where} does not say what made it")
    steps = found["steps"]
    _require(steps is None or _is_count(steps), f"the steps of {where} are no number")
    return StoredGroup(tuple(names), options, found["algorithm"], found["made_by"], steps)


def _check_names(tensors: Iterable[str], groups: Sequence[StoredGroup]) -> None:
    """Every tensor is the model's, or a state of a parameter that is in one group and in the model."""
    parameters = [name for group in groups for name in group.parameters]
    _require(len(set(parameters)) == len(parameters), "a parameter is in two groups")
    known, owned = set(tensors), set(parameters)
    for name in parameters:
        _require(f"{MODEL}/{name}" in known, f"the checkpoint lacks '{MODEL}/{name}', which is in a group")
    for name in tensors:
        kind, _, rest = name.partition("/")
        _require(kind in (MODEL, OPTIMIZER), f"it has {name!r}, which is neither the model's nor the optimizer's")
        if kind == OPTIMIZER:
            owner, _, key = rest.rpartition("/")
            _require(owner in owned and key != "", f"it has {name!r}, a state of no parameter")


def _check_files_are_filled(tensors: Mapping[str, StoredTensor], files: Mapping[str, StoredFile]) -> None:
    """Every byte of every file belongs to one chunk, so that none is read twice, and none was lost."""
    runs: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            _require(chunk.file in runs, f"{name!r} has a chunk in {chunk.file!r}, which it does not list")
            runs[chunk.file].append((chunk.offset, chunk.offset + chunk.length))
    for name, found in runs.items():
        edges = [0, *(edge for run in sorted(found) for edge in run), files[name].length]
        meet = all(edges[i] == edges[i + 1] for i in range(0, len(edges), 2))
        _require(meet, f"the chunks in {name} do not fill it exactly")


def fills(boxes: Sequence[Box], whole: Box) -> bool:
    """Return whether the boxes, none of them empty, fill the whole without a gap and without an overlap."""
    if not whole:
        return len(boxes) == 1
    waiting = sorted(boxes, key=lambda box: box[0].start, reverse=True)
    edges = sorted({edge for box in boxes for edge in box[0]})
    if not edges or Range(edges[0], edges[-1]) != whole[0]:
        return False
    here: list[Box] = []  # the boxes between two edges that follow each other
    for begin, _ in itertools.pairwise(edges):
        here = [box for box in here if box[0].end > begin]
        while waiting and waiting[-1][0].start == begin:
            here.append(waiting.pop())
        if not fills([box[1:] for box in here], whole[1:]):
            return False
    return True


def _require(fits: bool, words: str) -> None:
    if not fits:
        raise ValueError(words)


def _fields(found: Any, names: Sequence[str], where: str) -> None:
    _require(isinstance(found, dict) and found.keys() == set(names), f"{where} does not have just {', '.join(names)}")


def _items(found: Any, where: str) -> Iterable[tuple[str, Any]]:
    _require(isinstance(found, dict), f"{where} are no names and values")
    return found.items()


def _is_option(found: Any) -> bool:
    if isinstance(found, list):
        return all(map(_is_option, found))
    return found is None or isinstance(found, bool | int | float | str)


def _is_count(found: Any) -> bool:
    return type(found) is int and 0 <= found < LARGEST


def _are_counts(found: Any) -> bool:
    return isinstance(found, list) and all(_is_count(one) for one in found)
