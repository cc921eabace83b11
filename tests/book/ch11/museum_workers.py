"""A visit to one exhibit, as a rank makes it."""

from __future__ import annotations

from distmuon.launch import World
from distmuon.sharding.grid import Grid
from muonbook.ch11 import experiments


def visit(world: World, name: str, scenario: experiments.Scenario) -> experiments.Visit:
    return experiments.visit(name, scenario, Grid.of(world))
