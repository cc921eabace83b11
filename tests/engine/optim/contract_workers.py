"""What every rank of a world finds out about the contract: gradients, clipping, agreement, scalers, DDP."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from optimizer_cases import synthetic
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distmuon.launch import World
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.grid import Grid
from distmuon.sharding.tensor_parallel import mark

ROWS = 12  # of a batch, over all DP ranks


def model(grid: Grid, seed: str = "start", dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a small MLP, whole on every TP rank, in float64 so that grids agree closely."""
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    for name, p in net.named_parameters():
        p.data.copy_(synthetic(f"{seed} {name}", p.shape, dtype))
        mark(p, None)
    return net


def groups(net: nn.Module) -> list[dict[str, Any]]:
    named = list(net.named_parameters())
    return [
        {"params": [pair for pair in named if pair[1].ndim == 2], "algorithm": "muon"},
        {"params": [pair for pair in named if pair[1].ndim == 1], "algorithm": "adamw"},
    ]


def _groups_of(net: nn.Module, kind: type[DistributedMuon] | type[Zero1AdamW]) -> Any:
    return groups(net) if kind is DistributedMuon else list(net.named_parameters())


def loss_of(net: Callable[[Tensor], Tensor], grid: Grid, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the mean loss over this DP rank's share of the batch."""
    each = ROWS // grid.dp.size
    rows = slice(grid.dp.rank * each, (grid.dp.rank + 1) * each)
    x, y = (synthetic(f"{what} {step}", (ROWS, n), dtype)[rows] for what, n in (("x", 5), ("y", 3)))
    return (net(x) - y).square().mean()


def whole_loss(net: Callable[[Tensor], Tensor], step: int) -> Tensor:
    return loss_of(net, Grid.alone(), step)


def values(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def words(attempt: Callable[[], Any]) -> str:
    """Return "kind: message" of what the attempt raises, or "nothing"."""
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def contract_facts(world: World) -> dict[str, Any]:
    grid = Grid.of(world)
    return {
        "dropped": dropped(grid),
        "clipped": {how: clipped(grid, how) for how in ("max_norm", "method")},
        "clipping out of order": out_of_order(grid),
        "local clipping": local_clipping(grid),
        "huge": {value: huge(grid, value) for value in (3e38, 2e19, 1e18)},
        "scaler": scaled(grid),
        "scaled clipping": scaled_clipping(grid),
        "dropped after clipping": dropped_after_clipping(grid),
        "refused on one": refused_on_one(grid, world),
        "ddp": within_ddp(grid),
        "moved": moved(grid),
        "shared memory": {every: shared_memory(grid, every) for every in (0, 1)},
        "start": disagreements_at_start(grid, world),
        "later": disagreements_later(grid, world),
        "written": written_on_one(grid, world),
        "loaded": loaded_on_one(grid, world),
        "broadcast": begin_with_rank_0(grid, world),
        "drift": drift(grid, world),
    }


def dropped(grid: Grid) -> dict[str, Any]:
    """Train with a batch whose gradients every rank drops before the next one, in every way that there is."""
    found = {}

    def set_to_none(net: nn.Module) -> None:
        for p in net.parameters():
            p.grad = None

    ways: dict[str, Callable[[nn.Module, Any], None]] = {
        "none": lambda net, optimizer: None,
        "model.zero_grad": lambda net, optimizer: net.zero_grad(),
        "optimizer.zero_grad": lambda net, optimizer: optimizer.zero_grad(),
        "set to zero": lambda net, optimizer: optimizer.zero_grad(set_to_none=False),
        "p.grad = None": lambda net, optimizer: set_to_none(net),
    }
    for way, drop in ways.items():
        net = model(grid)
        optimizer = DistributedMuon(groups(net), grid, lr=0.05)
        for step in range(3):
            if way != "none":
                loss_of(net, grid, 99).backward()
                drop(net, optimizer)
            loss_of(net, grid, step).backward()
            optimizer.step()
        found[way] = values(net)
    return found


def clipped(grid: Grid, how: str) -> dict[str, Any]:
    net = model(grid)
    optimizer = DistributedMuon(groups(net), grid, lr=0.05, max_norm=0.1 if how == "max_norm" else None)
    norms = []
    for step in range(3):
        loss_of(net, grid, step).backward()
        if how == "method":
            norms.append(float(optimizer.clip_grad_norm_(0.1)))
        optimizer.step()
    return {"values": values(net), "norms": norms}


def clipped_alone() -> list[float]:
    """Return the norms that torch's own clipping sees in one process."""
    net = model(Grid.alone())
    optimizer = DistributedMuon(groups(net), Grid.alone(), lr=0.05)
    norms = []
    for step in range(3):
        whole_loss(net, step).backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.1)))
        optimizer.step()
    return norms


