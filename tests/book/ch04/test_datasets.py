"""Real images are checked and read: what is cut short or altered is named, and never used."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distmuon.launch.cli import UsageError
from muonbook.ch04 import image_datasets
from muonbook.ch04.image_datasets import CIFAR, IDX, SOURCES

TRAIN, TEST, HEIGHT, WIDTH = 6, 4, 3, 2  # as many images as a file of these tests has, and their pixels
BATCH, SIDE = 4, 2  # and a batch of CIFAR-10
# SHA-256 of what the four files of Fashion-MNIST unpack to, as several public repositories have them
FASHION_UNPACKED = (
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)


# Files of the true formats


def idx(values: bytes, *shape: int) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + values


def pixels(count: int) -> bytes:
    return bytes(position * 7 % 256 for position in range(count))


def labels(count: int) -> bytes:
    return bytes(position * 3 % 10 for position in range(count))


def idx_files() -> dict[str, bytes]:
    contents = (
        idx(pixels(TRAIN * HEIGHT * WIDTH), TRAIN, HEIGHT, WIDTH),
        idx(labels(TRAIN), TRAIN),
        idx(pixels(TEST * HEIGHT * WIDTH)[::-1], TEST, HEIGHT, WIDTH),
        idx(labels(TEST)[::-1], TEST),
    )
    return {name: gzip.compress(content, mtime=0) for name, content in zip(IDX, contents, strict=True)}


def cifar_batch(number: int) -> bytes:
    """Every record: its label, then planes whose bytes are 100 * colour + 10 * batch + the position in the plane."""
    records = b""
    for image in range(BATCH):
        planes = [100 * colour + 10 * number + position for colour in range(3) for position in range(SIDE * SIDE)]
        records += bytes([(number + image) % 10, *(value % 256 for value in planes)])
    return records


def cifar_members() -> dict[str, bytes]:
    folder = "cifar-10-batches-bin"
    batches = {f"{folder}/{name}": cifar_batch(number) for number, name in enumerate(CIFAR)}
    return {f"{folder}/batches.meta.txt": b"airplane\n", **dict(reversed(batches.items()))}  # the order is not ours


def tar(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


# Data sets


def store(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def small(name: str, files: dict[str, bytes], mirror: Path, **changes: Any) -> image_datasets.Source:
    """Return the data set as it would be if its files had this content, and lay them at its only mirror."""
    store(mirror, files)
    known = tuple(
        image_datasets.File(file, len(content), hashlib.sha256(content).hexdigest()) for file, content in files.items()
    )
    sizes: dict[str, Any] = dict(train=TRAIN, test=TEST, shape=(1, HEIGHT, WIDTH))
    if name == "cifar10":
        sizes = dict(train=5 * BATCH, test=BATCH, shape=(3, SIDE, SIDE))
    return replace(SOURCES[name], files=known, mirrors=(mirror.as_uri(),), package=None, packed=(), **(sizes | changes))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make data sets of a few bytes, which lie at a mirror in this folder and not yet at home; return the folder."""
    archive = {"cifar-10-binary.tar.gz": packed(tar(cifar_members()))}
    for name in SOURCES:
        files = archive if name == "cifar10" else idx_files()
        monkeypatch.setitem(SOURCES, name, small(name, files, tmp_path / "mirror" / name))
    return tmp_path


