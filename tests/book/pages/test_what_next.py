"""The last page: its commands are taken, and what it says of our own findings is stored."""

from __future__ import annotations

import re

import worlds

from distmuon import launch
from distmuon.models import recipe
from muonbook.ch04 import sweep, tables
from muonbook.measure import results

PAGE = (worlds.ROOT / "book" / "what_next.md").read_text(encoding="utf-8")


def test_the_commands_of_the_last_page_are_taken() -> None:
    assert (worlds.ROOT / "scripts" / "examples" / "certify_run.py").is_file()
    (command,) = re.findall(r"^torchrun .* scripts/10_dp_tp\.py (.*)$", PAGE, re.MULTILINE)
    parser = launch.parser("")
    launch.add_arguments(parser, dp=1, tp=1)
    arguments = parser.parse_args(command.split())
    assert f"--nproc-per-node {arguments.dp * arguments.tp} " in PAGE
    recipe.Recipe().check(arguments.dp, arguments.tp)


def test_what_it_says_of_our_races_and_counts_is_stored() -> None:
    assert results.load("learning")["races"]["language"]["to_adamw"]["steps"] < 0.5
    apart = []
    for race in (results.load("race_variants"), results.load("race_normuon")):
        muon = tables.gaps(race, "muon")
        wins = {name: sweep.verdict(tables.gaps(race, name), muon).wins for name in race["racers"].keys() - {"muon"}}
        apart += [(name, count) for name, count in wins.items() if count in (0, len(race["seeds"]))]
    assert apart == [("cans", 0)]
