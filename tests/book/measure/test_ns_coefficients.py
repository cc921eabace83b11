"""Newton–Schulz in half precision: every form is near float64 where it can be; what counts as failed."""

from __future__ import annotations

from typing import Any

import torch
from helpers_math import gaussian

from tools import ns_coefficients


def test_every_form_is_near_float64_on_a_kind_spectrum() -> None:
    found = ns_coefficients.errors((16, 24))
    assert set(found) == set(ns_coefficients.published())
    for by_form in found.values():
        assert set(by_form) == set(ns_coefficients.forms())
        del by_form["Gram, bf16"]
        assert all(by_spectrum["linear to 1/2", (16, 24)] < 0.2 for by_spectrum in by_form.values())


def test_a_form_fails_where_it_errs_by_more_than_the_standard_one_and_than_nobody_minds() -> None:
    names = [(name, (16, 24)) for name in ("kind", "hard", "rank 1")]
    spectra: dict[Any, Any] = dict(zip(names, (0.01, 0.1, 3.0), strict=True))
    other = dict(zip(names, (0.029, 0.151, None), strict=True))
    standard, judged = ns_coefficients.judged({"muon": {"standard, bf16": spectra, "another": other}})
    assert (standard["fails"], standard["spectra"], standard["rank_one"]) == (0, 3, 3.0)
    assert judged["failed"] == ["hard, 16 x 24", "rank 1, 16 x 24"]


def test_costs_are_counted_and_timed_in_turns() -> None:
    found = ns_coefficients.costs(rounds=1)
    assert {name: cost["products"] for name, cost in found.items()} == {
        "muon": 15,
        "polar_express": 15,
        "cans": 15,
        "deepseek_v4": 30,
        "cubic5": 10,
        "polar_express, 1.05": 15,
    }
    assert found["muon"]["time 512x512"]["median"] == 1
    assert torch.is_tensor(ns_coefficients.act(gaussian(4, 6), "cubic5")())
