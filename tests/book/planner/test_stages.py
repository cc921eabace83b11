"""Pipeline stages and experts: who holds what, that nothing is lost or doubled, and what cannot be."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from distmuon.launch import UsageError
from distmuon.optim.newton_schulz import flops
from muonbook.planner import planned_baselines
from muonbook.planner.choices import search
from muonbook.planner.fabrics import FABRICS, NODE
from muonbook.planner.model_shapes import MODELS, Experts, Shape
from muonbook.planner.parts import every_rank
from muonbook.planner.stages import Degrees, all_degrees, check_degrees, stage_of, stages, tp_choices
from muonbook.planner.world_plan import HELD, KEPT, OPTIMIZERS, StagePlan, WorldPlan, WorldSetting

SMALL = replace(
    MODELS["moonlight"], layers=5, width=256, mlp=512, vocabulary=1000, context=64,
    experts=Experts(routed=12, active=3, width=128, shared=128, dense_layers=1),
)  # fmt: skip
DENSE = replace(MODELS["gpt2"], layers=6, width=192, mlp=768, vocabulary=500, context=32)
GRIDS = [Degrees(4), Degrees(4, 2), Degrees(2, 1, 3), Degrees(4, 2, 2, 2), Degrees(12, 1, 5, 12), Degrees(6, 4, 2, 3)]


def setting(shape: Shape, degrees: Degrees, optimizer: str = "muon", strategy: str = "owner") -> WorldSetting:
    return WorldSetting(shape, degrees, optimizer, strategy, tokens=shape.context * degrees.dp * 4)


@pytest.mark.parametrize("degrees", GRIDS, ids=str)
def test_stages_and_expert_ranks_share_out_every_parameter_once(degrees: Degrees) -> None:
    whole = {weight.name: weight for weight in SMALL.weights()}
    told = stages(SMALL, degrees.pp, degrees.ep)
    assert sorted(number for stage in told for number in stage.numbers) == list(range(degrees.pp))
    dense = sum(len(stage.numbers) * len(stage.dense) for stage in told)
    experts = sum(len(stage.numbers) * len(stage.experts) for stage in told) * degrees.ep
    assert dense + experts == len(whole)
    assert sum(len(stage.numbers) * stage.layers for stage in told) == SMALL.layers
    assert sum(len(stage.numbers) * stage.active for stage in told) == pytest.approx(SMALL.active, abs=degrees.pp)


def test_the_embedding_is_in_the_first_stage_and_the_head_in_the_last() -> None:
    assert [stage_of(name, 7, 3) for name in ("tokens", "blocks.0.up", "blocks.6.up", "norm.weight", "head")] == [
        0, 0, 2, 2, 2,
    ]  # fmt: skip
    first, *_, last = stages(DENSE, 3, 1)  # tied
    assert "tokens" in {weight.name for weight in first.dense}
    assert "head" in {weight.name for weight in last.dense}
    assert sum(len(stage.numbers) * stage.active for stage in stages(DENSE, 3, 1)) == DENSE.active


@pytest.mark.parametrize("degrees", GRIDS, ids=str)
@pytest.mark.parametrize("optimizer", ["muon", "muonw"])
def test_newton_schulz_divides_by_stages_and_experts(degrees: Degrees, optimizer: str) -> None:
    """Over all ranks of the world, owners orthogonalize every matrix once, on whatever grid."""
    once = sum(flops(weight.shape) for weight in SMALL.weights() if weight.muon)
    plan = WorldPlan(setting(SMALL, degrees, optimizer))
    assert plan.flops[0] * degrees.ranks == pytest.approx(once, rel=1e-12)
    assert plan.flops[0] <= plan.flops[1] <= once


@pytest.mark.parametrize("degrees", GRIDS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_ranks_hold_adds_up(degrees: Degrees, optimizer: str) -> None:
    """Masters are cut over all DP ranks; whole parameters are on each; FSDP2's padding is all there is beside."""
    plan = WorldPlan(setting(SMALL, degrees, optimizer))
    held = plan.mean_held
    assert set(held) == set(HELD)
    elements = sum(math.prod(weight.shape) for weight in SMALL.weights())
    everywhere = held["parameters"] * degrees.ranks
    if optimizer == "muonw":
        assert 4 * elements <= everywhere
    else:
        assert held["gradients"] == 2 * held["parameters"]
        assert held["master weights"] * degrees.ranks >= 4 * elements
    assert sum(held[kind] for kind in KEPT) < plan.mean_worst <= sum(held.values())
    assert (held["gathered layers"] > 0) == (optimizer == "muonw" and degrees.dp > 1)
    assert plan.fullest[2] >= plan.mean_worst - 1
    assert plan.held["parameters"] > 0