@pytest.mark.parametrize("name", SOURCES)
def test_fetched_checked_and_loaded(world: Path, name: str, capsys: Any) -> None:
    home = world / "home"
    files = SOURCES[name].files
    assert image_datasets.missing(name, home) == (
        f"{SOURCES[name].title} is not here ({home / name / files[0].name} is missing); "
        f"get it: python scripts/04_does_it_learn.py --task {name} --fetch"
    )
    image_datasets.fetch_all(name, home)
    assert capsys.readouterr().out.splitlines() == [f"{file.name}: {file.size:,} bytes, checked" for file in files]
    assert image_datasets.missing(name, home) is None
    shape = SOURCES[name].shape
    images = image_datasets.load(name, str(home))
    assert [(part.dtype, part.shape) for part in images] == [
        (torch.uint8, (SOURCES[name].train, *shape)),
        (torch.int64, (SOURCES[name].train,)),
        (torch.uint8, (SOURCES[name].test, *shape)),
        (torch.int64, (SOURCES[name].test,)),
    ]
    if name == "cifar10":
        assert images.test_labels.tolist() == [(5 + image) % 10 for image in range(BATCH)]
        assert images.test_images[0, 0, 0, 0] == 50
        assert images.train_labels.tolist() == [(batch + image) % 10 for batch in range(5) for image in range(BATCH)]
        for image, planes in enumerate(images.train_images):
            firsts = [100 * colour + 10 * (image // BATCH) for colour in range(3)]
            assert planes.flatten(1).tolist() == [[(n + at) % 256 for at in range(SIDE * SIDE)] for n in firsts]
    else:
        assert images.train_labels.tolist() == list(labels(TRAIN))
        assert images.train_images.flatten().tolist() == list(pixels(TRAIN * HEIGHT * WIDTH))
        assert images.test_labels.tolist() == list(labels(TEST)[::-1])
        assert images.test_images.flatten().tolist() == list(pixels(TEST * HEIGHT * WIDTH)[::-1])


@pytest.mark.parametrize("name", SOURCES)
def test_an_altered_or_cut_file_is_never_used_and_fetched_again(world: Path, name: str, capsys: Any) -> None:
    home = world / "home"
    image_datasets.fetch_all(name, home)
    path = home / name / SOURCES[name].files[-1].name
    content = path.read_bytes()
    remedy = f"; delete it and run again: python scripts/04_does_it_learn.py --task {name} --fetch"
    title = SOURCES[name].title
    for wrong, why in (
        (content[:-1], f"{len(content) - 1:,} bytes, where {len(content):,} are known"),
        (content[:-1] + b"?", "its SHA-256 differs"),
    ):
        path.write_bytes(wrong)
        sentence = f"{path} is not {title}'s file ({why}){remedy}"
        assert image_datasets.missing(name, home) == sentence
        with pytest.raises(UsageError) as raised:
            image_datasets.load(name, home)
        assert str(raised.value) == sentence
        capsys.readouterr()
        image_datasets.fetch_all(name, home)
        assert f"{path.name}: here, but not the file known" in capsys.readouterr().out
        assert path.read_bytes() == content


@pytest.mark.parametrize("name", SOURCES)
def test_a_file_of_the_right_sum_must_hold_as_many_images(
    world: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should a sum ever be wrong in our table, the contents speak: here a table that knows one image more."""
    monkeypatch.setitem(SOURCES, name, replace(SOURCES[name], test=SOURCES[name].test + 1))
    image_datasets.fetch_all(name, world / "home")
    with pytest.raises(RuntimeError, match=r"shape '.*' is invalid"):
        image_datasets.load(name, world / "home")


def test_a_file_that_does_not_come_says_where_to_put_it(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], mirrors=("http://127.0.0.1:9", "file:///nowhere")))
    target = world / "home" / "mnist" / IDX[0]
    with pytest.raises(UsageError) as raised:
        image_datasets.fetch_all("mnist", world / "home")
    said = str(raised.value)
    assert said.startswith(f"{IDX[0]} did not come (http://127.0.0.1:9/{IDX[0]}: ")
    assert f"; file:///nowhere/{IDX[0]}: " in said
    assert said.endswith(f"or put the file at {target} by hand.")
    assert list(target.parent.iterdir()) == []


def test_a_package_is_used_where_it_has_what_is_known(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Debian packs the same contents otherwise; what is wrong there is passed by, and taken from our own folder."""
    package, source = world / "package", SOURCES["fashion"]
    repacked = {name: gzip.compress(gzip.decompress(content), 1, mtime=1) for name, content in idx_files().items()}
    store(package, repacked)
    packed_sums = tuple(hashlib.sha256(content).hexdigest() for content in repacked.values())
    monkeypatch.setitem(SOURCES, "fashion", replace(source, package=package, packed=packed_sums, mirrors=()))
    assert image_datasets.missing("fashion", world / "home") is None
    assert image_datasets.load("fashion", world / "home").train_labels.tolist() == list(labels(TRAIN))
    image_datasets.fetch_all("fashion", world / "home")
    assert capsys.readouterr().out.count(", checked") == 4
    assert not (world / "home").exists()
    (package / IDX[2]).write_bytes(b"altered")
    assert str(world / "home" / "fashion" / IDX[2]) in str(image_datasets.missing("fashion", world / "home"))
    store(world / "home" / "fashion", {IDX[2]: idx_files()[IDX[2]]})
    assert image_datasets.load("fashion", world / "home").test_labels.tolist() == list(labels(TEST)[::-1])


def test_an_unknown_name_is_refused() -> None:
    for ask in (image_datasets.load, image_datasets.missing, image_datasets.fetch_all):
        if ask is image_datasets.missing:
            assert "choose one of mnist, fashion, cifar10" in str(image_datasets.missing("svhn"))
            continue
        with pytest.raises(UsageError, match="no data set is called svhn; choose one of mnist, fashion, cifar10"):
            ask("svhn")


def test_the_default_folder_is_named_without_the_path_of_this_machine(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(image_datasets, "ROOT", tmp_path)
    assert "(data/mnist/train-images-idx3-ubyte.gz is missing)" in str(image_datasets.missing("mnist"))


def test_the_table_of_sources_is_complete() -> None:
    for source in SOURCES.values():
        assert all(place.startswith("http") and not place.endswith("/") for place in source.mirrors)
        assert all(
            len(bytes.fromhex(known)) == 32 for known in (*(file.sha256 for file in source.files), *source.packed)
        )
        assert len(source.packed) == (0 if source.package is None else len(source.files))
    sums = [file.sha256 for source in SOURCES.values() for file in source.files]
    assert len(set(sums)) == len(sums) == 9


# Debian's package, where it is installed


def test_debians_fashion_mnist_is_the_published_one(tmp_path: Path) -> None:
    package = SOURCES["fashion"].package
    if package is None or not package.is_dir():
        pytest.skip("needs Debian's package dataset-fashion-mnist")
    unpacked = [hashlib.sha256(gzip.decompress((package / name).read_bytes())).hexdigest() for name in IDX]
    assert unpacked == list(FASHION_UNPACKED)
    images = image_datasets.load("fashion", tmp_path)
    assert images.train_labels.bincount().tolist() == [6000] * 10
    assert images.test_labels.bincount().tolist() == [1000] * 10
    assert images.train_labels[:5].tolist() == [9, 0, 0, 3, 0]
