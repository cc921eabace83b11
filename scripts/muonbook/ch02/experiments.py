"""What chapter 2's worker measures: the matrix products of Newton–Schulz, and its time compared with others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distmuon.launch import World
from distmuon.optim import newton_schulz as ns
from distmuon.optim.coefficients import quintics
from distmuon.optim.fast_paths import fast_dtype
from muonbook.measure.interleaved_timing import ended, ratios, take_turns

Product = tuple[int, int, int]  # [rows, inner] @ [inner, columns]
Shape = tuple[int, int]
SVD_SIZE, SIDE, SHARE_SHAPES, SMALL, MANY = 512, 1024, ((512, 512), (512, 2048)), (64, 128), 32

# ---- Products, counted as torch makes them --------------------------------------------------------------------


def products(call: Callable[[], object]) -> list[Product]:
    """Return (rows, inner, columns) of every matrix product that torch makes during `call()`, in order."""

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"):
                left, right = args[-2:]
                seen.append((left.shape[-2], left.shape[-1], right.shape[-1]))
            return func(*args, **(kwargs or {}))

    seen: list[Product] = []
    with Products():
        call()
    return seen


def count(world: World, shape: Shape) -> tuple[Shape, list[Product], list[Product]]:
    """Return the shape, the products made for a matrix of it, and those that it would take without transposing."""
    x = torch.ones(shape, device=world.device)
    made = products(lambda: ns.newton_schulz(x, compute_dtype=torch.float32))
    return shape, made, products(lambda: ns._iterate(x, quintics("muon", 5)))


def report_products(found: tuple[Shape, list[Product], list[Product]]) -> tuple[bool, None]:
    """Print the products of the first iteration, and the operations of all."""
    shape, made, untransposed = found
    print(f"{f'{shape[0]} x {shape[1]}, first iteration':30s}{'operations':>16s}")
    for n, k, m in made[:3]:
        print(f"  {f'[{n}, {k}] @ [{k}, {m}]':28s}{2 * n * k * m:16,}")
    total, other = (sum(2 * n * k * m for n, k, m in seen) for seen in (made, untransposed))
    print(f"{f'all {len(made)} products':30s}{total:16,}")
    if shape[0] > shape[1]:
        print(f"{'had it not been transposed':30s}{other:16,}   ({other / total:.2f} times)")
    return True, None


# ---- Times --------------------------------------------------------------------------------------------------


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
