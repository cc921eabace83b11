"""What ranks do in the tests of races."""

from dataclasses import replace
from unittest import mock

import torch

from distmuon.launch import World
from muonbook.ch04 import sweep
from muonbook.ch04.search_space import RACERS
from muonbook.ch04.tasks import TASKS


def small_race(world: World) -> dict:
    """Race on digits for a few steps: one learning rate to begin with, one tuning seed, five fresh ones."""
    task = replace(TASKS["digits"], steps=8, dtype=torch.float64)
    few = {name: replace(racer, lrs=racer.lrs[2:5], weight_decays=(0.0,)) for name, racer in RACERS.items()}
    with mock.patch.dict(RACERS, few):
        return sweep.race(world, task, ("sgd", "adamw", "muon"), tuning=[1000], seeds=range(5), rates_alone=True)
