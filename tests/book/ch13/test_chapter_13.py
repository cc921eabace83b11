"""Chapter 13's worker as its readers run it; what is counted, what is predicted, and what the tracker sees."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from figure_helpers import assert_readable, boxes, lines, texts

from distmuon import launch
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import ParamSpec, plan
from distmuon.verify import model_states
from distmuon.verify.memory_tracker import Moment, StorageTracker, references, size_of
from muonbook.ch13 import memory_tables, step_memory
from muonbook.ch13.figure_memory import Step, frames_of_steps
from muonbook.ch13.step_memory import Weighed, cross_check, packed, unpacked, weigh
from muonbook.contenders import CONTENDERS, TRIED, ZERO1, admitted
from muonbook.figures import player, style
from muonbook.measure import results
from muonbook.measure.workload import SHAPES, Workload

WORKER = str(worlds.ROOT / "scripts" / "13_memory.py")
TINY = replace(SHAPES["odd"], width=21, heads=7, vocabulary=23, context=8, bucket_size=1_501)


def weigh_tiny(world: launch.World, dtype: str) -> dict[str, Weighed]:
    grid, workload = Grid.of(world), replace(TINY, dtype=dtype).shared_by(world.dp)
    return {name: weigh(name, workload, grid) for name in admitted(workload, world.dp, world.tp)}


def weigh_layouts(world: launch.World, workload: Workload) -> dict[str, Weighed]:
    return {name: weigh(name, workload, Grid.of(world)) for name in ZERO1}


# ---- Counted against predicted ----------------------------------------------------------------------------


def test_where_adamw_takes_all_tensors_at_once_as_on_a_gpu_the_bound_holds_too(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = replace(TINY, layers=6).shared_by(1)  # all tensors are many times the largest
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_default_to_fused_or_foreach", lambda *_, **__: (False, True))
    one_by_one = {name: weigh(name, deep, Grid.alone()) for name in ("zero1", "adamw_fsdp2", "muonw")}
    assert one_by_one["adamw_fsdp2"].transient > (one_by_one["adamw_fsdp2"].bound or 0)
    monkeypatch.setattr(step_memory, "takes_all_at_once", lambda device: True)
    for name in one_by_one:
        found = weigh(name, deep, Grid.alone())
        assert 0 < found.transient <= (found.bound or 0), name


@pytest.mark.parametrize(("dp", "tp", "dtype"), [(1, 1, "float32"), (3, 1, "bfloat16"), (2, 1, "float32")])
def test_all_keep_what_was_predicted_and_stay_under_their_bounds(dp: int, tp: int, dtype: str) -> None:
    """On three ranks neither rows nor buckets divide, and FSDP2 pads."""
    for found in launch.run(weigh_tiny, (dtype,), dp=dp, tp=tp):
        assert list(found) == list(CONTENDERS)
        for name, one in found.items():
            assert one.states == one.predicted, name
            assert one.bound is None if name == "muon_fsdp2" else one.transient <= one.bound, name
            assert one.transient <= max(one.stages.values()), name
            assert one.peak >= sum(one.states.values()), name


def test_over_tp_ours_keep_what_was_predicted() -> None:
    for found in launch.run(weigh_tiny, ("bfloat16",), dp=1, tp=7):
        assert set(found) == {*ZERO1, "ddp", "torch_zero"}
        for name, one in found.items():
            assert one.states == one.predicted, name
            assert one.transient <= (one.bound or 0), name


def test_fsdp2_is_weighed_in_float32_shards_alone() -> None:
    workload = TINY.shared_by(2)
    others = [name for name in TRIED if name not in ("adamw_fsdp2", "muonw")]
    assert admitted(workload, 2, 1, TRIED) == list(TRIED)
    assert admitted(workload, 2, 7, TRIED) == admitted(replace(workload, dtype="float64"), 2, 1, TRIED) == others


@pytest.mark.parametrize(("adamw", "muon"), [*(("zero1", name) for name in ZERO1[1:]), ("adamw_fsdp2", "muonw")])
def test_muons_momentum_is_half_of_what_adamw_kept_for_the_same_matrices(adamw: str, muon: str) -> None:
    """Over all ranks: layouts deal the same elements out in other ways."""
    kept = [[CONTENDERS[name].states(TINY.shared_by(3), 3, 1, rank) for rank in range(3)] for name in (adamw, muon)]
    before, after = ({kind: sum(rank[kind] for rank in ranks) for kind in ranks[0]} for ranks in kept)
    moved = [before[kind] - after[kind] for kind in ("exp_avg", "exp_avg_sq")]
    assert moved[0] == moved[1] == after["momentum"] > 0


@pytest.mark.parametrize("shape", ["even", "tall"])
def test_ranks_keep_equal_parts_of_momentum_in_the_layouts_that_the_page_names(shape: str) -> None:
    for name in ("muon_single", "muonw"):
        assert len(set(momentum_of(name, shape, 4))) == 1
    for name in ("muon", "muon_flat", "muon_cut", "muon_owner"):
        assert max(len(set(momentum_of(name, kind, dp))) for kind, dp in (("even", 3), ("tall", 4))) > 1


def momentum_of(name: str, shape: str, dp: int) -> list[int]:
    """Return how many bytes of momentum each of `dp` ranks keeps."""
    workload = SHAPES[shape].shared_by(dp)
    return [CONTENDERS[name].states(workload, dp, 1, rank)["momentum"] for rank in range(dp)]


def test_each_layout_has_its_own_height() -> None:
    """Matrix by matrix is lowest; all in one bucket is highest, and gathering less of it helps."""
    workload = replace(SHAPES["even"], bucket_size=200_000).shared_by(2)
    (found, _) = launch.run(weigh_layouts, (workload,), dp=2)
    one = {name: each.transient for name, each in found.items()}
    assert one["muon_single"] < one["muon"] < one["muon_cut"] < one["muon_flat"]
    assert one["muon_owner"] < one["muon_flat"]


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


@pytest.mark.parametrize("name", ["muon_ddp", "zero1", "muon"])
def test_the_allocator_sees_what_the_tracker_sees_and_little_more(name: str) -> None:
    """In flat storages too, which parameters and gradients lie in by other storages."""
    tracked, allocated = cross_check(name, SHAPES["even"].shared_by(1), Grid.alone())
    assert 0 < tracked <= allocated <= 1.1 * tracked


# ---- Plans and pictures -----------------------------------------------------------------------------------


def test_the_results_have_every_contender() -> None:
    assert {row["contender"] for row in results.load("memory")["rows"] if row["dp"] == 4} >= set(TRIED)


def test_every_stored_update_of_a_muon_stayed_under_its_bound() -> None:
    found = results.load("memory")
    measured = [*found["rows"], *found["one_bucket"].values(), *found["batches"]]
    bounded = [row for row in measured if row["kept"]["momentum"] and row["bound"]]
    assert {row["contender"] for row in bounded} == {*ZERO1[1:], "muonw", "muon_ddp"}
    assert all(row["transient"] <= row["bound"] for row in bounded)


def test_the_stored_steps_say_what_the_page_says() -> None:
    """Every Muon keeps 3 MB less; matrix by matrix stays below AdamW's peak, buckets and flat rise above it."""
    kept = {name: sum(step["kept"].values()) for name, step in results.load("memory")["timelines"].items()}
    assert {round((kept["zero1"] - size) / 1e6) for size in kept.values()} == {0, 3}
    tall = {}
    for name, step in results.load("memory")["timelines"].items():
        tall[name] = sum(step["kept"].values()) + max(moment.alive for moment in unpacked(step["history"]))
    assert list(tall) == list(ZERO1)
    assert (
        tall["muon_single"] < tall["muon_owner"] < tall["zero1"] < tall["muon"] < tall["muon_cut"] < tall["muon_flat"]
    )