UNEVEN = [(SMALL, Degrees(4, 2, 3, 2)), (DENSE, Degrees(4, 1, 6)), (SMALL, Degrees(6, 2, 2, 3))]


@pytest.mark.parametrize(("shape", "degrees"), UNEVEN, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_world_is_as_slow_as_its_slowest_stage_and_as_full_as_its_fullest_rank(
    shape: Shape, degrees: Degrees, optimizer: str
) -> None:
    """Stages that hold the same are planned once, and count as many times; ranks of a stage differ, too."""
    plan = WorldPlan(setting(shape, degrees, optimizer))
    every = [stage for stage in plan.stages for _ in stage.weights.numbers]
    assert len(every) == degrees.pp
    held, sent = [stage.held for stage in every], [np.sum([*stage.sent.values()], axis=0) for stage in every]
    assert plan.fullest[2] == max(each.max() for each in held) > np.mean(held)
    assert plan.mean_worst == pytest.approx(np.mean(held))
    assert plan.most_sent == max(each.max() for each in sent) > np.mean(sent)
    assert sum(mean for mean, _ in plan.sent.values()) == pytest.approx(np.mean(sent))
    for move, (_, most) in plan.sent.items():
        assert most == max(stage.sent[move].max() for stage in every if move in stage.sent)
    flops = [stage.flops for stage in every]
    assert plan.flops == (pytest.approx(np.mean(flops)), np.max(flops))
    passes, updates = ([sum(of(stage).values()) for stage in every] for of in (pass_seconds, update_seconds))
    assert len(set(passes)) > 1
    rounds = plan.setting.micro_batches + degrees.pp - 1
    assert plan.step_seconds == pytest.approx(rounds * max(passes) + max(updates))
    peak = degrees.ranks * plan.setting.device.peak_flops
    assert plan.model_flops_share * plan.step_seconds * peak == pytest.approx(6 * shape.active * plan.setting.tokens)


def pass_seconds(stage: StagePlan) -> dict[str, float]:
    return stage.pass_seconds()


def update_seconds(stage: StagePlan) -> dict[str, float]:
    return stage.update_seconds()


def test_a_tied_embedding_and_shared_out_experts_take_their_time() -> None:
    """Over the links that they have: the table between first and last stage, experts between ranks E apart."""
    plan = WorldPlan(setting(DENSE, Degrees(4, 1, 3)))
    first, link = plan.stages[0], plan.setting.fabric.ring(2, 4)
    table = 4 * 512 * DENSE.width  # 500 tokens and padding, in float32; an all-reduce of two sends all of it once
    assert first.update_seconds()["tied embedding"] == pytest.approx(table / link.bytes_per_second)
    plan = WorldPlan(setting(SMALL, Degrees(24, 1, 1, 12)))  # the two that hold the same experts are in two nodes
    (stage,), fabric = plan.stages, plan.setting.fabric
    links = {"": fabric.ring(24, 1), "expert ": fabric.ring(2, 12)}
    assert links["expert "] != fabric.ring(2, 1)
    took = []
    for name, link in links.items():
        part = stage.parts[name]
        assert isinstance(part, every_rank.Zero1Part)
        took.append(every_rank.outer_messages(part.world)["gradients"].seconds({"dp": link}))
    assert stage.update_seconds()["gradients"] == pytest.approx(sum(took))


def test_activations_are_gone_when_an_update_begins() -> None:
    """The worst moment is one of the two, on the fullest rank: here the update's, with long sequences the passes'."""
    long = replace(DENSE, context=64 * DENSE.context)
    for shape, there, absent in ((DENSE, "while stepping", "activations"), (long, "activations", "while stepping")):
        asked = setting(shape, Degrees(4))
        plan = WorldPlan(replace(asked, tokens=4 * shape.context))
        assert plan.held[there] > plan.held[absent] > 0
        kept = sum(plan.held[kind] for kind in KEPT)
        assert plan.fullest[2] == pytest.approx(kept + plan.held[there])
        assert sum(plan.held_at_worst.values()) == pytest.approx(plan.fullest[2])


def test_the_bubble_is_that_of_1f1b() -> None:
    plan = WorldPlan(setting(DENSE, Degrees(2, 1, 3)))  # four micro-batches
    assert plan.bubble == 2 / (4 + 2)
    seconds = plan.seconds
    passes = sum(seconds[name] for name in ("forward, backward", "activations (pp)"))
    assert seconds["bubble"] == pytest.approx(passes * 2 / 4)
    assert "bubble" not in WorldPlan(setting(DENSE, Degrees(6))).seconds


def test_more_expert_ranks_hold_less_and_send_tokens() -> None:
    few, many = (WorldPlan(setting(SMALL, Degrees(12, 1, 1, ep))) for ep in (1, 6))
    assert many.held["parameters"] < few.held["parameters"]
    assert ("ep", "tokens") not in few.sent
    mixtures, routed = SMALL.layers - 1, SMALL.experts
    assert routed is not None
    sent = 4 * mixtures * 4 * SMALL.context * SMALL.width * 2 * routed.active * 5 / 6  # calls, micro-batches, bf16
    assert many.sent["ep", "tokens"] == (pytest.approx(sent), pytest.approx(sent))


def test_an_exchange_within_a_node_stays_there_and_beyond_it_shares_the_way() -> None:
    fabric = FABRICS["nvlink_infiniband"]
    assert fabric.exchange(4, 2) == fabric.inside
    link = fabric.exchange(16, 1)
    outside = 8 / 15  # of what a rank sends
    assert link.bytes_per_second == pytest.approx(fabric.between.bytes_per_second / NODE / outside)
    assert fabric.exchange(4, 8).bytes_per_second == fabric.between.bytes_per_second / NODE


def over_tp(plan: WorldPlan) -> float:
    """Return what a rank sends over TP for activations, in the units of one half of an all-reduce."""
    setting = plan.setting
    tokens = setting.tokens // setting.degrees.dp
    half = tokens * setting.shape.width * 2 * (setting.degrees.tp - 1) / setting.degrees.tp  # bf16
    mean, most = plan.sent["tp", "activations"]
    assert mean == most
    return mean / half


def test_recomputing_trades_memory_for_work_and_bytes() -> None:
    plain = WorldPlan(setting(DENSE, Degrees(4, 2)))
    again = WorldPlan(replace(plain.setting, recompute=True))
    assert again.held["activations"] < plain.held["activations"]
    assert again.seconds["forward, backward"] == pytest.approx(plain.seconds["forward, backward"] * 8 / 6)
    assert over_tp(plain) == pytest.approx(2 * (4 * DENSE.layers + 2))
    assert over_tp(again) == pytest.approx(2 * (6 * DENSE.layers + 2))
    plain = WorldPlan(setting(SMALL, Degrees(12, 1, 1, 6)))
    again = WorldPlan(replace(plain.setting, recompute=True))
    assert again.sent["ep", "tokens"][0] == pytest.approx(1.5 * plain.sent["ep", "tokens"][0])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shape", [DENSE, SMALL])
def test_sequence_parallelism_cuts_activations_and_gathers_them_again(shape: Shape, recompute: bool) -> None:
    plain = WorldPlan(replace(setting(shape, Degrees(4, 2)), recompute=recompute))
    cut = WorldPlan(replace(plain.setting, sequence_parallel=True))
    whole = WorldPlan(replace(plain.setting, degrees=Degrees(4, 1)))
    assert cut.held["activations"] == pytest.approx(whole.held["activations"] / 2)  # logits too
    assert cut.held["activations"] < plain.held["activations"]
    assert over_tp(cut) - over_tp(plain) == pytest.approx(2 * shape.layers + 1)  # and before the head
    kept = [{kind: plan.held[kind] for kind in KEPT} for plan in (plain, cut)]
    assert kept[0] == kept[1]


def test_sequence_parallelism_passes_on_a_part_of_a_sequence() -> None:
    plain = WorldPlan(setting(DENSE, Degrees(2, 2, 3)))
    cut = WorldPlan(replace(plain.setting, sequence_parallel=True))
    assert cut.sent["pp", "activations"][0] == pytest.approx(plain.sent["pp", "activations"][0] / 2)


def test_a_sequence_that_t_does_not_divide_is_refused_where_it_is_cut() -> None:
    odd = replace(DENSE, context=DENSE.context + 1)
    asked = setting(odd, Degrees(4, 2))
    assert WorldPlan(asked).held["activations"] > 0
    with pytest.raises(UsageError, match=r"--sequence-parallel: --tp 2 does not divide a sequence of [\d,]+; choose"):
        WorldPlan(replace(asked, sequence_parallel=True))


# ---- What cannot be -------------------------------------------------------------------------------------------


def test_every_division_that_is_offered_can_be() -> None:
    found = list(all_degrees(SMALL, 24, 8))
    assert len(found) == len(set(found)) > 10
    for degrees in found:
        check_degrees(SMALL, degrees)
        assert degrees.ranks == 24
    assert tp_choices(SMALL) == [1, 2, 4, 8, 16]


# ---- What would fit -------------------------------------------------------------------------------------------


def test_a_search_finds_the_quickest_of_a_small_world() -> None:
    """Every division that fits is really planned here: the rule of thumb has not lost the best one."""
    begun = WorldSetting(MODELS["llama3_8b"], Degrees(0))
    plans = [WorldPlan(replace(begun, degrees=degrees)) for degrees in all_degrees(begun.shape, 32, 8)]
    quickest = min((plan for plan in plans if plan.fits), key=lambda plan: plan.step_seconds)
    found = search(begun, 32)
    assert found.plans[0].setting == quickest.setting
    assert found.possible >= found.roomy >= len(found.plans) > 1
    took = [plan.step_seconds for plan in found.plans]
    assert took == sorted(took)
    assert all(plan.fits and plan.setting.degrees.ranks == 32 for plan in found.plans)


def test_a_search_lays_out_what_it_plans_and_nothing_else() -> None:
    """The rule of thumb knows no layout: it is asked of every division, and a layout takes longer than all the rest."""
    with mock.patch.object(planned_baselines, "plan_part", wraps=planned_baselines.plan_part) as laid_out:
        found = search(WorldSetting(MODELS["moonlight"], Degrees(0)), 64)
    assert len(found.plans) <= laid_out.call_count < found.roomy


def test_a_search_without_a_place_says_so() -> None:
    with pytest.raises(UsageError, match=r"--ranks 8: of \d+ divisions none fits H100 80 GB; choose more ranks"):
        search(WorldSetting(MODELS["llama3_70b"], Degrees(0)), 8)
    with pytest.raises(UsageError, match=r"--ranks 64: no division of it gives every DP rank a sequence"):
        search(WorldSetting(MODELS["gpt2"], Degrees(0), tokens=100), 64)
