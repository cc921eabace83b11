"""A pair of cut layers and three gathers, small and in whole numbers: compared with whole layers, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distmuon.launch import World
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import ring_bytes
from distmuon.sharding.tensor_parallel import ColumnParallelLinear, RowParallelLinear, load_slices

ROWS, INPUTS, HIDDEN, OUTPUTS = 2, 4, 4, 3  # of the pair of layers
GATHERED = {"dim 0": (0, 0), "dim 1": (1, 1), "cut along 0, put together along 1": (0, 1)}  # cut, put together
SEED = 392  # their sums stay small, and each rank meets a zero of the ReLU


def nonzero_digits(*shape: int, seed: int) -> Tensor:
    """Return a float32 tensor of whole numbers from -3 to 3 without 0: their sums are exact in any order."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(1, 4, shape, generator=random) * (2.0 * torch.randint(0, 2, shape, generator=random) - 1)


def whole_numbers() -> list[Tensor]:
    """Return X, W1, W2 and the gradient of Y."""
    shapes = {"W1": (HIDDEN, INPUTS), "W2": (OUTPUTS, HIDDEN), "X": (ROWS, INPUTS), "dY": (ROWS, OUTPUTS)}
    made = {name: nonzero_digits(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items(), SEED)}
    return [made[name] for name in ("X", "W1", "W2", "dY")]


def run(world: World) -> list[dict[str, Any]] | None:
    """Run the layers and the gathers; return what every rank held, and whether it is right."""
    grid = Grid.of(world)
    tp = grid.tp
    X, W1, W2, dY = (made.to(grid.device) for made in whole_numbers())

    def passed(first: nn.Module, second: nn.Module) -> tuple[Any, Tensor, Tensor, int]:
        """Take X forward through two layers and dY back; return X, H, Y and the number of calls so far, forward."""
        x = X.clone().requires_grad_()
        h = F.relu(first(x))
        y = second(h)
        calls = grid.ledger.total().calls
        y.backward(dY)
        return x, h, y, calls

    ones = (nn.Linear(INPUTS, HIDDEN, bias=False), nn.Linear(HIDDEN, OUTPUTS, bias=False))
    column = ColumnParallelLinear(INPUTS, HIDDEN, tp, bias=False, name="column")
    row = RowParallelLinear(HIDDEN, OUTPUTS, tp, bias=False, name="row")
    for layer, one, whole in ((column, ones[0], W1), (row, ones[1], W2)):
        load_slices(layer.to(grid.device), {"weight": whole}, tp)
        one.to(grid.device).weight.data.copy_(whole)
    x, h, y, forward = passed(column, row)
    sent = {entry.label: traffic.sent_bytes for entry, traffic in grid.ledger}
    calls = (forward, grid.ledger.total().calls - forward)
    x1, _, y1, _ = passed(*ones)
    cuts = ((column, ones[0], 0), (row, ones[1], 1))

    def same_slice(mine: Any, one: Any, dim: int) -> bool:
        return torch.equal(mine.weight.grad, one.weight.grad.chunk(tp.size, dim)[tp.rank])

    right = {
        "Y": torch.equal(y, y1),
        "the gradient of X": torch.equal(x.grad, x1.grad),
        "the gradients of this rank's W1 and W2": all(same_slice(*cut) for cut in cuts),
    }
    part = F.linear(h.detach(), row.weight.detach())

    M = torch.arange(1.0, 17, device=grid.device).view(4, 4)
    gathers = {}
    for name, (cut, along) in GATHERED.items():
        block = M.chunk(tp.size, cut)[tp.rank].contiguous()
        gathers[name] = tp.all_gather_blocks(block, along, "look").tolist()
    try:
        DistributedMuon([("copied.weight", copy.deepcopy(column.weight))], grid)
        refused = "not at all"
    except ValueError as error:
        refused = str(error)
    slices = {"X": X, "W1": column.weight, "H": h, "W2": row.weight, "partial Y": part}
    return world.gather({
        "slices": {name: held.tolist() for name, held in slices.items()}, "Y": y.tolist(), "gathers": gathers,
        "refused": refused, "right": right, "calls": calls, "sent": sent,
    })  # fmt: skip


def report(ranks: list[dict[str, Any]]) -> tuple[bool, list[dict[str, Any]]]:
    """Print what each rank held, what was sent, and whether the pair is the whole pair."""
    for number, rank in enumerate(ranks):
        shapes = [f"{name} {len(value)} x {len(value[0])}" for name, value in rank["slices"].items() if name != "X"]
        print(f"TP rank {number} holds {', '.join(shapes)}")
    print("Compared with the whole layers in one process, bit for bit:")
    for what in ranks[0]["right"]:
        print(f"  {what} equal on every rank: {all(rank['right'][what] for rank in ranks)}")
    forward, backward = ranks[0]["calls"]
    print(f"All-reduces: {forward} forward, {backward} backward. Bytes that a rank sends:")
    expected = {"row": 4 * ROWS * OUTPUTS, "column": 4 * ROWS * INPUTS}
    for label, what in (("row", "forward, the sum of Y"), ("column", "backward, the sum of X's gradient")):
        predicted = ring_bytes("all_reduce", expected[label], len(ranks))
        print(f"  {what:<36} predicted {predicted:>3}, counted {ranks[0]['sent'].get(label, 0):>3}")
    return all(all(rank["right"].values()) for rank in ranks), ranks
