"""What chapter 2's worker measures: the matrix products of Newton–Schulz, and the time of a decomposition."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distmuon.launch import World
from distmuon.optim import newton_schulz as ns
from distmuon.optim.coefficients import quintics
from muonbook.measure.interleaved_timing import ended, ratios, take_turns

Product = tuple[int, int, int]  # [rows, inner] @ [inner, columns]
Shape = tuple[int, int]
SVD_SIZE, ROUNDS = 512, 7  # of the matrix that is decomposed, and pairs that are timed

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


def against_svd(world: World) -> float:
    """Return how many times as long as Newton–Schulz a singular value decomposition takes: the median of pairs."""
    x = torch.randn(SVD_SIZE, SVD_SIZE, generator=torch.Generator().manual_seed(0)).to(world.device)
    svd, ours = (ended(act, world.device) for act in (lambda: torch.linalg.svd(x), lambda: ns.newton_schulz(x)))
    seconds = take_turns({"svd": svd, "ours": ours}, ROUNDS)
    return median(ratios(seconds["svd"], seconds["ours"]))


def report_svd(times: float) -> tuple[bool, None]:
    """Print what was found."""
    print(f"a {SVD_SIZE} x {SVD_SIZE} matrix: an SVD takes {times:.1f} times as long as Newton–Schulz")
    return True, None
