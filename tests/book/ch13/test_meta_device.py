"""Moves weighed without data are those of real steps, and stay under their bounds where no step can be taken."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from distmuon.launch import session
from distmuon.optim import fast_paths
from distmuon.verify.memory_tracker import Moment
from distmuon.verify.prediction import predict_transient
from muonbook.ch13.memory_study import PICTURED
from muonbook.ch13.meta_device import weigh_moves, weigh_worst_moves
from muonbook.ch13.step_memory import unpacked
from muonbook.measure import results
from muonbook.planner.model_shapes import MODELS, local_specs
from muonbook.planner.owned_worlds import plan_part
from muonbook.planner.planned_worlds import BUCKET_RULES
from muonbook.planner.stages import stages
from muonbook.runnable_baselines import MUON_LAYOUTS


def moves(history: list[Moment]) -> list[list[Moment]]:
    """Return the moments of every bucket's move, in order: from its first momentum to its last all_gather."""
    found, begin = [], None
    for n, (moment, after) in enumerate(zip(history, [*history[1:], None], strict=True)):
        if begin is None and moment.stage == "momentum":
            begin = n  # of the first wave, which further ones follow
        if begin is not None and moment.stage == "all_gather" and (after is None or after.stage != "all_gather"):
            found.append(history[begin : n + 1])
            begin = None
    assert found
    return found


@pytest.mark.parametrize("name", MUON_LAYOUTS)
def test_a_move_takes_as_much_as_with_data_to_the_byte(name: str) -> None:
    """Of a stored step, whose moments also count what stands beside a move: what the first has, which begins it."""
    layout, muon = MUON_LAYOUTS[name].plan(PICTURED, 4, 1)
    real = moves(unpacked(results.load("memory")["timelines"][name]["history"]))
    weighed = weigh_moves(layout, muon, 1, MUON_LAYOUTS[name].strategy, [0], "float32")
    assert weighed == max(moment.alive - move[0].alive for move in real for moment in move)
    assert not dist.is_initialized()


@pytest.fixture
def batches_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is weighed on this CPU go through Newton–Schulz together as it would on a GPU, of which bounds are."""
    monkeypatch.setattr(fast_paths, "BATCHED_ON_CPU", fast_paths.BATCHED_ON_GPU)


@pytest.mark.usefixtures("batches_of_a_gpu")
@pytest.mark.parametrize("strategy", ["gather_all", "gather_cut", "owner"])
def test_a_world_too_large_to_start_stays_under_its_bound(strategy: str) -> None:
    dp, tp = 8, 2
    specs, muon = local_specs(stages(MODELS["llama3_8b"], 4, 1)[0].dense, tp)
    world = plan_part(specs, muon, dp, tp, 1 << 26, strategy)
    _, heaviest = weigh_worst_moves(world.layout, world.muon, tp, strategy)
    every = weigh_moves(world.layout, world.muon, tp, strategy, range(dp), "bfloat16")
    bound = max(predict_transient(world.layout, tp, d, world.muon, strategy, None, "bfloat16", True) for d in range(dp))
    assert 0.95 * every < heaviest <= every <= bound  # the rank with the largest bound need not be the fullest


@pytest.mark.usefixtures("batches_of_a_gpu")
@pytest.mark.parametrize(
    ("strategy", "rule", "most"),
    [("gather_all", "megatron", 1.5), ("gather_cut", "flat", 1.8), ("owner", "megatron", 2.6)],
)
def test_bounds_of_a_published_model_are_near_what_is_weighed(strategy: str, rule: str, most: float) -> None:
    """Chapter 15's limits say how near."""
    specs, muon = local_specs(stages(MODELS["moonlight"], 1, 1)[0].dense, 2)
    world = plan_part(specs, muon, 16, 2, BUCKET_RULES[rule](16), strategy)
    _, weighed = weigh_worst_moves(world.layout, world.muon, 2, strategy)
    assert weighed <= world.transient_bytes <= most * weighed


def test_a_process_that_has_a_group_is_refused() -> None:
    layout, muon = MUON_LAYOUTS["muon"].plan(PICTURED, 4, 1)
    with session.environment(session.directory()):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            with pytest.raises(RuntimeError, match="this process has a process group already"):
                weigh_moves(layout, muon, 1, "gather_all", [0], "float32")
        finally:
            dist.destroy_process_group()
