"""A manifest that somebody has written who can sign it: no field is believed before all of them fit each other."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoint_workers as work
import pytest
import torch
from helpers_math import message, quick
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from distmuon.checkpoint import CheckpointError, load, load_newest, save, weights
from distmuon.extras.checkpoint.manifest import digest, fills, read_manifest
from distmuon.sharding.layout import Range

# ---- What is opened while a checkpoint is loaded ----------------------------------------------------------

_opened: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(arguments[0], str | bytes | os.PathLike):
        _opened.append(os.fsdecode(arguments[0]))


sys.addaudithook(_note)  # which nobody can take away again


def opened_by(act: Callable[[], Any]) -> list[Path]:
    """Return which files were opened meanwhile, modules that Python imports apart."""
    global _opened
    _opened = []
    try:
        act()
    finally:
        found, _opened = _opened, None
    return [Path(path).resolve() for path in found if not path.endswith((".py", ".pyc", ".so"))]


# ---- One training, and its checkpoint ---------------------------------------------------------------------


FILE = "__0_0.distcp"


class Target:
    """A training that nothing may change, and a checkpoint that would fit it."""

    def __init__(self, folder: Path) -> None:
        self.saved, self.room = folder / "saved", folder / "room"
        save(self.saved, *work.small())
        self.model, self.optimizer = work.small()
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(1)
        self.before = copy.deepcopy(self._now())
        self.manifest = json.loads((self.saved / "manifest.json").read_text())
        self.manifest.pop("sha256")

    def _now(self) -> tuple[list[Tensor], list[Any]]:
        states = [(key, value) for state in self.optimizer.state.values() for key, value in state.items()]
        tensors = [*self.model.state_dict().values(), *(value for _, value in states)]
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return tensors, [groups, [key for key, _ in states]]

    def prepared(self, manifest: dict[str, Any], data: bytes | None = None, signed: bool = True) -> Path:
        """Return a fresh copy of the checkpoint, with this manifest, and with this content of its one file.

        signed: whether the manifest states the file's length and digest; it is always signed itself.
        """
        folder = self.room / "step-000001"
        shutil.rmtree(self.room, ignore_errors=True)
        shutil.copytree(self.saved, folder)
        if data is not None:
            (folder / FILE).write_bytes(data)
            if signed:
                stated = {FILE: [len(data), work.storage.sha256(folder / FILE)]}
                manifest = manifest | {"files": manifest["files"] | stated}
        (folder / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest(manifest)}))
        return folder

    def refuses(self, folder: Path) -> str:
        """Assert that the checkpoint is refused, that nothing has changed, and that nothing else was opened."""
        said = []

        def attempt() -> None:
            for act in (
                lambda: load(folder, self.model, self.optimizer),
                lambda: load_newest(folder.parent, self.model, self.optimizer),
            ):
                with pytest.raises(CheckpointError) as error:
                    act()
                said.append(message(error))

        outside = [path for path in opened_by(attempt) if not path.is_relative_to(folder.resolve())]
        assert outside == []
        tensors, rest = self._now()
        assert all(torch.equal(one, two) for one, two in zip(self.before[0], tensors, strict=True))
        assert rest == self.before[1]
        return said[0]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("target"))


# ---- What has happened to a folder ------------------------------------------------------------------------


def rename_parameter(manifest: dict[str, Any]) -> None:
    manifest["tensors"]["model/other"] = manifest["tensors"].pop("model/0.weight")


def replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("x")


HARMED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a file in its place": (replace_by_file, "is no folder"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "has no manifest.json"),
    "a truncated manifest": (lambda f: (f / "manifest.json").write_text('{"format": '), "is damaged"),
    "a manifest that is a list": (lambda f: (f / "manifest.json").write_text("[]"), "is damaged"),
    "an unsigned manifest": (lambda f: (f / "manifest.json").write_text("{}"), "is damaged"),
    "a wrong signature": (lambda f: (f / "manifest.json").write_text('{"sha256": "0"}'), "not what its sha256 says"),
    "a manifest of bytes": (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe\x00"), "is damaged"),
    "a missing file": (lambda f: (f / FILE).unlink(), "is missing"),
    "an empty file": (lambda f: (f / FILE).write_bytes(b""), "bytes, not"),
}
CHANGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an earlier format": (lambda m: m.update(format="distmuon checkpoint 1"), "has the format"),
    "a later format": (lambda m: m.update(format="distmuon checkpoint 3"), "has the format"),
    "a tensor less": (lambda m: m["tensors"].pop("model/0.weight"), "lacks 'model/0.weight'"),
    "a tensor renamed": (rename_parameter, "lacks 'model/0.weight'"),
    "another shape": (lambda m: m["tensors"]["model/0.bias"].update(shape=[7]), "do not fill it exactly"),
    "another dtype": (lambda m: m["tensors"]["model/0.bias"].update(dtype="int8"), "is int8 [6]"),
    "a group less": (lambda m: m["notes"]["groups"].pop(), "a state of no parameter"),
    "another algorithm": (lambda m: m["notes"]["groups"][0].update(algorithm="adamw"), "was trained by adamw"),
}


@pytest.mark.parametrize("kind", HARMED)
def test_a_damaged_checkpoint_is_refused_and_nothing_has_changed(target: Target, kind: str) -> None:
    harm, words = HARMED[kind]
    harm(folder := target.prepared(target.manifest))
    assert words in target.refuses(folder)


@pytest.mark.parametrize("kind", CHANGED)
def test_a_signed_manifest_that_does_not_fit_is_refused_and_nothing_has_changed(target: Target, kind: str) -> None:
    change, words = CHANGED[kind]
    change(manifest := copy.deepcopy(target.manifest))
    assert words in target.refuses(target.prepared(manifest))


# ---- Mutations --------------------------------------------------------------------------------------------

Place = tuple[Any, ...]
DEEP = json.loads("[" * 300 + "]" * 300)
VALUES = [
    None, True, False, -1, 0, 1, 2, 3, 7, 2**62, 10**30, 0.5, 1.0, math.nan, math.inf, "", ".", "..", "x", "../x",
    "a/b", "/etc/hostname", "\x00", "\ud800", "manifest.json", "float32", "int8", "torch.load", "adamw", "muon",
    [], {}, [0], [1, 1], {"params": []}, DEEP,
]  # fmt: skip


def places(node: Any, place: Place = ()) -> Iterator[Place]:
    """Yield where every value of a manifest is."""
    if place:
        yield place
    if isinstance(node, dict | list):
        for key in node if isinstance(node, dict) else range(len(node)):
            yield from places(node[key], (*place, key))


def at(node: Any, place: Place) -> Any:
    for key in place:
        node = node[key]
    return node


def harmless(place: Place, old: Any, new: Any) -> bool:
    """Return whether a value may be so: another option, another remark, another word for what made it."""
    number = [isinstance(value, int | float) and not isinstance(value, bool) for value in (old, new)]
    if place[0] == "torch":
        return isinstance(new, str)
    if place[:2] == ("notes", "notes"):
        return isinstance(new, dict)
    if "options" in place[:-1]:
        return (all(number) and math.isfinite(new)) or (isinstance(old, bool) and isinstance(new, bool))
    if place[-1] == "made_by":
        return isinstance(new, str)
    return place[-1] == "steps" and number[1] and type(new) is int and 0 <= new < 2**63


@st.composite
def mutations(draw: st.DrawFn, original: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest in which one thing is not as it was, and cannot be so."""
    mutated = copy.deepcopy(original)
    place = draw(st.sampled_from(list(places(original))))
    inside, key = at(mutated, place[:-1]), place[-1]
    kind = draw(st.sampled_from(["replace", "replace", "remove", "double", "swap"]))
    in_options = "options" in place[:-1]
    if kind == "replace":
        new = draw(st.sampled_from(VALUES))
        assume(not harmless(place, inside[key], new))
        inside[key] = copy.deepcopy(new)
    elif kind == "remove":
        assume(not in_options and (place == ("notes", "notes") or place[:2] != ("notes", "notes")))
        del inside[key]
    elif kind == "double":
        assume(not (isinstance(inside, dict) and in_options))
        if isinstance(inside, dict):
            inside[f"{key}x"] = copy.deepcopy(inside[key])
        else:
            inside.append(copy.deepcopy(inside[key]))
    else:
        others = [other for other in places(original) if type(at(original, other)) is type(inside[key])]
        new = at(original, draw(st.sampled_from(others)))
        assume(not harmless(place, inside[key], new))
        inside[key] = copy.deepcopy(new)
    assume(json.dumps(mutated, sort_keys=True) != json.dumps(original, sort_keys=True))
    return mutated


