"""What ranks do in the tests of races."""

from dataclasses import replace
from unittest import mock

import torch

from distmuon.launch import World
from muonbook.ch04 import sweep
from muonbook.ch04.search_space import CANDIDATES
from muonbook.ch04.tasks import TASKS


def small_race(world: World) -> dict:
    """Race on digits for a few steps: one learning rate to begin with, one tuning seed, five fresh ones."""
    task = replace(TASKS["digits"].shorter(8), dtype=torch.float64)
    few = {
        name: replace(candidate, lrs=candidate.lrs[2:5], momenta=(0.8, 0.9, 0.95), others=(1.0,), weight_decays=(0.0,))
        for name, candidate in CANDIDATES.items()
    }
    with mock.patch.dict(CANDIDATES, few):
        return sweep.race(world, task, tuple(CANDIDATES), tuning=[1000], seeds=range(5))
