"""A recipe on the command line of a worker: the options that ask for one."""

from __future__ import annotations

import argparse
from typing import Any

from distmuon.launch import choices
from distmuon.launch.cli import option_of
from distmuon.models.recipe import DTYPES, OPTIMIZERS, OVERLAP_NAMES, Recipe
from distmuon.optim import strategies

ARGUMENTS: dict[str, tuple[type, str, str]] = {  # of a worker: type, what stands for a value in --help, words
    "steps": (int, "N", "training steps"),
    "batch": (int, "ROWS", "digits per step, over all ranks; a multiple of --micro-batches"),
    "micro_batches": (int, "N", "pieces of a batch, over all ranks; a multiple of --dp"),
    "optimizer": (str, choices(OPTIMIZERS), "for the hidden matrices; the rest always goes to AdamW"),
    "dtype": (str, choices(DTYPES), "of the model; master weights are float32 or wider"),
    "overlap": (str, choices(OVERLAP_NAMES), "of the moves; not with --strategy gather_cut"),
    "publish": (str, choices(strategies.PUBLISHED), "what the last move sends; updates: with --strategy owner"),
    "whole_every": (int, "K", "with --strategy periodic: whole matrices every K steps, blocks in between"),
    "bucket_size": (int, "N", "elements in a bucket of the map"),
    "lr": (float, "RATE", "learning rate, for Muon and AdamW alike"),
    "seed": (int, "N", "of weights, batches and made-up gradients"),
}


def add_arguments(group: argparse._ArgumentGroup, *names: str, **defaults: Any) -> None:
    """Add these of the `ARGUMENTS` to a worker's parser. defaults: where this worker's are not the recipe's own."""
    for name in names:
        kind, metavar, words = ARGUMENTS[name]
        default = defaults.get(name, getattr(Recipe, name))
        option = option_of(name)
        group.add_argument(option, type=kind, metavar=metavar, default=default, help=f"{words} (default: {default})")


def recipe_of(arguments: argparse.Namespace, **fixed: Any) -> Recipe:
    """Return the recipe that a worker's arguments ask for; what they leave open is the default, or `fixed`."""
    chosen = {name: value for name, value in vars(arguments).items() if name in Recipe.__dataclass_fields__}
    return Recipe(**chosen | fixed)