def test_200_mutations_of_a_signed_manifest_are_refused_and_change_nothing(target: Target) -> None:
    seen = []

    @quick(200)
    @given(mutations(target.manifest))
    def refused(mutated: dict[str, Any]) -> None:
        target.refuses(target.prepared(mutated))
        seen.append(1)

    refused()
    assert len(seen) >= 200
    assert read_manifest(target.prepared(target.manifest)).tensors


KINDS = ["flip", "cut", "insert"]


def a_tensor(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class Program:
    """What runs when a pickle is loaded that was not meant for that."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('a stranger\\'s program')",)


CONTENTS = {
    "nothing": b"",
    "zeros": bytes(4000),
    "another dtype": a_tensor(torch.zeros(6, dtype=torch.float64)),
    "another shape": a_tensor(torch.zeros(7)),
    "no tensor": a_tensor({"a": 1}),
    "a sparse tensor": a_tensor(torch.zeros(6).to_sparse()),
    "a tensor without storage": a_tensor(torch.zeros(6, device="meta")),
    "a program": a_tensor(Program()),
}


def with_chunk(target: Target, content: bytes, name: str = "model/0.bias") -> Path:
    """Return the checkpoint with other bytes for a chunk, as long as they are, and everything signed."""
    manifest = copy.deepcopy(target.manifest)
    _, _, _, offset, length = manifest["tensors"][name]["chunks"][0]
    data = (target.saved / FILE).read_bytes()
    data = data[:offset] + content + data[offset + length :]
    for tensor in manifest["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk[3] += (len(content) - length) * (chunk[3] > offset)
    manifest["tensors"][name]["chunks"][0][4] = len(content)
    return target.prepared(manifest, data)


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_signed_chunk_that_is_not_what_the_manifest_says_is_refused(target: Target, kind: str) -> None:
    folder = with_chunk(target, CONTENTS[kind])
    assert "cannot give its chunk of 'model/0.bias'" in target.refuses(folder)
    with pytest.raises(CheckpointError, match="cannot give its chunk"):
        weights(folder)


def test_mutations_of_files_are_refused_and_change_nothing(target: Target) -> None:
    """Signed as they are, or as they were; where a signed one can be read, only its owner knows that numbers differ."""
    data = (target.saved / FILE).read_bytes()

    @quick(100)
    @given(st.integers(0, len(data) - 1), st.integers(1, 255), st.sampled_from(KINDS), st.booleans())
    def refused(where: int, by: int, kind: str, signed: bool) -> None:
        new = {
            "flip": data[:where] + bytes([data[where] ^ by]) + data[where + 1 :],
            "cut": data[:where],
            "insert": data[:where] + bytes([by]) + data[where:],
        }[kind]
        folder = target.prepared(target.manifest, new, signed)
        if signed:
            try:
                weights(folder)
            except CheckpointError:
                pass
            else:
                return  # a weight is another one, which only its owner could know, or a state cannot be read
        target.refuses(folder)

    refused()


# ---- Places that are not the folder -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "manifest", "to itself"])
def test_a_link_is_not_followed(target: Target, kind: str, tmp_path: Path) -> None:
    folder = target.prepared(target.manifest)
    name = "manifest.json" if kind == "manifest" else FILE
    moved = (folder if kind == "to itself" else tmp_path) / "elsewhere"
    (folder / name).rename(moved)
    (folder / name).symlink_to(moved)
    assert "is a link or no plain file" in target.refuses(folder)


@pytest.mark.parametrize("name", ["../outside", "/outside", "sub/../../outside", "..", ".", "", "manifest.json\x00"])
def test_no_name_leads_out_of_the_folder(target: Target, name: str, tmp_path: Path) -> None:
    manifest = copy.deepcopy(target.manifest)
    name = name.replace("/outside", f"{tmp_path}/outside") if name.startswith("/") else name
    shutil.copy(target.saved / FILE, tmp_path / "outside")
    manifest["files"][name] = manifest["files"].pop(FILE)
    for tensor in manifest["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk[2] = name
    folder = target.prepared(manifest)
    shutil.copy(target.saved / FILE, folder.parent / "outside")
    assert "names a file outside its folder" in target.refuses(folder)


def test_a_manifest_too_deep_to_read_is_refused(target: Target) -> None:
    folder = target.prepared(target.manifest)
    (folder / "manifest.json").write_text("[" * 200_000 + "]" * 200_000)
    assert "is damaged" in target.refuses(folder)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="cannot be kept as JSON"):
        save(folder.parent / "deep", *work.small(), {"deep": deep})


# ---- Chunks that fill a tensor ----------------------------------------------------------------------------

Box = tuple[Range, ...]


@st.composite
def divisions(draw: st.DrawFn) -> tuple[list[Box], Box]:
    """Return a tensor's box, and boxes that fill it: cut in two again and again, anywhere."""
    whole = tuple(Range(0, draw(st.integers(1, 5))) for _ in range(draw(st.integers(0, 3))))
    boxes = [whole]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        long = [dim for dim, side in enumerate(box) if side.size > 1]
        if not long:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(long))
        cut = draw(st.integers(box[dim].start + 1, box[dim].end - 1))
        for part in (Range(box[dim].start, cut), Range(cut, box[dim].end)):
            boxes.append((*box[:dim], part, *box[dim + 1 :]))
    return draw(st.permutations(boxes)), whole


@quick(200)
@given(divisions(), st.data())
def test_boxes_fill_a_tensor_only_if_every_element_is_in_one_of_them(
    division: tuple[list[Box], Box], data: st.DataObject
) -> None:
    boxes, whole = division
    assert fills(boxes, whole)
    index = data.draw(st.integers(0, len(boxes) - 1))
    box, rest = boxes[index], boxes[:index] + boxes[index + 1 :]
    assert not fills(rest, whole)
    assert not fills([*boxes, box], whole)
    if whole:
        dim = data.draw(st.integers(0, len(whole) - 1))
        start, end = box[dim]
        for side in (Range(start, end + 1), Range(start + 1, end + 1), Range(start, end + 7)):
            assert not fills([*rest, (*box[:dim], side, *box[dim + 1 :])], whole)