def test_gathering_all_at_once_takes_more_than_was_saved() -> None:
    for dp in (2, 3, 64):
        layout = plan([ParamSpec("a", (96, 64), "float32"), ParamSpec("b", (32, 64), "float32")], dp)
        (bucket,) = layout.buckets
        saved = [model_states.predict_shards(layout, rank, ())["exp_avg"] for rank in range(dp)]
        assert 2 * (bucket.padded + bucket.shard_size) > max(saved)


def test_the_stored_grids_are_predicted_to_the_byte_and_bounded() -> None:
    found = results.load("memory")
    kept = found["kept"]
    assert kept["equal"] == kept["compared"] > 0
    assert all(row["under_bound"] is not False for row in found["rows"])
    assert kept["exact_halves"] == kept["halves"] > 0  # gather_all in buckets, rank by rank
    assert kept["exact_half_totals"] == kept["half_totals"] > 0  # five layouts, over all ranks
    assert all(tracked <= allocated < 1.028 * tracked for tracked, allocated in found["cross_check"].values())


def test_one_bucket_borrows_its_shard_and_the_whole_in_bf16_to_the_byte() -> None:
    adamw, muon = results.load("memory")["one_bucket"].values()
    n, shard = adamw["largest_bucket"], adamw["largest_bucket"] // muon["dp"]
    gathered = muon["stages"]["dp_gather"] - muon["stages"]["momentum"]
    assert gathered == 2 * (n + shard) > adamw["mean_kept"] - muon["mean_kept"]