def out_of_order(grid: Grid) -> dict[str, Any]:
    net = model(grid)
    optimizer, before = DistributedMuon(groups(net), grid), values(net)
    loss_of(net, grid, 0).backward()
    optimizer.clip_grad_norm_(1.0)
    twice = words(lambda: optimizer.clip_grad_norm_(1.0))
    loss_of(net, grid, 1).backward()
    added = words(optimizer.step)
    untouched = all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    loss_of(net, grid, 0).backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.zero_grad()
    optimizer.step()
    return {"twice": twice, "added": added, "untouched": untouched, "present": optimizer.statistics.present}


def local_clipping(grid: Grid) -> list[str]:
    net = model(grid)
    optimizer = DistributedMuon(groups(net), grid)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(2):
            loss_of(net, grid, step).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    return [str(warning.message) for warning in seen]


def huge(grid: Grid, value: float) -> str:
    """Return what a float32 gradient with one number of this size, on every rank, leads to."""
    net = model(grid, dtype=torch.float32)
    optimizer, before = DistributedMuon(groups(net), grid), values(net)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
        p.grad.view(-1)[0] = value
    said = words(optimizer.step)
    kept = all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    return f"{said} ({'kept' if kept else 'moved'}, {all(p.isfinite().all() for p in net.parameters())})"


def scaled(grid: Grid) -> dict[str, Any]:
    """Train under a GradScaler; in step 1 the last rank's loss is infinite. Then the same without that step."""
    found: dict[str, Any] = {}
    for way in ("scaled", "unscaled first", "plain"):
        net = model(grid)
        optimizer = DistributedMuon(groups(net), grid, lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=way != "plain")
        for step in range(4):
            if way == "plain" and step == 1:
                continue
            last = grid.world.rank == grid.world.size - 1
            loss = loss_of(net, grid, step) * (torch.inf if step == 1 and last else 1.0)
            scaler.scale(loss).backward()
            if way == "unscaled first":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        found[way] = {"values": values(net), "skipped": optimizer.skipped_steps, "scale": scaler.get_scale()}
    return found


def scaled_clipping(grid: Grid) -> dict[str, Any]:
    """Follow torch's recipe for clipping under a GradScaler, with an infinity in step 1; and leave `unscale_` out."""
    ends: dict[str, Any] = {}
    for way in ("scaled", "plain"):
        net = model(grid)
        optimizer = DistributedMuon(groups(net), grid, lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=way == "scaled")
        norms = []
        for step in range(4):
            if way == "plain" and step == 1:
                continue
            last = grid.world.rank == grid.world.size - 1
            scaler.scale(loss_of(net, grid, step) * (torch.inf if step == 1 and last else 1.0)).backward()
            scaler.unscale_(optimizer)
            norms.append(float(optimizer.clip_grad_norm_(0.1)))
            scaler.step(optimizer)
            scaler.update()
        ends[way] = {"values": values(net), "skipped": optimizer.skipped_steps, "norms": norms}
    net = model(grid)
    optimizer, scaler = DistributedMuon(groups(net), grid), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(net, grid, 0)).backward()
    optimizer.clip_grad_norm_(0.1)
    ends["not unscaled"] = words(lambda: scaler.step(optimizer))
    for p in net.parameters():
        p.grad = torch.full_like(p, torch.nan)
    ends["afterwards"] = words(optimizer.step)  # no scaler drives this one
    return ends


