"""The accounting page: its blocks print what stands under them, and its sentences follow from them and the planner."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import stored_pages

from muonbook.planner.fabrics import DEVICES, PEAK_FLOPS
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.parts.activations import StageActivations
from muonbook.planner.stages import Degrees, stages

PAGE = (stored_pages.ROOT / "book" / "accounting.md").read_text(encoding="utf-8")
SEVEN, SEVENTY = MODELS["llama2_7b"], MODELS["llama3_70b"]


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the page's blocks define; each has printed what the page shows."""
    return stored_pages.run_blocks("accounting.md")


def says(*sentences: str) -> None:
    assert [sentence for sentence in sentences if sentence not in PAGE] == []


def test_shares_of_parameters_and_operations(names: dict[str, Any]) -> None:
    width, mlp, layers = SEVEN.width, SEVEN.mlp, SEVEN.layers
    parameters = sum(parameter.numel() for parameter in names["model"].parameters())
    assert parameters == sum(math.prod(weight.shape) for weight in SEVEN.weights())
    tables = 2 * SEVEN.vocabulary * width
    says(
        f"| {4 * width**2 / 1e6:.0f} million |", f"| {3 * width * mlp / 1e6:.0f} million |",
        f"| {(4 * width**2 + 3 * width * mlp + 2 * width) / 1e6:.0f} million |", f"| {tables / 1e6:.0f} million |",
        f"the output head are {100 * tables / parameters:.0f} per cent here",
        f"explains {100 * 6 * names['weights'] * 4096 / names['counted']:.0f} per cent of what torch counted",
    )  # fmt: skip
    assert 3 * width * mlp / (4 * width**2 + 3 * width * mlp) == pytest.approx(2 / 3, abs=0.01)
    assert 12 * layers * width * 4096 / (6 * names["weights"]) == pytest.approx(1 / 6, abs=0.01)
    assert round(6 * width, -3) == 25_000
    assert 4 + 3 * 8 / 3 == 12


def test_bytes_of_states_and_activations(names: dict[str, Any]) -> None:
    parameters = sum(parameter.numel() for parameter in names["model"].parameters())
    says(*(f"| {each} | {each * parameters / 1e9:.0f} GB |" for each in (2, 4, 8, 18)))
    (stage,) = stages(replace(SEVEN, layers=1), 1, 1)
    ((_, planned),) = StageActivations(SEVEN, stage, Degrees(1), False, False)._by_layer().items()
    assert planned == 8 * SEVEN.width + 3 * SEVEN.mlp
    says(
        f"{planned / SEVEN.width:.0f} for our 7B",
        f"{2 * SEVEN.layers * SEVEN.heads * 4096**2 / 1e9:.0f} GB for one sequence",
    )
    kept, recomputed = (4096 * size for size in (SEVEN.layers * planned, SEVEN.layers * SEVEN.width + planned))
    assert 1 - recomputed / kept == pytest.approx(0.9, abs=0.01)
    assert names["recomputed"] / names["counted"] - 1 == pytest.approx(1 / 4, abs=0.03)


def test_what_is_said_of_whole_trainings(names: dict[str, Any]) -> None:
    says(f"at most {DEVICES['a100'].peak_flops / 1e12:.0f} · 10¹²", f"at most {PEAK_FLOPS / 1e12:.0f} · 10¹²")
    block = 2 * SEVENTY.width**2 * (1 + SEVENTY.key_heads / SEVENTY.heads) + 3 * SEVENTY.width * SEVENTY.mlp
    table = SEVENTY.vocabulary * SEVENTY.width
    weights = SEVENTY.layers * block + table
    each = 6 * weights + 12 * SEVENTY.layers * SEVENTY.width * SEVENTY.context
    needed, possible = each * 15e12, 6.4e6 * 3600 * PEAK_FLOPS
    says(
        f"= {block / 1e6:.0f} million weights", f"are {SEVENTY.layers * block / 1e9:.1f} billion",
        f"are {table / 1e9:.2f} billion each", f"it has {(weights + table) / 1e9:.1f} billion",
        f"{weights / 1e9:.1f} billion of them", f"together {each / 1e9:.0f} · 10⁹",
        f"tokens take {needed / 1e24:.1f} · 10²⁴", f"= {possible / 1e25:.1f} · 10²⁵",
        f"it is {100 * needed / possible:.0f} per cent.",
        f"it would be {100 * 6 * names['weights'] * 2e12 / names['possible']:.0f} per cent here",
    )  # fmt: skip
    with_weights, scores = 6 * names["weights"], 12 * SEVEN.layers * SEVEN.width * 32768
    says(
        f"= {with_weights / 1e9:.1f} · 10⁹ operations with weights", f"= {scores / 1e9:.1f} · 10⁹ with scores",
        f"is {100 * scores / (scores + with_weights):.0f} per cent of both",
        f"it is {100 * scores / (scores + 2 * with_weights):.0f} per cent",
        f"makes {6 * 4_194_304 / 1e6:.0f} million, so",
    )  # fmt: skip
