"""Real images: MNIST and Fashion-MNIST, fetched once, checked by SHA-256, read into tensors.

Sources: LeCun, Bottou, Bengio and Haffner 1998, "Gradient-based learning applied to document recognition" (MNIST);
Xiao, Rasul and Vollgraf 2017, "Fashion-MNIST", arXiv:1708.07747.

Neither library would do. torchvision is tied to one exact torch, and a clone, Colab and a GPU box have different ones;
scikit-learn's fetch_openml compares a file with the sum that its server names, not with one known before.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from distmuon.launch import UsageError
from muonbook import download

FOLDER = Path(__file__).resolve().parents[3] / "data"
COMMAND = "python scripts/04_does_it_learn.py --task {} --fetch"
FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
PIXELS = 28 * 28


class Images(NamedTuple):
    """Images [n, 784] uint8 and labels [n] int64 in 0..9, as their authors split them."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


class Source(NamedTuple):
    """Where a data set comes from. mirrors: addresses of folders. sums: the SHA-256 of FILES, as many repositories
    have them."""

    title: str
    mirrors: tuple[str, ...]
    sums: tuple[str, ...]


SOURCES = {
    "mnist": Source(
        "MNIST",
        ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
        (
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    "fashion": Source(
        "Fashion-MNIST",
        (
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/b2617bb6d3ffa2e429640350f613e3291e10b141"
            "/data/fashion",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        ),
        (
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
}


def fetch_all(name: str) -> None:
    """Fetch the files that are not here, and print a line for each. Raises UsageError when one does not come."""
    source = SOURCES[name]
    for file, known in zip(FILES, source.sums, strict=True):
        path = FOLDER / name / file
        download.fetch([f"{mirror}/{file}" for mirror in source.mirrors], path, known)
        print(f"{file}: {path.stat().st_size:,} bytes, checked", flush=True)


def missing(name: str) -> str | None:
    """Return None if the data are here and checked, or one sentence that says what is not, and how to get it."""
    for file, known in zip(FILES, SOURCES[name].sums, strict=True):
        if not download.is_whole(path := FOLDER / name / file, known):
            why = "is not the file known, its SHA-256 differs" if path.exists() else "is missing"
            return f"{SOURCES[name].title} is not here (data/{name}/{file} {why}); get it: {COMMAND.format(name)}"
    return None


def load(name: str) -> Images:
    """Return "mnist" or "fashion", every byte checked. Raises UsageError, with the command that fetches it."""
    if said := missing(name):
        raise UsageError(said)
    packed = [(FOLDER / name / file).read_bytes() for file in FILES]
    contents = [torch.frombuffer(bytearray(gzip.decompress(content)), dtype=torch.uint8) for content in packed]
    images = [content[16:].view(-1, PIXELS) for content in contents[::2]]  # behind 4 bytes, and 4 for each size
    labels = [content[8:].long() for content in contents[1::2]]
    return Images(images[0], labels[0], images[1], labels[1])
