"""One device: our step and our Newton–Schulz beside torch.optim.Muon's, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import _muon as torchs

from distmuon.launch import World
from distmuon.optim.coefficients import MUON
from distmuon.optim.muon import Muon
from distmuon.optim.newton_schulz import newton_schulz
from muonbook.measure import interleaved_timing, results

BATCHES = ((32, 128, 512), (16, 256, 256), (64, 128, 128))  # matrices of a step: how many, and their shape
SINGLE = ((1024, 4096), (512, 2048), (256, 2048), (1024, 1024), (512, 512), (256, 256), (128, 512))


def compare(
    world: World,
    rounds: int,
    batches: Sequence[tuple[int, int, int]] = BATCHES,
    single: Sequence[tuple[int, int]] = SINGLE,
) -> dict[str, Any]:
    """Return the spread of our time over torch's: of whole steps, and of Newton–Schulz of one matrix, in float32."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "steps": {}, "newton_schulz": {}}
    for count, a, b in batches:
        ours, theirs = (_parameters(count, a, b) for _ in range(2))
        acts = {
            "ours": Muon(ours, lr=0.02).step,
            "theirs": torch.optim.Muon(theirs, lr=0.02, adjust_lr_fn="match_rms_adamw").step,
        }
        found["steps"][f"{count} of {a}x{b}"] = _ratio(acts, rounds)
    for a, b in single:
        x = torch.randn(a, b, generator=generator)
        acts = {
            "ours": partial(newton_schulz, x),
            "theirs": partial(torchs._zeropower_via_newtonschulz, x, MUON, 5, 1e-7),
        }
        found["newton_schulz"][f"{a}x{b}"] = _ratio(acts, rounds)
    return found


def _parameters(count: int, a: int, b: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(a, b, generator=generator)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(a, b, generator=generator)
    return parameters


def _ratio(acts: dict[str, Any], rounds: int) -> dict[str, Any]:
    seconds = interleaved_timing.take_turns(acts, rounds, warm_up=2)
    minima = {"of_minima": min(seconds["ours"]) / min(seconds["theirs"])}
    return results.spread(interleaved_timing.ratios(seconds["ours"], seconds["theirs"])) | minima
