"""Blockwise and periodic: other optimizers than Muon, equal to the bit to one process that does what they do."""

import math
import re
from collections.abc import Callable
from typing import Any

import blocks_workers as work
import optimizer_cases as cases
import pytest
import torch
from helpers_math import distance, message
from once import once
from optimizer_cases import SMALL, Case, Outcome
from torch import Tensor, nn

from distmuon import launch
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.newton_schulz import newton_schulz
from distmuon.optim.strategies import periodic
from distmuon.sharding.grid import Grid
from distmuon.sharding.tensor_parallel import mark
from distmuon.verify.blocks import BlockMuon, block_options

on_every_grid = pytest.mark.parametrize(("dp", "tp"), [(3, 1), (2, 2)])


@once
def facts(dp: int, tp: int) -> list[dict[str, Any]]:
    """Return what each rank of one world has found out; the world runs once, when the first test asks."""
    return launch.run(work.facts, dp=dp, tp=tp)


@once
def alone(name: str, dp: int, tp: int, **in_blocks: Any) -> dict[str, Tensor]:
    """Return what one process, with one thread as every rank has, ends with."""
    (outcome,) = launch.run(in_one_process, (work.CASES.get(name, SMALL), dp, tp, in_blocks))
    return outcome.values


def in_one_process(world: launch.World, case: Case, dp: int, tp: int, in_blocks: dict[str, Any]) -> Outcome:
    return cases.train_alone(world, case, dp, tp, **in_blocks)


def different(dp: int, tp: int, name: str, expected: dict[str, Tensor]) -> set[str]:
    """Return the parameters of which some rank's slice is not, to the bit, that of the expected whole one."""
    return {
        w.name
        for rank, found in enumerate(facts(dp, tp))
        for w in SMALL.weights
        if not torch.equal(found["values"][name][w.name], cases.cut(expected[w.name], w.dim, tp, rank % tp))
    }


# ---- As one process does it -------------------------------------------------------------------------------


@on_every_grid
@pytest.mark.parametrize("name", work.CASES)
def test_periodic_ends_to_the_bit_where_one_process_in_blocks_does(dp: int, tp: int, name: str) -> None:
    expected = alone(name, dp, tp, blocks=tp)
    assert different(dp, tp, name, expected) == set()
    if name == "small":
        assert different(dp, tp, "one bucket", expected) == different(dp, tp, "updates", expected) == set()


@on_every_grid
def test_blockwise_and_a_period_that_never_ends_are_one_process_in_blocks(dp: int, tp: int) -> None:
    expected = alone("plain", dp, tp, blocks=tp, whole_every=0, block_lr_ratio=1.0)
    assert different(dp, tp, "blockwise", expected) == different(dp, tp, "never", expected) == set()


@on_every_grid
def test_where_tp_cuts_a_matrix_it_is_not_muon(dp: int, tp: int) -> None:
    """`test_certificate` holds it against Muon where every step is whole."""
    muon = alone("plain", dp, tp)
    cut = {w.name for w in SMALL.weights if w.dim is not None and len(w.shape) == 2}
    for name in ("small", "never", "blockwise"):
        assert different(dp, tp, name, muon) == (cut if tp > 1 else set()), name


# ---- Its count of steps -----------------------------------------------------------------------------------


@on_every_grid
def test_a_skipped_step_is_none_a_schedule_changes_nothing_and_a_resumed_run_goes_on(dp: int, tp: int) -> None:
    for rank in facts(dp, tp):
        for runs in (rank["skipped"], rank["pipelined"], rank["resumed"]):
            assert all(torch.equal(*both) for both in runs.values())


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (4, [4]), (7, [])])
def test_every_kth_step_is_whole(every: int, expected: list[int]) -> None:
    assert [step + 1 for step in range(6) if periodic.is_whole(step, every)] == expected


