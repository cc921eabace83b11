"""Where MNIST, Fashion-MNIST and CIFAR-10 come from, file by file: mirrors, sizes, SHA-256.

The sums of MNIST and Fashion-MNIST are those in many public repositories. Debian's package of Fashion-MNIST holds the
same contents in gzip files of its own making, without the name in their headers: hence a second sum for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

IDX = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
CIFAR = (
    "data_batch_1.bin",
    "data_batch_2.bin",
    "data_batch_3.bin",
    "data_batch_4.bin",
    "data_batch_5.bin",
    "test_batch.bin",
)


class File(NamedTuple):
    """One file: its name, bytes and SHA-256; debian: the SHA-256 of the same contents in Debian's packing."""

    name: str
    size: int
    sha256: str
    debian: str | None = None


@dataclass(frozen=True)
class Source:
    """Where a data set comes from, and what must be in it.

    mirrors: addresses of folders. files: IDX in this order, or one archive. train, test: images in each.
    shape: (channels, height, width) of one. package: the folder into which Debian's package puts the files.
    """

    title: str
    mirrors: tuple[str, ...]
    files: tuple[File, ...]
    train: int
    test: int
    shape: tuple[int, int, int]
    package: Path | None = None


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
            File(
                IDX[0],
                26_421_880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
            ),
            File(
                IDX[1],
                29_515,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
            ),
            File(
                IDX[2],
                4_422_102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
            ),
            File(
                IDX[3],
                5_148,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
            ),
        ),
        train=60_000,
        test=10_000,
        shape=(1, 28, 28),
        package=Path("/usr/share/datasets/fashion-mnist"),
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
