"""What an editor completes and a type checker refuses: every option by its name, with its type and its default."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from distmuon import DistributedMuon, Grid, Muon, MuonW, Zero1AdamW
from distmuon.optim.options import OPTIONS

DEFAULTS: dict[Callable[..., Any], list[Mapping[str, Any]]] = {
    Muon: [Muon.DEFAULTS],
    MuonW: [*MuonW.DEFAULTS.values()],
    DistributedMuon: [*OPTIONS.values()],
    Zero1AdamW: [*Zero1AdamW.DEFAULTS.values()],
}


@pytest.mark.parametrize("optimizer", DEFAULTS)
def test_a_signature_names_every_option_and_its_default(optimizer: Callable[..., Any]) -> None:
    named = inspect.signature(optimizer).parameters
    assert not [p for p in named.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) or p.annotation == p.empty]
    for defaults in DEFAULTS[optimizer]:
        assert {name: named[name].default for name in defaults} == defaults


def test_a_misspelt_option_is_refused_by_name_and_the_type_checker_finds_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    with pytest.raises(TypeError, match="'weight_deacy'"):
        torch.optim.AdamW(model.parameters(), weight_deacy=0.1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'weight_deacy'"):
        Muon(model.parameters(), weight_deacy=0.1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'weight_deacy'"):
        MuonW(model, weight_deacy=0.1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'weight_deacy'"):
        DistributedMuon(model.parameters(), Grid.alone(), weight_deacy=0.1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'adamw_lr'"):
        Zero1AdamW(model.parameters(), Grid.alone(), adamw_lr=0.1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="scale is 'orignal'; choose one of match_rms, original"):
        MuonW(model, scale="orignal")  # type: ignore[arg-type]
