"""The baselines: what each sends is what was predicted, in every count; and they are at the same job."""

from dataclasses import replace
from typing import Any

import baseline_workers as workers
import pytest
from once import once

from distmuon import launch
from distmuon.launch import UsageError
from distmuon.sharding.ledger import Ledger
from muonbook.ch12 import four_counts
from muonbook.ch12.four_counts import Counted
from muonbook.measure.profiler import Seen
from muonbook.measure.workload import SHAPES
from muonbook.runnable_baselines import admitted

# ---- Counted = predicted ----------------------------------------------------------------------------------

# one rank, TP alone, DP that cuts unevenly, both; chapter 12 counts 4 x 1, and `make bench` all grids up to 8 ranks
COUNTED = [(1, 1), (1, 2), (3, 1), (2, 2)]


@pytest.mark.parametrize(("dp", "tp"), COUNTED)
def test_every_baseline_sends_what_was_predicted_in_every_count(dp: int, tp: int) -> None:
    """By ledger, dispatcher and profiler, per collective: calls, payload and sent."""
    shapes = four_counts.shape_on(dp, tp)
    ranks = launch.run(four_counts.count_grids, ([(dp, tp)],), dp=dp * tp)[0][dp, tp]
    assert len(ranks) == dp * tp
    for number, rank in enumerate(ranks):
        assert {shape for shape, _ in rank} == set(shapes)
        for shape, workload in shapes.items():
            counted = set(admitted(workload, dp, tp, four_counts.COUNTED)) - {"muon_fsdp2"}
            assert {name for of, name in rank if of == shape} == counted
        for which, step in rank.items():
            assert step.faults() == [], f"rank {number}, {which}"
            assert (step.predicted.total().calls > 0) == (dp * tp > 1)


def test_between_them_the_shapes_can_be_cut_over_every_grid() -> None:
    assert len(four_counts.GRIDS) == 20
    for dp, tp in four_counts.GRIDS:
        assert four_counts.shape_on(dp, tp), f"no shape for {dp} x {tp}"
    for over in ([g for g in four_counts.GRIDS if g[0] > 1], [g for g in four_counts.GRIDS if g[1] > 1]):
        assert {shape for dp, tp in over for shape in four_counts.shape_on(dp, tp)} == set(SHAPES)


def test_a_grid_that_a_shape_cannot_be_cut_over_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match=r"--tp 3 does not divide the model's 8 heads; choose one of 1, 2, 4, 8\."):
        SHAPES["even"].check(1, 3)
    with pytest.raises(UsageError, match="8 sequences cannot be shared out by --dp 3"):
        SHAPES["even"].check(3, 1)
    assert not SHAPES["even"].fits(3, 1)
    assert "muon_ddp" not in admitted(SHAPES["even"], 2, 2)


def test_every_kind_of_disagreement_is_a_fault() -> None:
    def ledger(payload: int, label: str = "parameters") -> Ledger:
        made = Ledger()
        made.record("all_gather", "dp", 2, payload, label)
        return made

    right = Counted(ledger(8), ledger(8), ledger(8, "c10d"), {"all_gather": Seen(1, 8)}, native=False)
    assert right.faults() == []
    assert len(replace(right, dispatched=ledger(16)).faults()) == 1
    assert len(replace(right, dispatched=Ledger()).faults()) == 1
    assert len(replace(right, ledger=ledger(8, "momentum")).faults()) == 2
    assert len(replace(right, recorded={"all_gather": Seen(2, 8)}).faults()) == 1
    assert len(replace(right, predicted=ledger(4)).faults()) == 3
    assert replace(right, ledger=None).faults() == []


# ---- The counter sees what DTensor calls ------------------------------------------------------------------


@once
def dtensor_world() -> list[Any]:
    return launch.run(workers.count_dtensor, dp=2)


def test_the_counter_sees_collectives_that_dtensor_makes() -> None:
    """With the mode on the stack DTensor must run first, or its collectives happen where no mode looks."""
    for gathered, _, _ in dtensor_world():
        assert [(e.op, t.calls, t.payload_bytes) for e, t in gathered] == [("all_gather", 1, 4 * 6 * 4)]


def test_torchs_muon_on_fsdp2_makes_many_collectives_for_every_matrix() -> None:
    for _, model, update in dtensor_world():
        matrices = len(SHAPES["even"].plan(2, 1)[1])
        assert round(update.total().calls / matrices) == 15  # as chapter 12 says
        assert all(entry.label.startswith("_c10d_functional::") for entry, _ in update)
        assert {entry.op for entry, _ in model} == {"all_gather", "reduce_scatter"}


# ---- The same job -----------------------------------------------------------------------------------------


def test_all_start_from_the_same_weights_and_read_the_same_data() -> None:
    for losses in launch.run(workers.train, (3,), dp=2):
        first = losses["ddp"][0]
        assert set(losses) == set(workers.NAMES)
        assert all(abs(row[0] - first) < 1e-5 for row in losses.values())
        for alike in (("ddp", "zero1", "torch_zero"), ("muon", "muon_ddp")):  # one algorithm, whoever shards it
            assert all(losses[name] == pytest.approx(losses[alike[0]], abs=2e-3) for name in alike), losses
        assert all(min(row[1:]) < row[0] for row in losses.values())
