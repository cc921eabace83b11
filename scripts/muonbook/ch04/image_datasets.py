"""Real images: MNIST, Fashion-MNIST and CIFAR-10, fetched once, checked by SHA-256, read into tensors.

Sources: LeCun, Bottou, Bengio and Haffner 1998, "Gradient-based learning applied to document recognition" (MNIST);
Xiao, Rasul and Vollgraf 2017, "Fashion-MNIST", arXiv:1708.07747; Krizhevsky 2009, "Learning multiple layers of
features from tiny images" (CIFAR-10).

`download` fetches by torch.hub; reading is by hand, for neither library would do. torchvision is tied to one exact
torch, and a clone, Colab and a GPU box have different ones. scikit-learn's fetch_openml compares a file with the sum
that its server names, not with one known before, and without pandas parses CIFAR-10 from text, 184 million numbers of
64 bits, in every process anew.
The sums of MNIST and Fashion-MNIST are those in many public repositories. Debian's package of Fashion-MNIST holds the
same contents in gzip files of its own making, without the name in their headers: hence a second sum for each.
"""

from __future__ import annotations

import gzip
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from distmuon.launch.cli import UsageError
from muonbook import download

ROOT = Path(__file__).resolve().parents[3]  # of the repository
COMMAND = "python scripts/04_does_it_learn.py --task {} --fetch"
IDX = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
CIFAR = (*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin")


class Images(NamedTuple):
    """Images [n, channels, height, width] uint8 and labels [n] int64 in 0..9, as their authors split them."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


class File(NamedTuple):
    """One file: its name, bytes and SHA-256."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """Where a data set comes from, and what must be in it.

    mirrors: addresses of folders. files: IDX in this order, or one archive. train, test: images in each.
    shape: (channels, height, width) of one. package: the folder into which Debian's package puts the files; packed:
    their SHA-256 in Debian's packing.
    """

    title: str
    mirrors: tuple[str, ...]
    files: tuple[File, ...]
    train: int
    test: int
    shape: tuple[int, int, int]
    package: Path | None = None
    packed: tuple[str, ...] = ()


SOURCES = {
    "mnist": Source(
        "MNIST",
        ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
        (
            File(IDX[0], 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            File(IDX[1], 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            File(IDX[2], 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            File(IDX[3], 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
        train=60_000,
        test=10_000,
        shape=(1, 28, 28),
    ),
    "fashion": Source(
        "Fashion-MNIST",
        (
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/b2617bb6d3ffa2e429640350f613e3291e10b141"
            "/data/fashion",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        ),
        (
            File(IDX[0], 26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            File(IDX[1], 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            File(IDX[2], 4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            File(IDX[3], 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ),
        train=60_000,
        test=10_000,
        shape=(1, 28, 28),
        package=Path("/usr/share/datasets/fashion-mnist"),
        packed=(
            "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
            "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
            "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
            "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
        ),
    ),
    "cifar10": Source(
        "CIFAR-10",
        ("https://cave.cs.toronto.edu/kriz", "https://www.cs.toronto.edu/~kriz"),  # the second leads to the first
        (
            File(
                "cifar-10-binary.tar.gz",
                170_052_171,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
        train=50_000,
        test=10_000,
        shape=(3, 32, 32),
    ),
}


# ---- Fetching ---------------------------------------------------------------------------------------------


def fetch_all(name: str, folder: str | Path | None = None) -> None:
    """Fetch the files that are not here, and print a line for each. Raises UsageError when one does not come."""
    source = _source(name)
    for file in source.files:
        path = _whole(name, file, folder)
        if path is None:
            path = _folder(name, folder) / file.name
            download.fetch([f"{place}/{file.name}" for place in source.mirrors], path, file.sha256)
        print(f"{file.name}: {path.stat().st_size:,} bytes, checked", flush=True)


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


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise UsageError(f"no data set is called {name}; choose one of {', '.join(SOURCES)}.")
    return SOURCES[name]


def _folder(name: str, folder: str | Path | None) -> Path:
    return Path(ROOT / "data" if folder is None else folder) / name


def _whole(name: str, file: File, folder: str | Path | None) -> Path | None:
    """Return where this file lies with a sum that is known, or None."""
    source = SOURCES[name]
    packed = dict(zip(source.files, source.packed, strict=False)).get(file)
    for place in (_folder(name, folder), source.package):
        if place and download.is_whole(place / file.name, file.sha256, *filter(None, [packed])):
            return place / file.name
    return None


def _found(name: str, file: File, folder: str | Path | None) -> Path:
    """Return where this file lies, or raise UsageError: it is missing, or not what it should be."""
    if found := _whole(name, file, folder):
        return found
    title, path, command = SOURCES[name].title, _folder(name, folder) / file.name, COMMAND.format(name)
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path  # without what is this machine's own
    if not path.exists():
        raise UsageError(f"{title} is not here ({shown} is missing); get it: {command}")
    size = path.stat().st_size
    what = "its SHA-256 differs" if size == file.size else f"{size:,} bytes, where {file.size:,} are known"
    raise UsageError(f"{shown} is not {title}'s file ({what}); delete it and run again: {command}")


# ---- Reading ----------------------------------------------------------------------------------------------


def load(name: str, folder: str | Path | None = None) -> Images:
    """Return a data set, every byte of it checked.

    name: "mnist", "fashion" or "cifar10". folder: holds a folder of that name; by default data/ in the repository.
    Raises UsageError, with the command that fetches the data, where they are missing, altered or cut short.
    """
    source = _source(name)
    paths = [_found(name, file, folder) for file in source.files]
    return _read_cifar(source, *paths) if len(paths) == 1 else _read_idx(source, *paths)


def _read_idx(source: Source, *paths: Path) -> Images:
    """Read images and labels, of training and test: behind a header of 4 bytes and 4 for each size."""
    training, training_labels, test, test_labels = (_bytes(gzip.decompress(path.read_bytes())) for path in paths)
    return Images(
        training[16:].view(source.train, *source.shape),
        training_labels[8:].view(source.train).long(),
        test[16:].view(source.test, *source.shape),
        test_labels[8:].view(source.test).long(),
    )


def _read_cifar(source: Source, path: Path) -> Images:
    """Read six batches in memory: a record is one byte of label, then the red, green and blue planes."""
    with tarfile.open(path) as archive:
        members = {member.name.rpartition("/")[2]: member for member in archive}
        batches = [archive.extractfile(members[name]) for name in CIFAR]
        records = torch.cat([_bytes(batch.read()) for batch in batches if batch]).view(source.train + source.test, -1)
    images, labels = records[:, 1:].reshape(-1, *source.shape), records[:, 0].long()
    return Images(images[: source.train], labels[: source.train], images[source.train :], labels[source.train :])


def _bytes(contents: bytes) -> Tensor:
    return torch.frombuffer(bytearray(contents), dtype=torch.uint8)  # a copy, because tensors can be written
