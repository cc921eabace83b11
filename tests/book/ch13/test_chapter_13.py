"""Chapter 13's worker as its readers run it; what is counted, what is predicted, and what the tracker sees."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
import worlds
from figure_helpers import boxes, lines

from distmuon import launch
from distmuon.sharding.grid import Grid
from distmuon.verify import model_states
from distmuon.verify.memory_tracker import Moment, StorageTracker, references, size_of
from muonbook.ch13 import memory_tables, step_memory
from muonbook.ch13.figure_memory import frames_of_steps
from muonbook.ch13.step_memory import Weighed, cross_check, packed, unpacked, weigh
from muonbook.measure import results
from muonbook.measure.workload import SHAPES
from muonbook.runnable_baselines import RUNNABLE, TRIED, ZERO1, admitted

WORKER = str(worlds.ROOT / "scripts" / "13_memory.py")
TINY = replace(SHAPES["odd"], width=21, heads=3, vocabulary=23, context=8, bucket_size=1_501)


def weigh_tiny(world: launch.World, dtype: str) -> dict[str, Weighed]:
    grid, workload = Grid.of(world), replace(TINY, dtype=dtype).shared_by(world.dp)
    return {name: weigh(name, workload, grid) for name in admitted(workload, world.dp, world.tp)}


# ---- Counted against predicted ----------------------------------------------------------------------------


def test_where_adamw_takes_all_tensors_at_once_as_on_a_gpu_the_bound_holds_too(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = replace(TINY, layers=6).shared_by(1)  # all tensors are many times the largest
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_default_to_fused_or_foreach", lambda *_, **__: (False, True))
    one_by_one = weigh("adamw_fsdp2", deep, Grid.alone())
    assert one_by_one.transient > (one_by_one.bound or 0)
    monkeypatch.setattr(step_memory, "takes_all_at_once", lambda device: True)
    for name in ("zero1", "adamw_fsdp2", "muonw"):
        found = weigh(name, deep, Grid.alone())
        assert 0 < found.transient <= (found.bound or 0), name


@pytest.mark.parametrize(("dp", "dtype"), [(1, "float32"), (3, "bfloat16")])
def test_all_keep_what_was_predicted_and_stay_under_their_bounds(dp: int, dtype: str) -> None:
    """On three ranks neither rows nor buckets divide, and FSDP2 pads."""
    for found in launch.run(weigh_tiny, (dtype,), dp=dp):
        assert list(found) == list(RUNNABLE)
        for name, one in found.items():
            assert one.states == one.predicted, name
            assert one.bound is None if name == "muon_fsdp2" else one.transient <= one.bound, name
            assert one.transient <= max(one.stages.values()), name
            assert one.peak >= sum(one.states.values()), name


def test_over_tp_ours_keep_what_was_predicted() -> None:
    for found in launch.run(weigh_tiny, ("bfloat16",), dp=1, tp=3):
        assert set(found) == {*ZERO1, "ddp", "torch_zero"}
        for name, one in found.items():
            assert one.states == one.predicted, name
            assert one.transient <= (one.bound or 0), name


def test_fsdp2_is_weighed_in_float32_shards_alone() -> None:
    workload = TINY.shared_by(2)
    others = [name for name in TRIED if name not in ("adamw_fsdp2", "muonw")]
    assert admitted(workload, 2, 1, TRIED) == list(TRIED)
    assert admitted(workload, 2, 3, TRIED) == admitted(replace(workload, dtype="float64"), 2, 1, TRIED) == others


@pytest.mark.parametrize("shape", ["even", "tall"])
def test_ranks_keep_equal_parts_of_momentum_in_the_layouts_that_the_page_names(shape: str) -> None:
    for name in ("muon_single", "muonw"):
        assert len(set(momentum_of(name, shape, 4))) == 1
    for name in ("muon", "muon_flat", "muon_cut", "muon_owner"):
        assert max(len(set(momentum_of(name, kind, dp))) for kind, dp in (("even", 3), ("tall", 4))) > 1


def momentum_of(name: str, shape: str, dp: int) -> list[int]:
    """Return how many bytes of momentum each of `dp` ranks keeps."""
    workload = SHAPES[shape].shared_by(dp)
    return [RUNNABLE[name].states(workload, dp, 1, rank)["momentum"] for rank in range(dp)]


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
    (reference,) = references([ours])
    del ours
    assert size_of(reference) is None


@pytest.mark.parametrize("name", ["muon_ddp", "muon"])
def test_the_allocator_sees_what_the_tracker_sees_and_little_more(name: str) -> None:
    """In flat storages too, which parameters and gradients lie in by other storages."""
    tracked, allocated = cross_check(name, SHAPES["even"].shared_by(1), Grid.alone())
    assert 0 < tracked <= allocated <= 1.1 * tracked


# ---- What is stored, and drawn ----------------------------------------------------------------------------


def test_what_is_stored_is_predicted_to_the_byte_and_bounded() -> None:
    found = results.load("memory")
    kept, rows = found["kept"], [*found["rows"], *found["batches"]]
    assert kept["equal"] == kept["compared"] > 0
    assert kept["exact_halves"] == kept["halves"] > 0  # gather_all in buckets, rank by rank
    assert kept["exact_half_totals"] == kept["half_totals"] > 0  # five layouts, over all ranks
    assert all(row["under_bound"] is not False for row in rows)
    bounded = [row for row in rows if row["kept"]["momentum"] and row["bound"]]
    assert {row["baseline"] for row in bounded} == {*ZERO1[1:], "muonw", "muon_ddp"}
    assert all(row["transient"] <= row["bound"] for row in bounded)
    assert all(tracked <= allocated < 1.028 * tracked for tracked, allocated in found["cross_check"].values())


def test_what_is_stored_of_four_ranks_is_what_is_predicted_today() -> None:
    rows = [row for row in results.load("memory")["rows"] if (row["dp"], row["tp"]) in ((4, 1), (2, 2))]
    assert {row["baseline"] for row in rows} >= set(TRIED)
    for row in rows:
        workload = replace(SHAPES[row["shape"]], dtype=row["dtype"]).shared_by(row["dp"])
        assert RUNNABLE[row["baseline"]].states(workload, row["dp"], row["tp"], 0) == row["kept"], row["baseline"]


def test_the_stored_steps_say_what_the_page_says() -> None:
    """Every Muon keeps 3 MB less; matrix by matrix stays below AdamW's peak, buckets and flat rise above it."""
    steps = {
        name: (step["kept"], unpacked(step["history"])) for name, step in results.load("memory")["timelines"].items()
    }
    kept = {name: sum(sizes.values()) for name, (sizes, _) in steps.items()}
    assert {round((kept["zero1"] - size) / 1e6) for size in kept.values()} == {0, 3}
    tall = {name: kept[name] + max(moment.alive for moment in history) for name, (_, history) in steps.items()}
    assert list(tall) == list(ZERO1)
    assert (
        tall["muon_single"] < tall["muon_owner"] < tall["zero1"] < tall["muon"] < tall["muon_cut"] < tall["muon_flat"]
    )
    for name, frame in list(zip(steps, frames_of_steps(steps, {}), strict=True))[1:]:
        beyond = (tall[name] - tall["zero1"]) / 1e6
        assert frame.alt.startswith(f"{name}: {abs(beyond):.1f} MB {'above' if beyond > 0 else 'below'} zero1. ")
        (level,) = lines(frame.figure, f"level-{name}")
        highest = min(box.get_y() for box in boxes(frame.figure, f"alive-{name}"))  # y runs down
        assert (highest < level.get_segments()[0][0][1]) == (beyond > 0)


