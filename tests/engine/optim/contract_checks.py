"""The contract, on every rank of 2 x 2: clipping, scalers, DDP, and ranks that do not hold the same thing."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import check
from optimizer_cases import synthetic
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distmuon.launch import World
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.grid import Grid
from distmuon.sharding.tensor_parallel import mark, mark_replicated

ROWS = 12  # of a batch, over all DP ranks
LAST = 3  # the rank that is not like the others


def model(seed: str = "start", dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a small MLP, whole on every TP rank, in float64 so that grids agree closely."""
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    for name, p in net.named_parameters():
        p.data.copy_(synthetic(f"{seed} {name}", p.shape, dtype))
    mark_replicated(net)
    return net


def groups(net: nn.Module) -> list[dict[str, Any]]:
    named = list(net.named_parameters())
    return [
        {"params": [pair for pair in named if pair[1].ndim == 2], "algorithm": "muon"},
        {"params": [pair for pair in named if pair[1].ndim == 1], "algorithm": "adamw"},
    ]


def made(grid: Grid, **options: Any) -> tuple[nn.Sequential, DistributedMuon]:
    net = model()
    return net, DistributedMuon(groups(net), grid, **{"lr": 0.05} | options)


def loss_of(net: Callable[[Tensor], Tensor], grid: Grid, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the mean loss over this DP rank's share of the batch."""
    each = ROWS // grid.dp.size
    rows = slice(grid.dp.rank * each, (grid.dp.rank + 1) * each)
    x, y = (synthetic(f"{what} {step}", (ROWS, n), dtype)[rows] for what, n in (("x", 5), ("y", 3)))
    return (net(x) - y).square().mean()


def values(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def words(attempt: Callable[[], Any]) -> str:
    """Return "kind: message" of what the attempt raises, or "nothing"."""
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def said_alike(attempt: Callable[[], Any]) -> str:
    """Return what the attempt raises, which all ranks must say in the same words, one sentence long."""
    said, by_all = words(attempt), [""] * dist.get_world_size()
    dist.all_gather_object(by_all, said)
    assert set(by_all) == {said}, by_all
    assert said.endswith("."), said
    assert "\n" not in said
    return said


# ---- Clipping, scalers, DDP -------------------------------------------------------------------------------


@check
def clip_grad_norm_is_max_norm_and_returns_what_one_process_sees(world: World) -> None:
    grid, ends, norms = Grid.of(world), [], []
    for how in ("max_norm", "method", "a method that allows more beside max_norm"):
        net, optimizer = made(grid, max_norm=None if how == "method" else 0.1)
        for step in range(3):
            loss_of(net, grid, step).backward()
            if how == "method":
                norms.append(float(optimizer.clip_grad_norm_(0.1)))
            elif how != "max_norm":
                optimizer.clip_grad_norm_(1e6)
            optimizer.step()
        ends.append(values(net))
    assert same(ends[0], ends[1])
    assert same(ends[0], ends[2])
    alone = Grid.alone()
    net, optimizer = made(alone)
    for step in range(3):
        loss_of(net, alone, step).backward()
        norm = float(nn.utils.clip_grad_norm_(net.parameters(), 0.1))
        assert norms[step] == pytest.approx(norm, rel=1e-6)  # the method returns float32
        assert norm > 0.1  # or nothing would be clipped
        optimizer.step()


@check
def clipping_twice_or_adding_after_it_is_refused_and_zero_grad_begins_anew(world: World) -> None:
    grid = Grid.of(world)
    net, optimizer = made(grid)
    before = values(net)
    loss_of(net, grid, 0).backward()
    optimizer.clip_grad_norm_(1.0)
    twice = words(lambda: optimizer.clip_grad_norm_(1.0))
    assert twice.startswith("RuntimeError: the gradients of this step are clipped already"), twice
    loss_of(net, grid, 1).backward()
    added = words(optimizer.step)
    assert added.startswith("RuntimeError: gradients were changed after clip_grad_norm_"), added
    assert same(values(net), before)
    loss_of(net, grid, 0).backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.statistics.present == frozenset()


@check
def gradients_made_anew_after_clipping_are_noticed_every_time(world: World) -> None:
    grid = Grid.of(world)
    for _ in range(20):
        net, optimizer = made(grid)
        loss_of(net, grid, 0).backward()
        optimizer.clip_grad_norm_(1.0)
        net.zero_grad()
        loss_of(net, grid, 1).backward()
        said = words(optimizer.step)
        assert said.startswith("RuntimeError: gradients were changed after clip_grad_norm_ had reduced them;"), said


@check
def torchs_clipping_of_local_gradients_is_warned_about_once(world: World) -> None:
    grid = Grid.of(world)
    net, optimizer = made(grid)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(2):
            loss_of(net, grid, step).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    (once,) = seen
    assert "did not see the global norm: call the optimizer's clip_grad_norm_" in str(once.message)


@check
def a_gradient_whose_square_no_float32_holds_is_refused(world: World) -> None:
    for value in (3e38, 2e19, 1e18):
        net = model(dtype=torch.float32)
        optimizer, before = DistributedMuon(groups(net), Grid.of(world)), values(net)
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
            p.grad.view(-1)[0] = value
        said = words(optimizer.step)
        wanted = "NonFiniteGradient: the gradient of 0.weight, 2.weight, 0.bias" if value > 1e18 else "nothing"
        assert said.startswith(wanted), (value, said)
        assert same(values(net), before) == (value > 1e18)
        assert all(p.isfinite().all() for p in net.parameters())


@check
def an_infinity_on_one_rank_lets_all_scalers_skip_that_step(world: World) -> None:
    """Whether or not gradients are clipped, after `unscale_`, as torch's recipe has it."""
    grid = Grid.of(world)
    for clips in (False, True):
        ends: list[list[Tensor]] = []
        norms: list[list[float]] = []
        for scaled in (True, False):
            net, optimizer = made(grid)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
            norms.append([])
            for step in range(4) if scaled else (0, 2, 3):
                wrong = step == 1 and world.rank == LAST
                scaler.scale(loss_of(net, grid, step) * (torch.inf if wrong else 1.0)).backward()
                if clips:
                    scaler.unscale_(optimizer)
                    norms[-1].append(float(optimizer.clip_grad_norm_(0.1)))
                scaler.step(optimizer)
                scaler.update()
            ends.append(values(net))
            assert optimizer.skipped_steps == int(scaled)
            if scaled and not clips:  # only the rank that saw it lowers its own
                assert scaler.get_scale() == (4.0 if world.rank == LAST else 8.0)
        assert same(*ends)  # scales are powers of two
        assert not clips or not math.isfinite(norms[0].pop(1))
        assert norms[0] == norms[1]


@check
def gradients_that_were_clipped_before_they_were_unscaled_are_refused(world: World) -> None:
    grid = Grid.of(world)
    net, optimizer = made(grid)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(net, grid, 0)).backward()
    optimizer.clip_grad_norm_(0.1)
    said = words(lambda: scaler.step(optimizer))
    assert "gradients were clipped before they were unscaled; call scaler.unscale_" in said, said
    for p in net.parameters():
        p.grad = torch.full_like(p, torch.nan)
    assert words(optimizer.step).startswith("NonFiniteGradient: ")  # no scaler drives this one


@check
def ddp_may_stay_around_the_model(world: World) -> None:
    grid, ends = Grid.of(world), []
    for view in (None, False, True):
        net = model()
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
        ends.append(values(net))
    for one in ends[1:]:
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(one, ends[0], strict=True))


