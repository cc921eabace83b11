"""The spectra of one layer in training, and one step in two directions: along a matrix, and along its polar factor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distmuon.launch import World
from distmuon.models.digits import Split, batch_rows, digits
from distmuon.models.networks import MLP, initial_weights
from distmuon.optim.newton_schulz import polar_factor
from distmuon.sharding.grid import Grid
from muonbook.jobs import write_file

LAYER = "layers.1.weight"  # [128, 256], in the middle of the network
WIDTHS, BATCH, RATE, MOMENTUM = (64, 256, 128, 128, 10), 256, 0.02, 0.95
WATCHED = (0, 20, 100, 200)  # steps before which the spectra are taken
SEEDS, AT = 3, 20  # runs to compare, and the step before which the one step is taken
LENGTHS = tuple(0.025 * 2 ** (n / 2) for n in range(15))  # of the one step, as spectral norms: 0.025 to 3.2
Splits = Sequence[Split]
Losses = list[list[float]]  # [parts, lengths]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Split, seed: int, steps: int
) -> Iterator[tuple[int, Tensor, float]]:
    """Train; before every step, when its gradients are there, yield (step, rows of its batch, loss)."""
    for step in range(steps):
        rows = batch_rows(step, BATCH, len(data.labels), seed)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.images[rows]), data.labels[rows])
        loss.backward()
        yield step, rows, loss.item()
        optimizer.step()


def skew(matrix: Tensor) -> tuple[float, float]:
    """Return the share of the 5 strongest directions of a matrix [A, B], and how many directions are in use.

    A direction's share of the squared norm is s_i^2 / (s_1^2 + s_2^2 + ...). The second number is e to the power of the
    shares' entropy, which is k if k directions share equally.
    """
    squares = torch.linalg.svdvals(matrix).square()
    shares = squares / squares.sum()
    return shares[:5].sum().item(), torch.special.entr(shares).sum().exp().item()


def losses_after(model: nn.Module, weight: Tensor, direction: Tensor, parts: Splits) -> Losses:
    """Return the loss on each part (a row) after a step of each length (a column).

    W <- W - length * direction: only this one weight moves, and it is put back.
    """
    home, columns = weight.detach().clone(), []
    with torch.no_grad():
        for length in LENGTHS:
            weight.copy_(home - length * direction)
            losses = [F.cross_entropy(model(part.images), part.labels) for part in parts]
            columns.append([loss.item() for loss in losses])
        weight.copy_(home)
    return [list(row) for row in zip(*columns, strict=True)]


def one_step(model: nn.Module, weight: Tensor, matrix: Tensor, parts: Splits) -> list[Losses]:
    """Return `losses_after` along `matrix` as it is, and along its polar factor."""
    raw = matrix / torch.linalg.matrix_norm(matrix, ord=2)  # spectral norm 1
    directions = raw, polar_factor(matrix)
    return [losses_after(model, weight, direction, parts) for direction in directions]


def run_seed(seed: int, at: int, watched: tuple[int, ...]) -> dict[str, Any]:
    """Train until the last watched step or step `at`; return what was seen on the way."""
    data, held_out = digits(Grid.alone(), seed)
    model = MLP(WIDTHS).double()  # float64: the numbers are the same on every processor
    model.load_state_dict(initial_weights(model, seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    weight = model.get_parameter(LAYER)
    skews: dict[int, list[float]] = {}
    matrices: dict[str, Tensor] = {}
    before: list[float] = []
    after: dict[str, Any] = {}
    for step, rows, loss in train(model, optimizer, data, seed, max(at, *watched) + 1):
        assert weight.grad is not None
        gradient = weight.grad.clone()
        momentum = gradient + MOMENTUM * optimizer.state[weight].get("momentum_buffer", 0.0)
        now = {"gradient": gradient, "momentum": momentum, "weight": weight.detach().clone()}
        if step in watched:
            skews[step] = [loss, *(number for matrix in now.values() for number in skew(matrix))]
        if step == at:
            matrices, parts = now, (Split(data.images[rows], data.labels[rows]), held_out)
            before = [row[0] for row in losses_after(model, weight, 0 * momentum, parts)]
            after = {name: one_step(model, weight, now[name], parts) for name in ("gradient", "momentum")}
    return {"skew": skews, "matrices": matrices, "before": before, "after": after}


def work(world: World) -> list[dict[str, Any]]:
    """Run every seed, one after the other, in this one process."""
    return [run_seed(seed, AT, WATCHED if seed == 0 else (0,)) for seed in range(SEEDS)]


def report(runs: list[dict[str, Any]], path: str | None) -> tuple[bool, None]:
    """Print both tables, and save the first seed's matrices and losses where a path is given."""
    print("\n".join([*skew_table(runs[0]), "", *step_table(runs)]))
    if path is not None:
        save(path, runs)
    return True, None


def skew_table(run: dict[str, Any]) -> Iterator[str]:
    """Return lines: how skewed the layer's matrices are at the watched steps."""
    yield f"{LAYER} has 128 directions. How much of its squared norm the strongest five"
    yield "hold, and how many directions are effectively in use"
    yield "  step    loss       gradient        momentum          weight"
    for step, (loss, *numbers) in run["skew"].items():
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        yield f"{step:6}{loss:8.3f}" + "".join(f"{share:9.0%}{rank:7.1f}" for share, rank in pairs)


def step_table(runs: list[dict[str, Any]]) -> Iterator[str]:
    """Return lines: the lowest loss that one step reaches, along each matrix and along its polar factor."""
    yield f"One step of this layer alone, after {AT} steps of training:"
    yield f"the lowest loss that a step of any of {len(LENGTHS)} lengths reaches"
    yield "                 |    on its own batch     |   on held-out digits"
    yield "  seed  along    |  start    raw    polar  |  start    raw    polar"
    comparisons = []
    for seed, run in enumerate(runs):
        for name, after in run["after"].items():
            line = f"{seed:6}  {name} "
            for part, start in enumerate(run["before"]):
                raw, polar = (min(losses[part]) for losses in after)
                line += f"|{start:7.3f}{raw:8.3f}{polar:8.3f}  "
                comparisons.append(polar < raw)
            yield line.rstrip()
    yield f"Along the polar factor it is lower in {sum(comparisons)} of {len(comparisons)} comparisons."


def save(path: str, runs: list[dict[str, Any]]) -> None:
    """Write the first seed's matrices and losses as a .npz file, for pictures."""
    first = runs[0]
    arrays = {name: matrix.numpy() for name, matrix in first["matrices"].items()}
    arrays |= {f"after_{name}": np.array(losses) for name, losses in first["after"].items()}
    arrays |= {"lengths": np.array(LENGTHS), "before": np.array(first["before"])}
    write_file("--save", path, lambda file: np.savez(file, **arrays))