def test_histories_are_stored_in_a_line() -> None:
    history = [Moment("forward", 8), Moment("forward", 16), Moment("dp_gather", 0), Moment("forward", 4)]
    assert packed(history) == "forward 8 16; dp_gather 0; forward 4"
    assert unpacked(packed(history)) == history


def test_peaks_by_batch_leave_out_what_the_cpu_alone_borrows() -> None:
    """NCCL needs no room to reduce; so gather cut, too, stays below AdamW's fullest."""
    found = results.load("memory")
    borrowed = {row["baseline"]: row["stages"] for row in found["batches"] if row["tokens_per_rank"] == 64}
    assert borrowed["muon_cut"]["reduce_scatter"] == max(borrowed["muon_cut"].values())  # on a CPU
    few, *more = (
        [(peaks[layout].highest.top - peaks["AdamW"].highest.top) / 1e6 for layout in memory_tables.PLANNED]
        for peaks in memory_tables.peaks_of_batches(found).values()
    )
    assert [size > 0 for size in few] == [False, True, True, False, False]
    assert all(size < -3 for sizes in more for size in sizes)


# ---- The worker -------------------------------------------------------------------------------------------


def test_the_table_has_every_baseline() -> None:
    ending = worlds.finish(WORKER, "--dp", "1", "--shape", "odd")
    assert (ending.code, ending.err) == (0, "")
    assert ending.out.count(": True") == 2
    rows = [line.rsplit(maxsplit=5) for line in ending.out.splitlines()[3 : 3 + len(TRIED)]]
    assert [title for title, *_ in rows] == [RUNNABLE[name].title for name in TRIED]
    for _, *kinds, kept in rows:
        assert sum(int(size.replace(",", "")) for size in kinds) == int(kept.replace(",", ""))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "round"], "--shape round: choose one of film, even, tall, odd"),
        (["--dtype", "int8"], "--dtype int8: choose one of"),
        (["--tp", "3"], "--tp 3 does not divide the model's 8 heads"),
    ],
)
def test_what_does_not_fit_is_answered_in_a_sentence(arguments: list[str], words: str) -> None:
    ending = worlds.answer(WORKER, *arguments)
    assert ending.code == 2
    assert words in ending.err