@check
def a_model_whose_storage_was_moved_to_shared_memory_trains_on_to_the_bit(world: World) -> None:
    """Once on all ranks, and once on rank 0 alone, whether or not replicas are compared."""
    grid = Grid.of(world)
    for check_every in (0, 1):
        ends = []
        for moves in (False, True):
            net = model(dtype=torch.bfloat16)
            optimizer = DistributedMuon(groups(net), grid, lr=0.05, check_every=check_every)
            for step in range(5):
                optimizer.zero_grad()
                loss_of(net, grid, step, torch.bfloat16).backward()
                if moves and step == 1:
                    net[0].share_memory()  # its gradients, too
                if moves and step == 3 and world.rank == 0:
                    net.share_memory()
                optimizer.step()
            ends.append(values(net))
        assert same(*ends), check_every


# ---- Ranks that are not alike -----------------------------------------------------------------------------


@check
def what_one_rank_refuses_all_refuse_with_the_same_words(world: World) -> None:
    grid, last = Grid.of(world), world.rank == LAST
    said = said_alike(lambda: made(grid, max_norm=-1.0 if last else 1.0))
    assert "max_norm is -1.0; give 0 or more, or None to leave gradients as they are on rank 3" in said, said
    said = said_alike(lambda: made(grid, strategy="gossip" if last else "gather_all"))
    assert "or the path of a .py file with your own on rank 3, and fine on rank 0" in said, said
    net, optimizer = made(grid)
    before = values(net)
    loss_of(net, grid, 0).backward()
    if last:
        net.float()
    said = said_alike(optimizer.step)
    assert "parameter '0.weight' is now [7, 5] float32" in said, said
    net.double()
    assert all(torch.allclose(a, b) for a, b in zip(values(net), before, strict=True))


def reversed_(theirs: list[dict[str, Any]]) -> None:
    theirs[0]["params"].reverse()


def one_more(theirs: list[dict[str, Any]]) -> None:
    theirs[1]["params"].append(("more", mark(nn.Parameter(torch.ones(2).double()), None)))


def another_shape(theirs: list[dict[str, Any]]) -> None:
    name, _ = theirs[0]["params"][0]
    theirs[0]["params"][0] = (name, mark(nn.Parameter(torch.ones(7, 6).double()), None))