def test_histories_are_stored_in_a_line() -> None:
    history = [Moment("forward", 8), Moment("forward", 16), Moment("dp_gather", 0), Moment("forward", 4)]
    assert packed(history) == "forward 8 16; dp_gather 0; forward 4"
    assert unpacked(packed(history)) == history
    assert unpacked(packed([])) == []


@pytest.fixture(scope="module")
def three() -> dict[str, Step]:
    """AdamW's step, one that stays below its fullest, and one that rises above it."""
    kept = dict.fromkeys(model_states.KINDS, 1000)
    less = kept | {"exp_avg": 0}
    passes, update = [Moment("forward", 800)], [Moment("update", 0), Moment("apply", 200)]
    low, high = ([Moment("newton_schulz", alive)] for alive in (1600, 3000))
    return {
        "AdamW, ours": (kept, passes + update),
        "waves": (less, passes + update[:1] + low + update),
        "all": (less, passes + high),
    }


def heights(frame: player.Frame, name: str) -> tuple[float, float, float]:
    """Return how many points the ground, the highest point and the dashes are above the bottom of a step's plot."""
    (kept,) = boxes(frame.figure, f"kept-{name}")
    floor = kept.get_bbox().y1
    highest = max(floor - alive.get_bbox().y0 for alive in boxes(frame.figure, f"alive-{name}"))
    (dashes,) = lines(frame.figure, f"level-{name}")
    return floor - kept.get_bbox().y0, highest, floor - dashes.get_segments()[0][0][1]


def test_every_step_has_a_frame_whose_title_says_how_it_ends(three: dict[str, Step]) -> None:
    sentences = {"AdamW, ours": "It is first.", "all": "All is whole at once."}
    alone, waves, all_at_once = frames_of_steps(three, sentences)
    adamw = "AdamW, ours keeps 7 kB, fullest 7.8 kB, in the forward pass"
    titles = "AdamW, ours: 7.8 kB at its fullest", "waves: 0.2 kB below AdamW", "all: 1.2 kB above AdamW"
    assert alone[1:] == (f"{titles[0]}. {adamw}.", "Fullest in the forward pass: 7.8 kB. It is first.")
    assert waves[1:] == (
        f"{titles[1]}. {adamw}; waves keeps 6 kB, fullest 7.6 kB, in Newton–Schulz.",
        "Fullest in Newton–Schulz: 7.6 kB, 3 % less than AdamW.",
    )
    assert all_at_once[1:] == (
        f"{titles[2]}. {adamw}; all keeps 6 kB, fullest 9 kB, in Newton–Schulz.",
        "Fullest in Newton–Schulz: 9 kB, 15 % more than AdamW. All is whole at once.",
    )
    for frame, title in zip((alone, waves, all_at_once), titles, strict=True):
        assert texts(frame.figure)[0] == title
        assert texts(frame.figure).count("AdamW's fullest: 7.8 kB") == 1
    numbers = [[text for text in texts(frame.figure) if text[0] in "+−"] for frame in (alone, waves, all_at_once)]
    assert numbers == [[], ["−0.2 kB"], ["+1.2 kB"]]