# ---- Its learning rates -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "ratio"), [(0, 0.5), (1, 1.0)])
def test_by_its_shape_a_block_keeps_the_rms_of_the_update(dim: int, ratio: float) -> None:
    """[64, 16] in 4 blocks of its rows, [16, 16], or of its columns, [64, 4]."""
    start = mark(nn.Parameter(torch.zeros(64, 16, dtype=torch.float64)), dim)
    gradient = cases.synthetic("block", (64, 16), torch.float64)
    options: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "blocks": 4, "batched": False}
    updates = {}
    for given in ("shape", 1.0):
        p = mark(nn.Parameter(start.detach().clone()), dim)
        p.grad = gradient.clone()
        BlockMuon([p], **options, block_lr_ratio=given).step()
        updates[given] = -p.detach()
    blocks = torch.cat([newton_schulz(block) for block in ((1 + 0.95) * gradient).chunk(4, dim)], dim)
    assert distance(updates[1.0], 0.2 * math.sqrt(64) * blocks) < 1e-12  # the whole matrix's scale
    assert distance(updates["shape"], ratio * updates[1.0]) < 1e-12
    rms = float(updates["shape"].square().mean().sqrt())
    assert 0.1 < rms < 0.25
    assert 1 / math.sqrt(4) <= ratio <= 1


# ---- Nonsense ---------------------------------------------------------------------------------------------


def matrix(**group: Any) -> list[dict[str, Any]]:
    return [{"params": [nn.Parameter(torch.ones(3, 2))]} | group]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: by("periodic", whole_every=0), "whole_every is 0; give a number of steps, 1 or more."),
        (lambda: by("periodic", whole_every=True), "whole_every is True; give a number of steps, 1 or more."),
        (lambda: by("periodic", block_lr_ratio=0.0), "block_lr_ratio is 0.0; give 'shape' or a positive number."),
        (lambda: by("periodic", block_lr_ratio="rms"), "block_lr_ratio is 'rms'; give 'shape' or a positive number."),
        (
            lambda: by("owner", whole_every=5),
            "whole_every is 5, which goes with strategy='periodic'; take that, or leave it out.",
        ),
        (
            lambda: DistributedMuon(matrix(block_lr_ratio=0.5), Grid.alone(), strategy="blockwise"),
            "block_lr_ratio is 0.5, which goes with strategy='periodic'; take that, or leave it out.",
        ),
        (
            lambda: BlockMuon([mark(nn.Parameter(torch.ones(3, 2)), 0)], blocks=2),
            "2 blocks do not divide dimension 0 of a matrix of (3, 2); choose a number that does.",
        ),
    ],
)
def test_nonsense_is_one_sentence(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$") as error:
        make()
    message(error)


def by(strategy: str, **options: Any) -> DistributedMuon:
    return DistributedMuon(matrix(), Grid.alone(), strategy=strategy, strategy_options=options)


def test_a_period_may_be_a_groups_own_and_the_default_is_five() -> None:
    groups = [*matrix(), *matrix(whole_every=2), *matrix(algorithm="adamw")]
    optimizer = DistributedMuon(groups, Grid.alone(), strategy="periodic", strategy_options={"block_lr_ratio": 0.5})
    assert [group.get("whole_every") for group in optimizer.param_groups] == [5, 2, None]
    assert [group.get("block_lr_ratio") for group in optimizer.param_groups] == [0.5, 0.5, None]


@pytest.mark.parametrize(
    ("strategy", "every", "tp", "expected"),
    [
        ("blockwise", 5, 2, {"blocks": 2, "whole_every": 0, "block_lr_ratio": 1.0}),
        ("periodic", 5, 4, {"blocks": 4, "whole_every": 5, "block_lr_ratio": "shape"}),
        ("periodic", 1, 4, None),
        ("periodic", 5, 1, None),
        ("owner", 5, 4, None),
    ],
)
def test_only_blocks_make_another_optimizer(
    strategy: str, every: int, tp: int, expected: dict[str, Any] | None
) -> None:
    assert block_options(strategy, {"whole_every": every, "block_lr_ratio": "shape"}, tp) == expected
