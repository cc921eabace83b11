"""The time of Newton–Schulz beside that of a decomposition, of its bare products, and of a loop over small matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from distmuon.launch import World
from distmuon.optim import newton_schulz as ns
from distmuon.optim.fast_paths import fast_dtype
from muonbook.measure.interleaved_timing import ended, ratios, take_turns

SVD_SIZE, SIDE, SHARE_SHAPES, SMALL, MANY = 512, 1024, ((512, 512), (512, 2048)), (64, 128), 32


def ratio(world: World, rounds: int, first: Callable[[], object], second: Callable[[], object]) -> float:
    """Return seconds of `first()` / seconds of `second()`, the median of `rounds` pairs."""

    acts = {"first": ended(first, world.device), "second": ended(second, world.device)}
    seconds = take_turns(acts, rounds)
    return median(ratios(seconds["first"], seconds["second"]))


def against_svd(world: World, rounds: int) -> str:
    """Say how many times as long as Newton–Schulz a singular value decomposition takes."""
    x = torch.randn(SVD_SIZE, SVD_SIZE, generator=torch.Generator().manual_seed(0)).to(world.device)
    times = ratio(world, rounds, lambda: torch.linalg.svd(x), lambda: ns.newton_schulz(x))
    return f"a {SVD_SIZE} x {SVD_SIZE} matrix: an SVD takes {times:.1f} times as long as Newton–Schulz"


def shares(world: World, rounds: int) -> str:
    """Say which shares of two limits Newton–Schulz reaches, and how many times as long a loop takes as one batch.

    The first share is the time of the fifteen products alone, over the time of Newton–Schulz. The second is its rate,
    in operations per second, over the rate of a loop of big square products. All compute in the same dtype.
    """
    dtype = fast_dtype(torch.device(world.device), torch.float32)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(world.device)

    def bare(x: Tensor, gram: Tensor) -> None:
        for _ in range(5):
            x @ x.mT, gram @ gram, gram @ x

    def squares(times: int = 4) -> None:
        for _ in range(times):
            square @ square

    square = random(SIDE, SIDE).to(dtype)
    lines = [
        f"The speed of Newton–Schulz in {str(dtype).removeprefix('torch.')}, as a share of that of",
        f"            its fifteen products alone   {SIDE} x {SIDE} products",
    ]
    for a, b in SHARE_SHAPES:
        matrix, gram = random(a, b), random(a, a).to(dtype)
        x, whole = matrix.to(dtype), partial(ns.newton_schulz, matrix, compute_dtype=dtype)
        alone = ratio(world, rounds, partial(bare, x, gram), whole)
        rate = ratio(world, rounds, squares, whole) * ns.flops((a, b)) / (4 * 2 * SIDE**3)
        lines.append(f"{a} x {b}".ljust(12) + f"{alone:19.0%}{rate:25.0%}")
    small = random(MANY, *SMALL)
    loop = ratio(world, rounds, lambda: [ns.newton_schulz(one) for one in small], lambda: ns.newton_schulz(small))
    lines.append(f"{MANY} matrices of {SMALL[0]} x {SMALL[1]}: one by one, {loop:.1f} times as long as at once")
    return "\n".join(lines)


def report(text: str) -> tuple[bool, None]:
    """Print what was found."""
    print(text)
    return True, None