def test_both_plots_of_all_frames_have_one_scale(three: dict[str, Step]) -> None:
    frames = frames_of_steps(three)
    assert len({tuple(frame.figure.get_size_inches()) for frame in frames}) == 1
    (adamw,) = {heights(frame, "AdamW, ours") for frame in frames}  # it does not move
    ground, fullest, dashes = adamw
    assert fullest == pytest.approx(dashes)
    kilobyte = (fullest - ground) / 0.8
    for frame, name, beyond in zip(frames[1:], ("waves", "all"), (-0.2, 1.2), strict=True):
        below, highest, level = heights(frame, name)
        assert level == pytest.approx(dashes)
        assert highest - level == pytest.approx(beyond * kilobyte)
        assert ground - below == pytest.approx(kilobyte)
        (upper,), (lower,) = (boxes(frame.figure, f"kept-{which}") for which in ("AdamW, ours", name))
        assert upper.get_bbox().y1 < lower.get_bbox().y0 - highest + below
        assert upper.get_bbox().extents[::2] == pytest.approx(lower.get_bbox().extents[::2])
    assert {box.get_gid() for box in boxes(frames[0].figure, "kept-")} == {"kept-AdamW, ours"}


def foot_and_head(frame: player.Frame, name: str) -> tuple[float, float]:
    """Return how far the foot of the signed number, and its head, are above the bottom of the plot."""
    (number,) = (text for text in frame.figure.axes[0].texts if text.get_text()[0] in "+−")
    (kept,) = boxes(frame.figure, f"kept-{name}")
    head = kept.get_bbox().y1 - number.get_position()[1]
    return head - number.get_fontsize(), head


