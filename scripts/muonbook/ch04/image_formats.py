"""Two file formats of images, read strictly and in memory: MNIST's IDX, and CIFAR-10's binary records.

Nothing is executed (CIFAR-10's other version is a pickle, which may run anything), and nothing is unpacked to disk.
Every reader raises ValueError with what is wrong, as words that follow a file's name.
Sources: LeCun, Cortes and Burges, "The MNIST database of handwritten digits" (IDX); Krizhevsky, "The CIFAR-10 dataset".
"""

from __future__ import annotations

import io
import math
import tarfile
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

CLASSES = 10
GZIP = b"\x1f\x8b"
IDX_BYTES = 0x08  # the third byte of an IDX file: its elements are unsigned bytes
HEADERS = 1 << 20  # bytes: more than the names, texts and padding in CIFAR-10's archive take


def idx_images(packed: bytes, shape: Sequence[int]) -> Tensor:
    """Return images [n, 1, height, width] uint8 from a gzipped IDX file. shape: the (n, height, width) it must have."""
    return _idx(packed, shape).unsqueeze(1)


def idx_labels(packed: bytes, count: int) -> Tensor:
    """Return labels [count] int64, all in 0..9, from a gzipped IDX file."""
    return _labels(_idx(packed, [count]))


def cifar_batches(packed: bytes, names: Sequence[str], shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return images [n, 3, height, width] uint8 and labels [n] int64 of these members of a .tar.gz, in this order.

    names: without their folder. shape: the (images, 3, height, width) that each member must have. A record is one byte
    of label, then the red, green and blue planes.
    """
    record = 1 + math.prod(shape[1:])
    found = _members(packed, names, shape[0] * record)
    rows = torch.cat([found.pop(name) for name in names]).view(-1, record)
    return rows[:, 1:].reshape(-1, *shape[1:]).contiguous(), _labels(rows[:, 0])


def gunzip(packed: bytes, limit: int) -> bytes:
    """Return the contents of one gzip stream of at most `limit` bytes unpacked, its checksum verified."""
    if not packed.startswith(GZIP):
        raise ValueError("is no gzip file")
    stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)  # 16: with gzip's header and trailer
    try:
        contents = stream.decompress(packed, limit + 1)
    except zlib.error as error:
        raise ValueError(f"is a damaged gzip file ({error})") from None
    if len(contents) > limit:
        raise ValueError(f"unpacks to more than {limit:,} bytes")
    if not stream.eof:
        raise ValueError(f"is cut short (its gzip stream ends after {len(contents):,} unpacked bytes)")
    if stream.unused_data:
        raise ValueError(f"has {len(stream.unused_data):,} bytes after the end of its gzip stream")
    return contents


def _idx(packed: bytes, shape: Sequence[int]) -> Tensor:
    start = 4 * (1 + len(shape))
    length = start + math.prod(shape)
    contents = gunzip(packed, 2 * length)  # twice, so that a few bytes too many are counted and said
    magic = bytes([0, 0, IDX_BYTES, len(shape)])
    if contents[:4] != magic:
        raise ValueError(f"begins with {contents[:4].hex() or 'nothing'}, where IDX has {magic.hex()}")
    sizes = [int.from_bytes(contents[at : at + 4]) for at in range(4, start, 4)]
    if sizes != list(shape):
        raise ValueError(f"holds {_times(sizes)} values, where {_times(shape)} are known")
    if len(contents) != length:
        raise ValueError(f"unpacks to {len(contents):,} bytes, where {_times(shape)} values take {length:,}")
    return _bytes(contents)[start:].view(*shape)


def _members(packed: bytes, names: Sequence[str], length: int) -> dict[str, Tensor]:
    """Return those members of a .tar.gz, each of which must be there once and have `length` bytes."""
    contents = gunzip(packed, len(names) * length + HEADERS)
    found: dict[str, Tensor] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(contents), mode="r:") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                if name not in names:
                    continue
                file = archive.extractfile(member) if member.isreg() else None
                if file is None or name in found:
                    raise ValueError(f"has {name} twice, or as something that is no file")
                if member.size != length:
                    raise ValueError(f"has {member.size:,} bytes in {name}, where {length:,} are known")
                found[name] = _bytes(file.read())
            end = archive.offset
    except tarfile.TarError as error:
        raise ValueError(f"is a damaged tar file ({error})") from None
    if any(contents[end:]):
        raise ValueError("is a damaged tar file (some of its bytes belong to no member)")
    if absent := [name for name in names if name not in found]:
        raise ValueError(f"has no {', '.join(absent)}")
    return found


def _labels(raw: Tensor) -> Tensor:
    wrong = (raw >= CLASSES).nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(f"has {int(raw[first])} as label of image {first}, where labels are 0 to {CLASSES - 1}")
    return raw.long()


def _bytes(contents: bytes) -> Tensor:
    return torch.frombuffer(bytearray(contents), dtype=torch.uint8)  # a copy, because tensors can be written


def _times(sizes: Sequence[int]) -> str:
    return " x ".join(f"{size:,}" for size in sizes)