def dropped_after_clipping(grid: Grid) -> set[str]:
    """Return what is said, in many tries, where gradients are dropped and made anew after clipping."""
    said = set()
    for _ in range(20):
        net = model(grid)
        optimizer = DistributedMuon(groups(net), grid)
        loss_of(net, grid, 0).backward()
        optimizer.clip_grad_norm_(1.0)
        net.zero_grad()
        loss_of(net, grid, 1).backward()
        said.add(words(optimizer.step).split(";")[0])
    return said


def refused_on_one(grid: Grid, world: World) -> dict[str, str]:
    """Return what is said where the last rank alone has something to refuse."""
    last, found = world.rank == world.size - 1, {}
    net = model(grid)
    found["max_norm"] = words(lambda: DistributedMuon(groups(net), grid, max_norm=-1.0 if last else 1.0))
    found["strategy"] = words(lambda: DistributedMuon(groups(net), grid, strategy="gossip" if last else "gather_all"))
    optimizer, before = DistributedMuon(groups(net), grid), values(net)
    loss_of(net, grid, 0).backward()
    if last:
        net.float()
    found["moved"] = words(optimizer.step)
    if last:
        net.double()
    found["kept"] = str(all(torch.allclose(p, before[name]) for name, p in net.named_parameters()))
    checked = DistributedMuon(groups(net), grid, check_every=2, broadcast=True)
    saved = checked.state_dict()
    loss_of(net, grid, 0).backward()
    checked.step()
    if last:
        checked.load_state_dict(saved)
    loss_of(net, grid, 1).backward()
    found["older state"] = words(checked.step)
    return found


def within_ddp(grid: Grid) -> dict[str, Any]:
    """Train with and without DistributedDataParallel around the model."""
    found: dict[str, Any] = {}
    for way, view in (("without", None), ("with", False), ("with views", True)):
        net = model(grid)
        optimizer = Zero1AdamW(net.named_parameters(), grid, lr=0.05)
        group = grid.dp.process_group
        runs: Any = (
            net if view is None else DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=view)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(3):
                loss_of(runs, grid, step).backward()
                optimizer.step()
        found[way] = values(net)
    return found


def moved(grid: Grid) -> float:
    """Return how far a model that is taken to float32 and back before every step ends from one that is not."""
    ends = []
    for moves in (False, True):
        net = model(grid)
        optimizer = DistributedMuon(groups(net), grid, lr=0.05)
        for step in range(3):
            if moves:
                net.float().double()  # new storages, twice; and rounded
            loss_of(net, grid, step).backward()
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    start = torch.cat([p.detach().flatten() for p in model(grid).parameters()])
    return float((ends[1] - ends[0]).norm() / (ends[0] - start).norm())


def shared_memory(grid: Grid, check_every: int) -> dict[str, bool]:
    """Return whether a model whose storage, and gradients' storage, is moved in mid-training trains on to the bit."""
    found = {}
    for kind in (DistributedMuon, Zero1AdamW):
        for dtype in (torch.float32, torch.bfloat16):
            ends = []
            for moves in (False, True):
                net = model(grid, dtype=dtype)
                optimizer = kind(_groups_of(net, kind), grid, lr=0.05, check_every=check_every)
                for step in range(5):
                    optimizer.zero_grad()
                    loss_of(net, grid, step, dtype).backward()
                    if moves and step == 1:
                        net[0].share_memory()  # its gradients, too
                    if moves and step == 3 and grid.world.rank == 0:
                        net.share_memory()
                    optimizer.step()
                ends.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
            start = torch.cat([p.detach().flatten() for p in model(grid, dtype=dtype).parameters()])
            found[f"{kind.__name__} {dtype}"] = torch.equal(*ends) and not torch.equal(ends[0], start)
    return found