def test_a_number_stands_on_its_highest_point_and_never_across_the_dashes(three: dict[str, Step]) -> None:
    for frame, name in zip(frames_of_steps(three)[1:], ("waves", "all"), strict=True):
        _, highest, level = heights(frame, name)
        assert max(highest, level) < foot_and_head(frame, name)[0] < max(highest, level) + 4
    kept, history = three["waves"]
    lean = kept, [Moment(moment.stage, moment.alive // 2) for moment in history]
    frame = frames_of_steps(three | {"lean": lean})[-1]
    _, highest, level = heights(frame, "lean")
    foot, head = foot_and_head(frame, "lean")
    assert highest < foot < highest + 4 < head < level


def test_frames_of_steps_are_readable_and_always_the_same(three: dict[str, Step]) -> None:
    stored = results.load("memory")["timelines"]
    long = three | {"waves of whole matrices, bucket after bucket": three["waves"]}  # whose title takes two rows
    for steps in (three, long, {CONTENDERS[name].title: stored_step(step) for name, step in stored.items()}):
        for frame in (frames := frames_of_steps(steps)):
            style.require_readable(frame.figure, frame.alt)
            assert_readable(frame.figure)
        assert player.html("steps", frames) == player.html("steps", frames_of_steps(steps))


def test_what_is_no_picture_of_memory_is_answered_in_a_sentence(three: dict[str, Step]) -> None:
    kept, history = three["waves"]
    with pytest.raises(ValueError, match="two or more"):
        frames_of_steps({"alone": (kept, history)})
    with pytest.raises(ValueError, match="a history of its update"):
        frames_of_steps({"a": (kept, history), "b": (kept, history[:1])})
    with pytest.raises(ValueError, match="about 'wave', but the steps are AdamW, ours, waves, all"):
        frames_of_steps(three, {"wave": "It is not there."})


def test_a_step_that_is_as_full_as_the_first_is_neither_above_nor_below(three: dict[str, Step]) -> None:
    frames = frames_of_steps({"AdamW, ours": three["AdamW, ours"], "again": three["AdamW, ours"]})
    assert texts(frames[1].figure)[0] == "again: as full as AdamW"
    assert texts(frames[1].figure).count("0.0 kB") == 1


def stored_step(step: dict[str, Any]) -> Step:
    return step["kept"], unpacked(step["history"])


def test_the_stored_steps_are_above_or_below_adamws_fullest() -> None:
    """By as much as their titles say; in the first frame is AdamW alone."""
    steps = {CONTENDERS[name].title: stored_step(step) for name, step in results.load("memory")["timelines"].items()}
    fullest = {name: sum(kept.values()) + max(m.alive for m in history) for name, (kept, history) in steps.items()}
    alone, *others = frames_of_steps(steps)
    assert alone.alt.startswith(f"AdamW, ZeRO-1: {style.in_bytes(fullest['AdamW, ZeRO-1'])} at its fullest. ")
    assert len(others) == len(steps) - 1 == 5
    sides = {}
    for name, frame in zip(list(steps)[1:], others, strict=True):
        beyond = (fullest[name] - fullest["AdamW, ZeRO-1"]) / 1e6
        sides[name] = "above" if beyond > 0 else "below"
        assert frame.alt.startswith(f"{name}: {abs(beyond):.1f} MB {sides[name]} AdamW. ")
        share = f"{abs(beyond) / fullest['AdamW, ZeRO-1'] * 1e8:.0f} % {'more' if beyond > 0 else 'less'}"
        assert frame.caption.endswith(f": {style.in_bytes(fullest[name])}, {share} than AdamW.")
        assert f"{'+' if beyond > 0 else '−'}{abs(beyond):.1f} MB" in texts(frame.figure)
    assert [name for name, side in sides.items() if side == "above"] == [
        "gather all, bucketed",
        "gather all, flat",
        "gather cut",
    ]


# ---- The worker -------------------------------------------------------------------------------------------


def test_the_table_is_printed_and_written(tmp_path: Path) -> None:
    ending = worlds.finish(WORKER, "--dp", "1", "--tp", "5", "--shape", "odd", "--json", f"{tmp_path}/new/13.json")
    assert (ending.code, ending.err) == (0, "")
    assert ending.out.count(": True") == 2
    rows = json.loads((tmp_path / "new" / "13.json").read_text())["rows"]
    assert [row["contender"] for row in rows] == [*ZERO1]
    assert f"{sum(rows[0]['kept'].values()):,}" in ending.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "round"], "--shape round: choose one of film, even, tall, odd"),
        (["--dtype", "int8"], "--dtype int8: choose one of"),
        (["--measure"], "add --json FILE"),
        (["--quick"], "--quick does nothing by itself; it goes with --measure"),
        (["--tp", "3"], "--tp 3 does not divide the model's 8 heads"),
    ],
)
def test_what_does_not_fit_is_answered_in_a_sentence(arguments: list[str], words: str) -> None:
    ending = worlds.answer(WORKER, *arguments)
    assert ending.code == 2
    assert words in ending.err


def test_peaks_by_batch_leave_out_what_the_cpu_alone_borrows() -> None:
    """NCCL needs no room to reduce; so gather cut, too, stays below AdamW's fullest."""
    found = results.load("memory")
    borrowed = {row["contender"]: row["stages"] for row in found["batches"] if row["tokens_per_rank"] == 64}
    assert borrowed["muon_cut"]["reduce_scatter"] == max(borrowed["muon_cut"].values())  # on a CPU
    few, *more = (
        [(peaks[layout].highest.top - peaks["AdamW"].highest.top) / 1e6 for layout in memory_tables.PLANNED]
        for peaks in memory_tables.peaks_of_batches(found).values()
    )
    assert [size > 0 for size in few] == [False, True, True, False, False]
    assert all(size < -3 for sizes in more for size in sizes)
