"""Real images are checked and read: what is cut short or altered is named, and never used."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from distmuon.launch import UsageError
from muonbook.ch04 import image_datasets
from muonbook.ch04.image_datasets import FILES, PIXELS, SOURCES

TRAIN, TEST = 6, 4  # as many images as a file of these tests has


def idx(values: list[int], *shape: int) -> bytes:
    """Return a file of the true format: a header of 4 bytes, 4 for each size, then the values."""
    header = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
    return gzip.compress(header + bytes(values), mtime=0)


def pixels(count: int) -> list[int]:
    return [position * 7 % 256 for position in range(count * PIXELS)]


CONTENTS = {
    FILES[0]: idx(pixels(TRAIN), TRAIN, 28, 28),
    FILES[1]: idx([5, 0, 4, 1, 9, 2], TRAIN),
    FILES[2]: idx(pixels(TEST)[::-1], TEST, 28, 28),
    FILES[3]: idx([7, 2, 1, 0], TEST),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make Fashion-MNIST a data set of a few images, which lie at a mirror and not yet in this folder."""
    (tmp_path / "mirror").mkdir()
    for name, content in CONTENTS.items():
        (tmp_path / "mirror" / name).write_bytes(content)
    sums = tuple(hashlib.sha256(content).hexdigest() for content in CONTENTS.values())
    small = SOURCES["fashion"]._replace(mirrors=((tmp_path / "mirror").as_uri(),), sums=sums)
    monkeypatch.setitem(SOURCES, "fashion", small)
    monkeypatch.setattr(image_datasets, "FOLDER", tmp_path / "data")
    return tmp_path / "data" / "fashion"


def test_fetched_checked_and_read(home: Path, capsys: Any) -> None:
    assert image_datasets.missing("fashion") == (
        f"Fashion-MNIST is not here (data/fashion/{FILES[0]} is missing); "
        "get it: python scripts/04_does_it_learn.py --task fashion --fetch"
    )
    image_datasets.fetch_all("fashion")
    lines = [f"{name}: {len(content):,} bytes, checked" for name, content in CONTENTS.items()]
    assert capsys.readouterr().out.splitlines() == lines
    assert image_datasets.missing("fashion") is None
    images = image_datasets.load("fashion")
    assert [part.dtype for part in images] == [torch.uint8, torch.int64] * 2
    assert images.train_images.tolist() == torch.tensor(pixels(TRAIN)).view(TRAIN, PIXELS).tolist()
    assert images.test_images.tolist() == torch.tensor(pixels(TEST)[::-1]).view(TEST, PIXELS).tolist()
    assert (images.train_labels.tolist(), images.test_labels.tolist()) == ([5, 0, 4, 1, 9, 2], [7, 2, 1, 0])


def test_an_altered_or_cut_file_is_never_used_and_fetched_again(home: Path) -> None:
    image_datasets.fetch_all("fashion")
    file = FILES[2]
    for wrong in (CONTENTS[file][:-1], CONTENTS[file][:-1] + b"?"):
        (home / file).write_bytes(wrong)
        said = str(image_datasets.missing("fashion"))
        assert f"(data/fashion/{file} is not the file known, its SHA-256 differs)" in said
        with pytest.raises(UsageError) as raised:
            image_datasets.load("fashion")
        assert str(raised.value) == said
        image_datasets.fetch_all("fashion")
        assert (home / file).read_bytes() == CONTENTS[file]
