"""Save on one grid, load on another: what every rank finds there, and in the steps that follow."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import mesh_cases as meshes
import pytest
import torch
from optimizer_cases import Case, Weight, build, cut, several, synthetic, whole_shape
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from distmuon.extras.checkpoint import files, runs, save_and_load, storage
from distmuon.launch import World
from distmuon.optim.muonw import MuonW
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.sharding.grid import Grid
from distmuon.sharding.local_views import local
from muon_conformance.placements import held

BEFORE, AFTER = 2, 2  # steps
NOTES = {"tokens": 12345, "schedule": [0.1, 0.2]}


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Let nothing be written before the end of this block, so that what training does meanwhile would be seen."""
    may_write, write = threading.Event(), storage.ManifestWriter.write_data

    def wait_and_write(self: Any, *arguments: Any) -> Any:
        assert may_write.wait(600)
        return write(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.ManifestWriter, "write_data", wait_and_write)
        try:
            yield
        finally:
            may_write.set()


def visit(world: World, acts: Sequence[Callable[[World], Any]]) -> list[Any]:
    """Do several things in one world, in this order; return what came of each."""
    return [act(world) for act in acts]


# ---- ZeRO-1 over DP x TP ----------------------------------------------------------------------------------


def gradient_of(w: Weight, tp: int, step: int) -> Tensor:
    """Return a whole gradient of eight bits, so that the mean of any number of copies is exact."""
    return synthetic(f"{w.name} {step}", whole_shape(w, tp), torch.bfloat16).float()


def go(case: Case, grid: Grid, model: nn.ParameterDict, optimizer: ShardedOptimizer, steps: range) -> None:
    for step in steps:
        for w in case.weights:
            if w.name == "plain" and step < BEFORE:
                continue  # which has no state when the checkpoint is taken
            whole = gradient_of(w, grid.tp.size, step).to(model[w.name].dtype)
            model[w.name].grad = cut(whole, w.dim, grid.tp.size, grid.tp.rank, w.rows)
        optimizer.step()


def begin(world: World, narrow: bool, strategy: str) -> tuple[Case, Grid, nn.ParameterDict, ShardedOptimizer]:
    grid = Grid.of(world)
    case = several(grid.tp.size, rows=True).of_dtype(torch.bfloat16 if narrow else torch.float32)
    parameters, optimizer = build(case, grid, strategy=strategy)
    return case, grid, nn.ParameterDict(parameters), optimizer


def save_zero1(
    world: World, folder: str, narrow: bool = False, strategy: str = "gather_all", background: bool = False
) -> dict[str, Tensor]:
    """Save after some steps; go on, and return whole parameters as rank 0 of a grid without TP has them."""
    case, grid, model, optimizer = begin(world, narrow, strategy)
    go(case, grid, model, optimizer, range(BEFORE))
    optimizer.param_groups[0]["lr"] = 0.03
    if background:
        with held_back():
            saving = save_and_load.async_save(folder, model, optimizer, NOTES)
            go(case, grid, model, optimizer, range(BEFORE, BEFORE + AFTER))
        saving.result()
    else:
        save_and_load.save(folder, model, optimizer, NOTES)
        go(case, grid, model, optimizer, range(BEFORE, BEFORE + AFTER))
    return {name: p.detach().clone() for name, p in model.items()}


def load_zero1(
    world: World, folder: str, expected: dict[str, Tensor], narrow: bool = False, strategy: str = "gather_all"
) -> dict[str, Any]:
    """Load into another training; go on; return where this rank's parameters are not those expected, whole."""
    case, grid, model, optimizer = begin(world, narrow, strategy)
    go(case, grid, model, optimizer, range(7, 8))  # so that there is something to lose
    notes = save_and_load.load(folder, model, optimizer)
    steps = optimizer.steps
    go(case, grid, model, optimizer, range(BEFORE, BEFORE + AFTER))
    differ = [
        w.name
        for w in case.weights
        if not torch.equal(model[w.name], cut(expected[w.name], w.dim, grid.tp.size, grid.tp.rank, w.rows))
    ]
    return {"differ": differ, "notes": notes, "lr": optimizer.param_groups[0]["lr"], "steps": steps}


# ---- MuonW on meshes --------------------------------------------------------------------------------------


def training(world: World, wrap: str) -> tuple[Any, MuonW]:
    net = meshes.Net()
    meshes.start(net)
    model = {"plain": meshes.plain, **meshes.WRAPS}[wrap](world, net)
    return model, MuonW(meshes.groups_of(model), batched=False)


