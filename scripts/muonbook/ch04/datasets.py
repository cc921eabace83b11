"""Real images: MNIST, Fashion-MNIST and CIFAR-10, fetched once, checked by SHA-256, read into tensors.

Sources: LeCun, Bottou, Bengio and Haffner 1998, "Gradient-based learning applied to document recognition" (MNIST);
Xiao, Rasul and Vollgraf 2017, "Fashion-MNIST", arXiv:1708.07747; Krizhevsky 2009, "Learning multiple layers of
features from tiny images" (CIFAR-10).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from distmuon.launch.arguments import UsageError
from muonbook.ch04 import download
from muonbook.ch04.image_formats import cifar_batches, idx_images, idx_labels
from muonbook.ch04.image_sources import CIFAR, SOURCES, File, Source

ROOT = Path(__file__).resolve().parents[3]  # of the repository
COMMAND = "python scripts/04_does_it_learn.py --task {} --fetch"


class Images(NamedTuple):
    """Images [n, channels, height, width] uint8 and labels [n] int64 in 0..9, as their authors split them."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load(name: str, folder: str | Path | None = None) -> Images:
    """Return a data set, every byte of it checked.

    name: "mnist", "fashion" or "cifar10". folder: holds a folder of that name; by default data/ in the repository.
    Raises UsageError, with the command that fetches the data, where they are missing, altered or cut short.
    """
    source = _source(name)
    paths = [_found(name, file, folder) for file in source.files]
    try:
        return _read_cifar(source, *paths) if len(paths) == 1 else _read_idx(source, *paths)
    except ValueError as error:
        raise UsageError(f"{error}; delete it and run again: {COMMAND.format(name)}") from None


def missing(name: str, folder: str | Path | None = None) -> str | None:
    """Return None if the data are here and checked, or one sentence that says what is not, and how to get it."""
    try:
        for file in _source(name).files:
            _found(name, file, folder)
    except UsageError as error:
        return str(error)
    return None


def not_run_lines(name: str) -> list[str]:
    """Return what a table says of a data set on which nothing was run, with the command that fetches it."""
    return [f"{_source(name).title}: not run here; get the images with", f"  {COMMAND.format(name)}"]


def fetch_all(name: str, folder: str | Path | None = None) -> None:
    """Fetch the files that are not here, and print a line for each. Raises UsageError when one does not come."""
    source = _source(name)
    for file in source.files:
        path = _whole(name, file, folder)
        if path is None:
            path = _folder(name, folder) / file.name
            download.fetch([f"{place}/{file.name}" for place in source.mirrors], path, file.sha256, file.size)
        print(f"{file.name}: {path.stat().st_size:,} bytes, checked", flush=True)


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise UsageError(f"no data set is called {name}; choose one of {', '.join(SOURCES)}.")
    return SOURCES[name]


def _folder(name: str, folder: str | Path | None) -> Path:
    return Path(ROOT / "data" if folder is None else folder) / name


def _whole(name: str, file: File, folder: str | Path | None) -> Path | None:
    """Return where this file lies with one of the sums known, or None."""
    for place in (_folder(name, folder), SOURCES[name].package):
        if place and download.is_whole(place / file.name, file.sha256, *filter(None, [file.debian])):
            return place / file.name
    return None


def _found(name: str, file: File, folder: str | Path | None) -> Path:
    """Return where this file lies, or raise UsageError: it is missing, or not what it should be."""
    if found := _whole(name, file, folder):
        return found
    title, path, command = SOURCES[name].title, _folder(name, folder) / file.name, COMMAND.format(name)
    if not path.exists():
        raise UsageError(f"{title} is not here ({_shown(path)} is missing); get it: {command}")
    size = path.stat().st_size
    what = "its SHA-256 differs" if size == file.size else f"{size:,} bytes, where {file.size:,} are known"
    raise UsageError(f"{_shown(path)} is not {title}'s file ({what}); delete it and run again: {command}")


def _shown(path: Path) -> str:
    """Return a path without what is this machine's own, where it lies in the repository."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def _read_idx(source: Source, *paths: Path) -> Images:
    size = source.shape[1:]
    return Images(
        _parsed(idx_images, paths[0], (source.train, *size)),
        _parsed(idx_labels, paths[1], source.train),
        _parsed(idx_images, paths[2], (source.test, *size)),
        _parsed(idx_labels, paths[3], source.test),
    )


def _read_cifar(source: Source, path: Path) -> Images:
    images, labels = _parsed(cifar_batches, path, CIFAR, (source.test, *source.shape))  # every batch is as long
    return Images(images[: source.train], labels[: source.train], images[source.train :], labels[source.train :])


def _parsed(read: Callable[..., Any], path: Path, *expected: Any) -> Any:
    try:
        return read(path.read_bytes(), *expected)
    except ValueError as error:
        raise ValueError(f"{_shown(path)} {error}") from None
