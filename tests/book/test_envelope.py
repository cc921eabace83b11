"""The envelope page: its formulas against each other, against laid-out plans, and what its sentences say."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache

import pytest
import stored_pages

from distmuon.optim.newton_schulz import flops
from muonbook.measure import results
from muonbook.planner.fabrics import ADAPTER, INFINIBAND, PEAK_FLOPS
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.planned_baselines import PLANNED_BASELINES
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import WorldPlan, WorldSetting
from tools.pages import envelope_parts, roofline_picture
from tools.pages.envelope import LAYOUTS, PRESETS, Matrices, Step, by_layout
from tools.pages.envelope_parts import in_bytes, percent

PAGE = (stored_pages.ROOT / "book" / "envelope.md").read_text(encoding="utf-8")
TOKENS = 1 << 22
PLANNED = {"gather_all": "muon_flat", "gather_cut": "muon_cut", "owner": "muon_owner", "muonw": "muonw"}
GRIDS = [(8, 1), (16, 4), (256, 1)]
PADDED = [("owner", 128, 4), ("owner", 1024, 1)]  # the shards of the last are seven times as long as the matrices


@cache
def planned(model: str, dp: int, tp: int, pp: int, layout: str, adamw: bool = False) -> WorldPlan:
    baseline = PLANNED_BASELINES[PLANNED[layout]]
    setting = WorldSetting(MODELS[model], Degrees(dp, tp, pp, 1), tokens=TOKENS)
    return WorldPlan(setting.by(baseline.adamw if adamw else baseline))


def step(model: str, dp: int, tp: int, pp: int, layout: str) -> Step:
    shape = MODELS[model]
    return Step(
        shape.layers, shape.width, shape.mlp, shape.vocabulary, shape.heads, shape.key_heads, tokens=TOKENS,
        dp=dp, tp=tp, pp=pp, layout=layout,
    )  # fmt: skip


WORLDS = [
    *(("llama2_7b", dp, tp, 1, layout) for layout in LAYOUTS for dp, tp in GRIDS),
    *(("llama2_7b", dp, tp, 1, layout) for layout, dp, tp in PADDED),
    *(("llama3_70b", 128, 8, 1, layout) for layout in LAYOUTS),
    *(("llama3_70b", 16, 8, 4, layout) for layout in LAYOUTS[:2]),  # its stages are not all alike, for owners' padding
]


@pytest.mark.parametrize(("model", "dp", "tp", "pp", "layout"), WORLDS)
def test_the_envelope_holds_within_five_per_cent_of_a_laid_out_plan(
    model: str, dp: int, tp: int, pp: int, layout: str
) -> None:
    world = model, dp, tp, pp, layout
    ours, plan, adamw = step(*world), planned(*world), planned(*world, adamw=True)
    assert ours.newton_schulz_flops / ours.ranks == pytest.approx(plan.flops[0], rel=0.05)
    if layout == "owner":  # the others' plans know more: who is busiest, and MuonW's waves
        assert ours.newton_schulz_seconds * 400e12 == pytest.approx(plan.flops[1], rel=0.05)
    moved = {group: sum(mean for (g, move), (mean, _) in plan.sent.items() if g == group and move in MUONS) for group in
             ("dp", "tp", "mesh")}  # fmt: skip
    padding = sent_by_zero1(plan) - sent_by_zero1(adamw) if layout == "owner" else 0
    near = 0.15 if layout == "gather_cut" else 0.05  # few boundaries: it matters which matrices they cut
    assert ours.muon_dp_bytes == pytest.approx(moved["dp"] + moved["mesh"] + padding, rel=near)
    assert ours.muon_tp_bytes == pytest.approx(moved["tp"], rel=0.05)
    for found, kept in ((ours.muon_kept, plan), (ours.adamw_kept, adamw)):
        states = ("parameters", "gradients", "master weights", "optimizer state")
        assert found == pytest.approx(sum(kept.mean_held[kind] for kind in states), rel=0.05)
    assert ours.pass_seconds == pytest.approx(
        plan.seconds["forward, backward"] * plan.setting.fabric.flops_per_second / 400e12, rel=0.05
    )
    if layout != "muonw":  # under FSDP2 a plan gathers for every micro-batch, the envelope once
        assert ours.adamw_bytes == pytest.approx(sent_by_zero1(adamw), rel=0.05)


MUONS = ("momentum", "updates")


def sent_by_zero1(plan: WorldPlan) -> float:
    """Return the bytes of gradients and parameters that an average rank sends."""
    return sum(mean for (_, move), (mean, _) in plan.sent.items() if move in ("gradients", "parameters"))


@pytest.mark.parametrize("shape", [(4, 4), (4, 11), (128, 512)])
def test_operations_are_those_of_newton_schulz(shape: tuple[int, int]) -> None:
    assert Matrices(*shape, 1, 1.0).flops == flops(shape)


def test_experts_that_are_spread_are_held_and_sent_by_fewer_ranks() -> None:
    _, sharded = PRESETS["1t"]
    together = replace(sharded, ep=1)
    assert (sharded.pass_flops, sharded.newton_schulz_flops) == (together.pass_flops, together.newton_schulz_flops)
    assert sharded.adamw_bytes < together.adamw_bytes / 10
    assert sharded.muon_kept < together.muon_kept / 7  # owners pad either


def test_one_matrix_is_the_least_that_an_owner_takes() -> None:
    few = Step(1, 1024, 1024, 1000, dp=64)
    assert few.newton_schulz_seconds == flops((1024, 1024)) / 400e12
    assert few.newton_schulz_flops / few.ranks < flops((1024, 1024))


def test_the_blocks_on_the_page_are_the_formula() -> None:
    names = stored_pages.run_blocks("envelope.md")
    (said,) = re.findall(r"# (0\.\d+), half a per cent", PAGE)
    assert float(said) == pytest.approx(names["share"], rel=0.01)
    for a, b in ((4, 4), (128, 512)):
        assert names["newton_schulz_flops"](a, b) == flops((a, b))
        assert names["share_of_passes"](a, b, 100) == pytest.approx(5 * a / 300 * (2 + a / b))
    assert names["share_of_passes"](64, 64, 1000) == pytest.approx(5 * 64 / 1000)


def test_what_the_page_says_in_numbers_follows_from_its_assumptions() -> None:
    _, many = PRESETS["1t"]
    attention = sum(matrices.number for matrices in many.stage(many.parts[0]))
    assert f"{attention} attention matrices and {many.dp} DP ranks" in PAGE
    assert f"so {many.dp - attention} of the {many.dp} shards of these are nothing but padding" in PAGE
    owner = replace(many, layout="owner")
    slow, quick = (
        (owner.newton_schulz_seconds + owner.muon_dp_bytes / link.bytes_per_second) / owner.adamw_seconds
        for link in (ADAPTER, INFINIBAND)
    )
    assert f"the {100 * slow:.1f} per cent would be about {100 * quick:.1f}." in PAGE
    memory = 3.35e12
    least = [
        next(a for a in range(1, 1000) if roofline_picture.intensity(a, max(a, width)) >= PEAK_FLOPS / memory)
        for width in (0, 1 << 30)
    ]
    assert f"a \\ge {least[0]}." in PAGE
    assert f"For a very wide matrix {least[1]} suffices." in PAGE
    assert f"less than the {3 * PEAK_FLOPS / memory:.0f} that" in PAGE
    dense, experts = (part.hidden / part.local * (part.dp - 1) / part.dp for part in many.parts)
    assert experts > 3 * dense


def test_what_the_page_says_of_experts_overlap_and_other_machines_follows_from_its_formulas() -> None:
    seventy, trillion = (PRESETS[name][1] for name in ("70b", "1t"))
    (experts,) = trillion.parts[1].matrices
    assert f"8 of 384 experts, their share is {1 / experts.share:.0f} times as large" in PAGE
    flat, owner = replace(seventy, layout="gather_all"), replace(trillion, layout="owner")
    adds, hidden = percent(flat.share), percent(flat.newton_schulz_seconds / flat.pass_seconds)
    newton_schulz, passes = f"{1000 * flat.newton_schulz_seconds:.0f} ms", f"{flat.pass_seconds:.2f} s"
    sent = in_bytes(flat.muon_dp_bytes), in_bytes(flat.muon_tp_bytes)
    took = f"{flat.muon_seconds - flat.newton_schulz_seconds:.2f} s"
    assert (
        "adds {} of Newton–Schulz, {} over DP and {} over TP, which take {}, and".format(newton_schulz, *sent, took)
        in PAGE
    )
    others = passes, f"{flat.adamw_seconds - flat.pass_seconds:.2f} s", f"{flat.adamw_bytes / 1e9:.1f} GB"
    assert "consists of {} for the passes and {} for its {}.".format(*others) in PAGE
    assert f"all that together is {adds[:-2]} per cent" in PAGE
    assert f"{newton_schulz} on {passes} would be left, and that is {round(float(hidden[:-2]))} per cent" in PAGE
    assert flat.adamw_bytes + flat.muon_dp_bytes < flat.dp_link * 1e9 * flat.pass_seconds  # so that it can hide
    kept = [in_bytes(each) for each in (owner.muon_kept, owner.adamw_kept)]
    assert "They need {} of states, where AdamW needs {}.".format(*kept) in PAGE
    moonlight = MODELS["moonlight"]
    assert moonlight.experts is not None
    a, b, seen = moonlight.experts.width, moonlight.width, 1e6 * moonlight.experts.active / moonlight.experts.routed
    assert (a, b, f"{seen:,.0f}") == (1408, 2048, "93,750")
    assert f"= {percent(5 * a / (3 * seen) * (2 + a / b))}. All tokens" in PAGE


def test_what_the_page_says_of_shards_and_the_busiest_rank_is_planned() -> None:
    sizes = [math.prod(weight.shape) for weight in MODELS["llama3_70b"].weights() if weight.muon]
    assert f"would add {len(sizes) * max(sizes) / sum(sizes) - 1:.0%}".replace("%", " per cent") in PAGE
    _, seventy = PRESETS["70b"]
    once = seventy.parts[0].newton_schulz_flops / seventy.ranks / seventy.tflops / 1e12
    assert f"all 1,024 GPUs, it would take {1000 * once:.0f} ms" in PAGE
    longest, owner_takes = flops((8192, 28672)) / 400e12, replace(seventy, layout="owner").newton_schulz_seconds
    assert (longest, f"it takes {1000 * longest:.0f} ms" in PAGE) == (owner_takes, True)
    assert f"There are {len(sizes)} matrices, so {seventy.ranks - len(sizes)} of the GPUs own none" in PAGE
    assert round(replace(seventy, layout="gather_all").newton_schulz_seconds / once) == 11
    lies_on = [PRESETS[name][1].parts[0].owners for name in ("1b", "7b", "70b")]
    assert f"between {lies_on[1]:.2f} and {lies_on[2]:.2f} for the dense models" in PAGE
    assert f"lies on {lies_on[2]:.2f} DP ranks" in PAGE


def test_what_the_page_says_of_one_node() -> None:
    found = by_layout(PRESETS["1b"][1]).values()
    shares = sorted(float(percent(one.share)[:-2]) for one in found)
    assert f"Muon adds {shares[0]:g} to {shares[-1]:g} per cent" in PAGE
    assert {round((one.adamw_kept - one.muon_kept) / 1e9, 1) for one in found} == {0.5}
    assert "saves half a gigabyte of states" in PAGE


def test_seconds_are_put_right_as_a_gpu_was_measured() -> None:
    rows = {row["shape"]: row for row in results.load("gpu")["speed"]["rows"]}
    wide, middle, large, largest = (
        400 / rows[shape]["tflops"] for shape in ("1024x4096", "2048x5632", "4096x4096", "8192x28672")
    )
    assert 3 < wide < 4
    assert middle == pytest.approx(4 / 5, abs=0.03)
    assert (large, largest) == pytest.approx((2 / 3, 2 / 3), abs=0.05)


def test_ranks_that_divide_the_layers_pad_nothing() -> None:
    for name in ("1b", "7b", "70b"):
        _, one = PRESETS[name]
        for dp in (dp for dp in range(2, one.layers + 1) if one.layers % dp == 0):
            (part,) = replace(one, dp=dp, layout="owner").parts
            assert replace(one, dp=dp, layout="owner").padded(part) == part.hidden / part.local


def test_what_is_gathered_flat_is_all_momentum_of_a_tp_rank() -> None:
    (part,) = PRESETS["70b"][1].parts
    assert f"which is {2 * part.hidden / part.local / 1e9:.0f} GB more" in PAGE


def test_a_busy_rank_is_planned() -> None:
    (mean, most), (_, owner), (_, waves) = (
        planned("llama3_8b", 64, 2, 1, layout).flops for layout in ("gather_all", "owner", "muonw")
    )
    assert f"{100 * (most / mean - 1):.0f} per cent more work than the average one" in PAGE
    assert f"{100 * (waves / owner - 1):.0f} per cent more than the busiest owner" in PAGE


def test_bytes_that_a_rank_keeps_are_those_of_the_table() -> None:
    """Of a model whose hidden matrices are nearly all of it, without padding."""
    for layout, dp, sizes, adamw, muon in [
        ("gather_all", 1, {"parameter": 4}, 16, 12), ("gather_all", 1, {}, 18, 14),
        ("gather_all", 8, {}, 6 + 12 / 8, 6 + 8 / 8), ("gather_all", 8, {"parameter": 4}, 8 + 8 / 8, 8 + 4 / 8),
        ("muonw", 8, {}, 16 / 8, 12 / 8),
    ]:  # fmt: skip
        one = Step(8, 512, 512, 1, dp=dp, layout=layout, **sizes)
        elements = one.parts[0].hidden
        assert (one.adamw_kept / elements, one.muon_kept / elements) == pytest.approx((adamw, muon), rel=1e-3)


def test_the_calculator_asks_for_all_that_a_step_is_made_of() -> None:
    assert set(envelope_parts.FIELDS) == set(Step.__dataclass_fields__) - {"layout"}