def disagreements_at_start(grid: Grid, world: World) -> dict[str, str]:
    """Return what is said, on this rank, when the last rank makes an optimizer that differs in one thing."""
    last = world.rank == world.size - 1

    def make(seed: str = "start", what: str = "", **options: Any) -> str:
        net = model(grid, seed)
        if what == "wide":
            net[0] = nn.Linear(6, 7).double()
            for p in net.parameters():
                mark(p, None)
        theirs = groups(net)
        if what == "reversed":
            theirs[0]["params"].reverse()
        if what == "another group":
            theirs.append({"params": [theirs[0]["params"].pop()], "algorithm": "muon"})
        else:
            theirs.append({"params": [("last", mark(nn.Parameter(torch.ones(2, 2).double()), None))]})
        if what == "frozen":
            net.get_parameter("0.bias").requires_grad_(False)
        if what == "one more":
            theirs[1]["params"].append(("more", mark(nn.Parameter(torch.ones(2).double()), None)))
        if what == "three dimensions":
            theirs[0]["params"].append(("odd", mark(nn.Parameter(torch.ones(2, 2, 2).double()), None)))
        return words(lambda: DistributedMuon(theirs, grid, **options))

    differences: dict[str, dict[str, Any]] = {
        "nothing": {},
        "values": {"seed": "another"},
        "order": {"what": "reversed"},
        "one more": {"what": "one more"},
        "shape": {"what": "wide"},
        "learning rate": {"lr": 0.5},
        "bucket size": {"bucket_size": 11},
        "matrices": {"matrices": ("rows", 1)},
        "group": {"what": "another group"},
        "frozen": {"what": "frozen"},
        "max_norm": {"max_norm": 3.0},
        "strategy's choices": {"gather_dtype": torch.float32},
        "a refusal": {"what": "three dimensions"},
    }
    return {what: make(**(options if last else {})) for what, options in differences.items()}


def disagreements_later(grid: Grid, world: World) -> dict[str, Any]:
    """Return what is said when the last rank alone changes an option during training, and what is said afterwards."""
    net = model(grid)
    optimizer, before = DistributedMuon(groups(net), grid), values(net)
    if world.rank == world.size - 1:
        optimizer.param_groups[1]["lr"] = 0.5
    loss_of(net, grid, 0).backward()
    said = words(optimizer.step)
    untouched = all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    dropped = all(p.grad is None for p in net.parameters())
    optimizer.param_groups[1]["lr"] = 0.5
    loss_of(net, grid, 0).backward()
    again = words(optimizer.step)
    optimizer.zero_grad()
    loss_of(net, grid, 0).backward()
    clip = words(lambda: optimizer.clip_grad_norm_(1.0 if world.rank else 2.0))
    return {"said": said, "untouched": untouched and dropped, "again": again, "clip": clip}


def written_on_one(grid: Grid, world: World) -> dict[str, str]:
    """Return what the next step says after the last rank alone, or all ranks, have loaded other weights."""
    found = {}
    for who, ranks in (("all", range(world.size)), ("one", [world.size - 1])):
        net = model(grid)
        optimizer = DistributedMuon(groups(net), grid)
        if world.rank in ranks:
            net.load_state_dict(model(grid, "another").state_dict())
        loss_of(net, grid, 0).backward()
        found[who] = words(optimizer.step)
    return found


def loaded_on_one(grid: Grid, world: World) -> str:
    """Return what the next step says after the last rank alone has loaded an older state of the optimizer."""
    net = model(grid)
    optimizer = DistributedMuon(groups(net), grid)
    saved = optimizer.state_dict()
    for step in range(2):
        loss_of(net, grid, step).backward()
        optimizer.step()
    if world.rank == world.size - 1:
        optimizer.load_state_dict(saved)
    loss_of(net, grid, 2).backward()
    return words(optimizer.step)


def begin_with_rank_0(grid: Grid, world: World) -> dict[str, Tensor]:
    net = model(grid, f"start of {world.rank}")
    DistributedMuon(groups(net), grid, broadcast=True)
    return values(net)


def drift(grid: Grid, world: World) -> list[str]:
    """Let the last rank's copy of one parameter drift before the third step; return what each of four steps says."""
    net = model(grid)
    optimizer = DistributedMuon(groups(net), grid, check_every=2)
    said = []
    for step in range(4):
        if step == 2 and world.rank == world.size - 1:
            net.get_parameter("2.weight").data[1, 1] += 1e-9
        loss_of(net, grid, step).backward()
        said.append(words(optimizer.step))
        optimizer.zero_grad()  # the check stands before the gradients are touched, so they are there still
    return said
