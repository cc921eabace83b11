"""The roofline page: its formulas against each other, against laid-out plans, and what its sentences say."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from distmuon.optim.newton_schulz import flops
from muonbook.planner.algorithms import ALGORITHMS
from muonbook.planner.fabrics import ADAPTER, PEAK_FLOPS
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import WorldPlan, WorldSetting
from tools.pages import roofline_parts
from tools.pages.roofline import LAYOUTS, PRESETS, Matrices, Step

PAGE = (Path(__file__).resolve().parents[2] / "book" / "roofline.md").read_text(encoding="utf-8")
TOKENS = 1 << 22
PLANNED = {"gather_all": "flat", "owner": "owner", "muonw": "muonw"}
GRIDS = [(8, 1), (16, 4), (64, 1), (256, 1)]
PADDED = [("owner", 128, 4), ("owner", 1024, 1)]  # the shards of the last are seven times as long as the matrices


@cache
def planned(dp: int, tp: int, layout: str, adamw: bool = False) -> WorldPlan:
    """Llama 2 7B, whose query, key and value heads are as many, as the page has every model."""
    algorithm = ALGORITHMS[PLANNED[layout]]
    setting = WorldSetting(MODELS["llama2_7b"], Degrees(dp, tp, 1, 1), tokens=TOKENS)
    return WorldPlan(setting.by(algorithm.adamw if adamw else algorithm))


def step(dp: int, tp: int, layout: str) -> Step:
    shape = MODELS["llama2_7b"]
    return Step(
        shape.layers, shape.width, shape.mlp, shape.vocabulary, tokens=TOKENS, dp=dp, tp=tp, layout=layout
    )  # fmt: skip


@pytest.mark.parametrize(("layout", "dp", "tp"), [*((layout, *grid) for layout in LAYOUTS for grid in GRIDS), *PADDED])
def test_the_envelope_holds_within_five_per_cent_of_a_laid_out_plan(layout: str, dp: int, tp: int) -> None:
    ours, plan, adamw = step(dp, tp, layout), planned(dp, tp, layout), planned(dp, tp, layout, adamw=True)
    assert ours.newton_schulz_flops / ours.ranks == pytest.approx(plan.flops[0], rel=0.05)
    if layout == "owner":  # gather_all knows an average rank alone, and MuonW's waves are dealt out one by one
        assert ours.newton_schulz_seconds * 400e12 == pytest.approx(plan.flops[1], rel=0.05)
    moved = {group: sum(mean for (g, move), (mean, _) in plan.sent.items() if g == group and move in MUONS) for group in
             ("dp", "tp", "mesh")}  # fmt: skip
    padding = sent_by_zero1(plan) - sent_by_zero1(adamw) if layout == "owner" else 0
    assert ours.muon_dp_bytes == pytest.approx(moved["dp"] + moved["mesh"] + padding, rel=0.05)
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


def test_the_block_on_the_page_is_the_formula() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(block, names)
    (said,) = re.findall(r"# (0\.\d+), half a per cent", block)
    assert float(said) == pytest.approx(names["share"], rel=0.01)
    for a, b in ((4, 4), (128, 512)):
        assert names["newton_schulz_flops"](a, b) == flops((a, b))
        assert names["share_of_passes"](a, b, 100) == pytest.approx(5 * a / 300 * (2 + a / b))
    assert names["share_of_passes"](64, 64, 1000) == pytest.approx(5 * 64 / 1000)


def test_what_the_page_says_in_numbers_follows_from_its_assumptions() -> None:
    _, many = PRESETS["1t"]
    attention = sum(matrices.number for matrices in many.stage(many.parts[0]))
    assert f"{attention} attention matrices and {many.dp} DP ranks" in PAGE
    assert f"{many.dp - attention} ranks hold nothing but padding" in PAGE
    memory = 3.35e12
    assert "989 / 3.35 = 295" in PAGE
    assert round(PEAK_FLOPS / memory) == 295
    assert "a \\ge 590" in PAGE
    assert 2 * 295 == 590
    assert f"it takes {roofline_parts.REACHED / ADAPTER.bytes_per_second:,.0f} tokens per rank" in PAGE
    lanes = roofline_parts.REACHED / (roofline_parts.LINKS["PCIe 4, 4 lanes"] * 1e9)
    assert f"about {round(lanes, -3):,.0f}" in PAGE


def test_the_calculator_asks_for_all_that_a_step_is_made_of() -> None:
    assert set(roofline_parts.FIELDS) == set(Step.__dataclass_fields__) - {"layout"}
