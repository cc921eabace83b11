"""What every rank of a TP group finds out about Newton–Schulz with all-reduced Gram matrices."""

from __future__ import annotations

import copy
from typing import Any

import torch
from helpers_math import distance
from torch import Tensor

from distmuon.launch import World
from distmuon.optim.newton_schulz import newton_schulz
from distmuon.sharding.grid import Grid
from muonbook.ch16 import gram_over_tp as gram

SHAPES = ((24, 48), (48, 24), (24, 24), (8, 240), (1, 24))
FORMS = {"stepwise": gram.STEPWISE, "safe in bf16": (2, 1, 1, 1), "at once": gram.AT_ONCE, "no step": ()}


def whole(shape: tuple[int, int], dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def facts(world: World) -> dict[Any, Any]:
    """Return, per case, how far this rank's block is from whole Newton–Schulz's, its ledger and what was predicted."""
    grid, found = Grid.of(world), {}
    for shape in SHAPES:
        for dim in (0, 1):
            if shape[dim] % grid.tp.size:
                continue
            for form, segments in FORMS.items():
                for triangle in (False, True):
                    found[shape, dim, form, triangle] = one(grid, shape, dim, segments, triangle)
    zero = gram.newton_schulz_over_tp(torch.zeros(4, 6, dtype=torch.float64), grid.tp, 0)
    coarse = whole((24, 48), torch.float32).chunk(grid.tp.size, 1)[grid.tp.rank]
    at_once = gram.newton_schulz_over_tp(coarse, grid.tp, 1, gram.AT_ONCE)
    expected = newton_schulz(whole((24, 48))).chunk(grid.tp.size, 1)[grid.tp.rank]
    return {"cases": found, "zero": zero, "float32 at once": distance(at_once, expected)}


def one(grid: Grid, shape: tuple[int, int], dim: int, segments: tuple[int, ...], triangle: bool) -> tuple[Any, ...]:
    tp, matrix = grid.tp, whole(shape)
    block = matrix.chunk(tp.size, dim)[tp.rank].clone(memory_format=torch.contiguous_format)
    before = block.clone()
    tp.ledger.clear()
    found = gram.newton_schulz_over_tp(block, tp, dim, segments, triangle)
    expected = newton_schulz(matrix, steps=sum(segments)).chunk(tp.size, dim)[tp.rank]
    predicted = gram.predict(shape[1 - dim], tp.size, 8, segments, triangle)
    untouched = torch.equal(before, block)
    return distance(found, expected), copy.deepcopy(tp.ledger), predicted, untouched and found.is_contiguous()
