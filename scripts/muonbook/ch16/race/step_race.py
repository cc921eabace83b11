"""What chapter 16 measures: every optimizer's step on four ranks, against its bare matrix products.

The bare matrix products are those of standard Newton–Schulz, balanced over the ranks, and nothing else. They run in the
same world and in the same rounds, and their time is `floor_milliseconds` in the results. Worlds are started here,
without torch; what their ranks do stands beside this module.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from distmuon import launch
from muonbook import peers
from muonbook.ch16.race.tables import by_grid
from muonbook.measure.workload import TIMED

GRIDS = ((4, 1), (2, 2), (1, 4))  # dp, tp
TRAINED_ON = ((4, 1), (2, 2))  # where a whole training step is measured
LAYERS, WIDTH = 4, 512
PATIENCE = 600.0  # seconds for a collective: others compile their step when they first take it
RACE = "muonbook.ch16.race.four_ranks:race"
SWEEP = "muonbook.ch16.spectra_sweep:sweep"
TRAINING = "muonbook.ch16.race.training_step:compare"


def measure(quick: bool, folder: str | None) -> dict[str, Any]:
    """Return all that is measured. folder: with clones of the other implementations, or None."""
    here = peers.find(folder)
    for name, found in here.items():
        print(f"{name}: {found['version'] if found['here'] else found['remedy']}", flush=True)
    rounds, found = (3 if quick else 40), dict[str, Any]()
    names, compiler = [name for name, one in here.items() if one["here"]], not quick and shutil.which("g++") is not None
    arguments = (rounds, names, folder, compiler, LAYERS, WIDTH)
    for dp, tp in GRIDS:
        print(f"Racing on {dp} x {tp} ranks ...", flush=True)
        found[f"{dp}x{tp}"] = launch.run(RACE, arguments, dp=dp, tp=tp, timeout=PATIENCE)[0]
    training, sizes = {}, (1, 4) if quick else (1, 4, 16)
    for dp, tp in TRAINED_ON:
        print(f"Whole training steps on {dp} x {tp} ranks ...", flush=True)
        training[f"{dp}x{tp}"] = launch.run(TRAINING, (sizes, rounds // 2), dp=dp, tp=tp)[0]
    without_unit = training_without_unit = None
    if found["4x1"]["matrix_unit"]:
        print("Both on 4 x 1 ranks, without the CPU's matrix unit ...", flush=True)
        without_unit = launch.run(RACE, (*arguments, False), dp=4, timeout=PATIENCE)[0]
        training_without_unit = launch.run(TRAINING, (sizes, rounds // 2, TIMED, False), dp=4)[0]
    print("Forms of Newton–Schulz, on all spectra ...", flush=True)
    swept = launch.run(SWEEP, (quick,), threads=os.cpu_count() or 1)[0]
    return {
        "peers": here,
        "race": found,
        "without_unit": without_unit,  # the race on 4 x 1 again; None: this CPU has no matrix unit
        "training": training,
        "training_without_unit": training_without_unit,  # on 4 x 1 again, likewise
        "spectra": swept,
    }


def table(found: Mapping[str, Any]) -> str:
    """Return what was measured, in lines of text."""
    lines = []
    for grid, race in by_grid(found, "race").items():
        dtype, products = race["dtype"], race["floor_milliseconds"]
        lines.append(f"{grid}: one step over {products:.0f} ms of bare products in {dtype}; sent per rank")
        lines += [
            f"  {name:<28}{_ratio(row['ratio'])}{row['sent_bytes'] / 1e6:9.2f} MB"
            for name, row in race["entrants"].items()
        ]
        if not race["fast_bfloat16"]:
            lines.append(
                "  This CPU has no fast bfloat16: products and ours are in float32, torch's and others' are not."
            )
    for grid, rows in by_grid(found, "training").items():
        lines.append(f"{grid}: a whole training step over ZeRO-1 AdamW's")
        lines += [
            f"  {name:<20}{row['tokens']:6,} tokens{_ratio(row[name]['ratio'])}   bytes {row[name]['bytes_ratio']:.4f}"
            for row in rows
            for name in row
            if name != "tokens"
        ]
    return "\n".join(lines)


def _ratio(ratio: Mapping[str, Any]) -> str:
    low, high = ratio["quartiles"]
    return f"{ratio['median']:7.2f} ({low:.2f} to {high:.2f})"