def frozen(theirs: list[dict[str, Any]]) -> None:
    theirs[1]["params"][0][1].requires_grad_(False)


def three_dimensions(theirs: list[dict[str, Any]]) -> None:
    theirs[0]["params"].append(("odd", mark(nn.Parameter(torch.ones(2, 2, 2).double()), None)))


DIFFERENCES: list[tuple[Any, str]] = [  # what the last rank alone does to its groups, or its options -> what all say
    ("another", r"the values of '0\.weight' .*and of 3 more differ: rank 3 .* or pass broadcast=True"),
    (reversed_, r"the parameters of rank 3 differ .* has '2\.weight' in the place of '0\.weight'"),
    (one_more, "the parameters of rank 3 differ .* rank 3 has 'more', which rank 0 has not"),
    (another_shape, r"'0\.weight' is \[7, 6\] float64.* on rank 3, and \[7, 5\] float64"),
    (frozen, r"'0\.bias' is \[7\].*, in group 1, frozen on rank 3, and .*trained on rank 0"),
    ({"lr": 0.5}, r"'lr of group 0' is 0\.5 on rank 3, and 0\.001 on rank 0"),
    ({"bucket_size": 11}, "'bucket_size' is 11 on rank 3, and [0-9]+ on rank 0"),
    ({"gather_dtype": torch.float32}, r"'gather_dtype' is torch\.float32 on rank 3, and None on rank 0"),
    (three_dimensions, "'the optimizer' is ValueError: parameter 'odd' .*AdamW.* on rank 3, and fine on rank 0"),
]


@check
def ranks_that_differ_at_the_start_all_say_the_same(world: World) -> None:
    grid, last = Grid.of(world), world.rank == LAST
    DistributedMuon(groups(model()), grid)  # those that are alike start
    for difference, wanted in DIFFERENCES:
        theirs = groups(model("another" if last and difference == "another" else "start"))
        if last and callable(difference):
            difference(theirs)
        options = difference if last and isinstance(difference, dict) else {}
        said = said_alike(lambda theirs=theirs, options=options: DistributedMuon(theirs, grid, **options))  # type: ignore[misc]
        assert re.match(f"RankMismatchError: .*{wanted}", said), said


@check
def an_option_that_changes_on_one_rank_stops_all_before_anything_has_changed(world: World) -> None:
    grid = Grid.of(world)
    net, optimizer = made(grid)
    before = values(net)
    if world.rank == LAST:
        optimizer.param_groups[1]["lr"] = 0.5
    loss_of(net, grid, 0).backward()
    said = said_alike(optimizer.step)
    assert "'lr of group 1' is 0.5 on rank" in said, said
    assert same(values(net), before)
    assert all(p.grad is None for p in net.parameters())
    optimizer.param_groups[1]["lr"] = 0.5
    loss_of(net, grid, 0).backward()
    optimizer.step()
    loss_of(net, grid, 0).backward()
    said = said_alike(lambda: optimizer.clip_grad_norm_(1.0 if world.rank else 2.0))
    assert "'max_norm' is 1.0 on rank 1, and 2.0 on rank 0" in said, said


@check
def weights_that_only_one_rank_has_loaded_are_found_in_the_next_step(world: World) -> None:
    grid = Grid.of(world)
    for ranks in (range(world.size), [LAST]):
        net, optimizer = made(grid)
        if world.rank in ranks:
            net.load_state_dict(model("another").state_dict())
        loss_of(net, grid, 0).backward()
        if len(ranks) > 1:
            optimizer.step()
        else:
            assert "change parameters alike on every rank" in said_alike(optimizer.step)


@check
def a_state_that_only_one_rank_has_loaded_is_found_in_the_next_step(world: World) -> None:
    grid = Grid.of(world)
    net, optimizer = made(grid)
    saved = optimizer.state_dict()
    for step in range(2):
        loss_of(net, grid, step).backward()
        optimizer.step()
    if world.rank == LAST:
        optimizer.load_state_dict(saved)
    loss_of(net, grid, 2).backward()
    said = said_alike(optimizer.step)
    assert "'step' is 0 on rank 3, and 2 on rank 0; set, load and keep them alike" in said, said


@check
def broadcast_begins_with_rank_0s_values_everywhere(world: World) -> None:
    net = model(f"start of {world.rank}")
    DistributedMuon(groups(net), Grid.of(world), broadcast=True)
    assert same(values(net), values(model("start of 0")))


@check
def replicas_that_drift_are_found_by_the_next_check(world: World) -> None:
    grid = Grid.of(world)
    net, optimizer = made(grid, check_every=2)
    for step in range(3):
        if step == 2 and world.rank == LAST:
            net.get_parameter("2.weight").data[1, 1] += 1e-9
        loss_of(net, grid, step).backward()
        said = words(optimizer.step)
        if step < 2:
            assert said == "nothing"
    assert said.startswith("RankMismatchError: the values of '2.weight'"), said
    assert said.endswith("change parameters alike on every rank, or go back to a checkpoint."), said
