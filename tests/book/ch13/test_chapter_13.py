"""Chapter 13's worker as its readers run it; what is counted, what is predicted, and what the tracker sees."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import worlds

from distmuon import launch
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import ParamSpec, plan
from distmuon.verify import model_states
from distmuon.verify.storage_tracker import Moment, StorageTracker, references, size_of
from muonbook.ch13 import memory_tables
from muonbook.ch13.figure_memory import describe_step_memory, draw_step_memory
from muonbook.ch13.memory_tables import MemoryPlan, plan_memory, share_of_matrices
from muonbook.ch13.step_memory import Weighed, cross_check, packed, unpacked, weigh
from muonbook.measure import results
from muonbook.measure.baselines import BASELINES, admitted
from muonbook.measure.workload import SHAPES
from muonbook.planner.model_shapes import MODELS

WORKER = str(worlds.ROOT / "scripts" / "13_memory.py")
TABLES = [getattr(memory_tables, f"{name}_lines") for name in ("saving", "update", "bucket", "published", "batch")]
TINY = replace(SHAPES["odd"], width=21, heads=7, vocabulary=23, context=8, bucket_size=1_501)


def weigh_tiny(world: launch.World, dtype: str) -> dict[str, Weighed]:
    grid, workload = Grid.of(world), replace(TINY, dtype=dtype).shared_by(world.dp)
    return {name: weigh(name, workload, grid) for name in admitted(workload, world.dp, world.tp)}


# ---- Counted against predicted ----------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "tp", "dtype"), [(1, 1, "float32"), (3, 1, "bfloat16"), (2, 1, "float32")])
def test_all_six_keep_what_was_predicted_and_stay_under_their_bounds(dp: int, tp: int, dtype: str) -> None:
    """On three ranks neither rows nor buckets divide, and FSDP2 pads."""
    for found in launch.run(weigh_tiny, (dtype,), dp=dp, tp=tp):
        assert list(found) == list(BASELINES)
        for name, one in found.items():
            assert one.states == one.predicted, name
            assert one.bound is None if name == "muon_fsdp2" else one.transient <= one.bound, name
            assert one.transient <= max(one.stages.values()), name
            assert one.peak >= sum(one.states.values()), name


def test_over_tp_ours_keep_what_was_predicted() -> None:
    for found in launch.run(weigh_tiny, ("bfloat16",), dp=1, tp=7):
        assert list(found) == ["ddp", "zero1", "torch_zero", "muon"]
        assert all(one.states == one.predicted for one in found.values())


def test_muons_momentum_is_half_of_what_adamw_kept_for_the_same_matrices() -> None:
    for rank in range(3):
        adamw, muon = (BASELINES[name].predict_states(TINY.shared_by(3), 3, 1, rank) for name in ("zero1", "muon"))
        assert adamw["exp_avg"] - muon["exp_avg"] == adamw["exp_avg_sq"] - muon["exp_avg_sq"] == muon["momentum"] > 0


def test_torchs_zero_deals_the_largest_parameter_first() -> None:
    specs = [ParamSpec(name, (size,), "float32") for name, size in {"a": 5, "b": 9, "c": 4, "d": 1}.items()]
    states = [model_states.predict_partition(plan(specs, 2), rank) for rank in range(2)]
    assert [row["exp_avg"] // 4 for row in states] == [9 + 1, 5 + 4]  # b; a, c; d to either: the first
    assert [row["counters"] for row in states] == [8, 8]


def test_state_under_an_unknown_name_is_not_passed_over() -> None:
    with pytest.raises(RuntimeError, match=r"\['max_exp_avg_sq'\], which nobody counts"):
        model_states.by_kind([{"exp_avg": torch.zeros(1), "max_exp_avg_sq": torch.zeros(1)}])


# ---- The tracker ------------------------------------------------------------------------------------------


def test_stages_have_peaks_of_their_own() -> None:
    with StorageTracker() as tracker:
        with tracker.during("one"):
            a = torch.zeros(100)
            with tracker.during("two"):
                b = a + 1
        del b
        a.add_(1)
    assert tracker.peaks() == {"one": 400, "two": 800, "": 400}
    assert [moment.stage for moment in tracker.history] == ["one", "two", ""]


def test_with_standing_storages_all_others_count_when_first_seen() -> None:
    ours, other = torch.zeros(10), torch.zeros(20)
    with StorageTracker(references([ours[:3]])) as tracker:
        ours.add_(1)
        other.add_(1)
        assert tracker.peak == 80
        other.untyped_storage().resize_(0)  # as FSDP2 does with what it gathered
        ours.add_(1)
    assert tracker.history[-1].alive == 0


def test_a_reference_knows_the_size_and_the_end_of_its_storage() -> None:
    tensor = torch.zeros(6)
    (reference,) = references([tensor, tensor[2:]])
    assert size_of(reference) == 24
    tensor.untyped_storage().resize_(8)
    assert size_of(reference) == 8
    del tensor
    assert size_of(reference) is None


def test_the_allocator_sees_what_the_tracker_sees_and_little_more() -> None:
    tracked, allocated = cross_check("muon_ddp", SHAPES["even"].shared_by(1), Grid.alone())
    assert 0 < tracked <= allocated <= 1.1 * tracked


# ---- Plans and pictures -----------------------------------------------------------------------------------


def test_a_plan_saves_one_moment_of_the_matrices() -> None:
    model = MODELS["gpt2"]
    found = plan_memory(model, 1)
    assert found.saved == pytest.approx(4 * share_of_matrices(model) * model.parameters)
    adamw, muon = (sum(states[kind] for kind in model_states.STATE) for states in (found.adamw, found.muon))
    assert 1 - muon / adamw == pytest.approx(share_of_matrices(model) / 2, rel=1e-2)
    assert sum(found.adamw.values()) == pytest.approx(18 * model.parameters, rel=1e-2)  # the vocabulary is padded


def test_a_bound_says_no_or_perhaps_and_yes_only_with_its_slack() -> None:
    adamw, muon = dict.fromkeys(model_states.KINDS, 100), dict.fromkeys(model_states.KINDS, 100) | {"exp_avg": 0}
    assert [MemoryPlan(adamw, muon, 10, bound).eaten(2.0) for bound in (100, 101, 220, 221)] == [
        "no",
        "perhaps",
        "perhaps",
        "yes",
    ]


def test_the_page_has_every_table() -> None:
    found = results.load("memory")
    for lines in (memory_tables.share_lines(), *(table(found) for table in TABLES)):
        assert len(lines) > 3
        assert max(map(len, lines)) <= 80
    assert {name: len(x) for name, (x, _) in memory_tables.bucket_curves(found).items()} == dict.fromkeys(
        ("beyond AdamW", "its bound", "saved"), 6
    )


def test_gathering_all_at_once_takes_more_than_was_saved() -> None:
    for dp in (2, 3, 64):
        layout = plan([ParamSpec("a", (96, 64), "float32"), ParamSpec("b", (32, 64), "float32")], dp)
        (bucket,) = layout.buckets
        saved = [model_states.predict_shards(layout, rank, ())["exp_avg"] for rank in range(dp)]
        assert 2 * (bucket.padded + bucket.shard_size) > max(saved)


def test_histories_are_stored_in_a_line_and_drawn() -> None:
    history = [Moment("forward", 8), Moment("forward", 16), Moment("dp_gather", 0), Moment("forward", 4)]
    assert packed(history) == "forward 8 16; dp_gather 0; forward 4"
    assert unpacked(packed(history)) == history
    steps = {"ours": (dict.fromkeys(model_states.KINDS, 100), history)}
    assert "700 B stand, at most 16 B more, in forward" in describe_step_memory(steps)
    assert draw_step_memory(steps).axes
    with pytest.raises(ValueError, match="needs a step"):
        draw_step_memory({})


# ---- The worker -------------------------------------------------------------------------------------------


def test_the_table_is_printed_and_written(tmp_path: Path) -> None:
    ending = worlds.finish(WORKER, "--dp", "2", "--tp", "5", "--shape", "odd", "--json", f"{tmp_path}/new/13.json")
    assert (ending.code, ending.err) == (0, "")
    assert ending.out.count(": True") == 2
    rows = json.loads((tmp_path / "new" / "13.json").read_text())["rows"]
    assert [row["contender"] for row in rows] == ["ddp", "zero1", "torch_zero", "muon"]
    assert f"{sum(rows[0]['kept'].values()):,}" in ending.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "round"], "--shape round: choose one of even, tall, odd"),
        (["--dtype", "int8"], "--dtype int8: choose one of"),
        (["--measure"], "add --json FILE"),
        (["--quick"], "--quick does nothing by itself; it goes with --measure"),
        (["--tp", "3"], "--tp 3 does not divide the model's 8 heads"),
    ],
)
def test_what_does_not_fit_is_answered_in_a_sentence(arguments: list[str], words: str) -> None:
    ending = worlds.finish(WORKER, *arguments)
    assert ending.code == 2
    assert words in ending.err
