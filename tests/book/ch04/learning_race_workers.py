"""What ranks do in the tests of races."""

from dataclasses import replace
from unittest import mock

import torch

from distmuon.launch import World
from muonbook.ch04 import races
from muonbook.ch04.baselines import RACERS
from muonbook.ch04.tasks import TASKS


def small_race(world: World) -> dict:
    """Race on digits for a few steps: one learning rate to begin with, one tuning seed, five fresh ones."""
    task = replace(TASKS["digits"].shorter(8), dtype=torch.float64)
    few = {
        name: replace(racer, lrs=racer.lrs[2:5], weight_decays=(0.0,), options=racer.options[:1])
        for name, racer in RACERS.items()
    }
    with mock.patch.dict(RACERS, few):
        return races.stored_race(world, task, tuple(RACERS), tuning=[1000], seeds=range(5))