def go_on_mesh(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        meshes.give(model, step, absent=("odd.weight",) if step < BEFORE else ())
        optimizer.step()


def save_muonw(world: World, wrap: str, folder: str) -> None:
    model, optimizer = training(world, wrap)
    go_on_mesh(model, optimizer, range(BEFORE))
    save_and_load.save(folder, model, optimizer, NOTES)


def never_stopped(world: World, steps: int = BEFORE + AFTER) -> dict[str, Tensor]:
    model, optimizer = training(world, "plain")
    go_on_mesh(model, optimizer, range(steps))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def load_muonw(world: World, wrap: str, folder: str, expected: dict[str, Tensor]) -> dict[str, Any]:
    """Go on from a checkpoint; return what differs in the end, and the notes."""
    model, optimizer = training(world, wrap)
    go_on_mesh(model, optimizer, range(7, 8))
    notes = save_and_load.load(folder, model, optimizer)
    go_on_mesh(model, optimizer, range(BEFORE, BEFORE + AFTER))
    whole = {name: held(expected[name], p) for name, p in model.named_parameters()}
    differ = [name for name, p in model.named_parameters() if not torch.equal(local(p), whole[name])]
    return {"differ": differ, "notes": notes}


# ---- Trouble ----------------------------------------------------------------------------------------------


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    optimizer = MuonW(model)
    for _ in range(2):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_and_die(world: World, folder: str) -> None:
    """Be killed in the middle of saving."""

    def die(*_: Any, **__: Any) -> Any:
        os._exit(9)

    setattr(storage.ManifestWriter, "finish", die)  # noqa: B010 mypy refuses an assignment
    save_and_load.save(folder, *small())


def save_over(world: World, folder: str) -> list[str]:
    """Let the folder appear while it is being written; say what the future raises, and what was warned of."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with held_back():
            saving = save_and_load.async_save(folder, *small())
            Path(folder, "of another").mkdir(parents=True, exist_ok=True)
        error = saving.exception()
        assert isinstance(error, files.CheckpointError)
        return [str(error), *(str(one.message) for one in warned if one.category is RuntimeWarning)]


def damaged_for_one(world: World, folder: str) -> str:
    """Let only rank 1 see damage; return what every rank says."""
    model, optimizer = training(world, "fsdp")
    before = [local(p).clone() for p in model.parameters()]
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(storage, "sha256", lambda file: "0")
        with pytest.raises(files.CheckpointError) as error:
            save_and_load.load(folder, model, optimizer)
    assert all(torch.equal(a, local(p)) for a, p in zip(before, model.parameters(), strict=True))
    return str(error.value)


def hashed(world: World, folder: str) -> list[str]:
    """Save; return of which files this rank has taken the sha256."""
    seen: list[str] = []
    take = storage.sha256

    def noting(file: Path) -> str:
        seen.append(file.name)
        return take(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "sha256", noting)
        save_and_load.save(folder, *training(world, "fsdp"))
    return seen


def newest(world: World, run: str) -> tuple[int, int]:
    """Load the newest checkpoint of a run, of which each rank but the first is shown none; return its step, and how
    many steps AdamW has made in it."""
    model, optimizer = small()
    shown = runs.saved_steps if world.rank == 0 else lambda folder: []  # a file system that lags
    with mock.patch.object(runs, "saved_steps", shown):
        step = runs.load_newest(run, model, optimizer).step
    return step, next(int(state["step"]) for state in optimizer.state.values() if "step" in state)


def make_and_save_after_an_evaluation(world: World, folder: str) -> tuple[bool, bool]:
    """Wrap a model, evaluate it, and only then make an optimizer, train and save, evaluating before each; return
    whether every parameter has moved, and whether the model saved is the model trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    fully_shard(model[0])
    fully_shard(model)
    x = torch.ones(2, 4)

    def evaluate() -> Tensor:
        with torch.no_grad():
            return model(x)

    evaluate()
    optimizer = MuonW(model)
    before = [whole(p) for p in model.parameters()]
    for _ in range(2):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = all(not torch.equal(a, whole(p)) for a, p in zip(before, model.parameters(), strict=True))
    after = evaluate()
    save_and_load.save(folder, model, optimizer)
    with torch.no_grad():
        for p in optimizer.param_groups[0]["params"]:
            p.zero_()
    evaluate()
    save_and_load.load(folder, model, optimizer)
    return moved, torch.equal(evaluate(), after)


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of the whole of a tensor. Collective."""
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()
