"""What chapter 16 measures: every optimizer's step on four ranks, against its bare matrix products.

The bare matrix products are those of standard Newton–Schulz, balanced over the ranks, and nothing else. They run in the
same world and in the same rounds, and their time is `floor_milliseconds` in the results. Worlds are started here,
without torch; what their ranks do stands beside this module.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from distmuon import launch
from muonbook import peers

GRIDS = ((4, 1), (2, 2), (1, 4))  # dp, tp
TRAINED_ON = ((4, 1), (2, 2))  # where a whole training step is measured
LAYERS, WIDTH = 4, 512
PATIENCE = 600.0  # seconds for a collective: others compile their step when they first take it
RACE = "muonbook.ch16.race.four_ranks:race"
TRAINING = "muonbook.ch16.race.four_ranks:compare_training_steps"


def measure(quick: bool) -> dict[str, Any]:
    """Return all that is measured. Clones of the other implementations are in the folder that PEERS names, if any."""
    folder = os.environ.get("PEERS")
    if folder and not Path(folder).is_dir():
        raise launch.UsageError(f"PEERS={folder}: there is no such folder; clone the others into one.")
    here = peers.find(folder)
    if here["dion"]["here"] and shutil.which("g++") is None:
        here["dion"] = {"here": False, "remedy": "torch.compile needs g++ for it; install one."}
    for name, found in here.items():
        print(f"{name}: {found['version'] if found['here'] else found['remedy']}", flush=True)
    rounds, names = (3 if quick else 40), [name for name, one in here.items() if one["here"]]
    race, training, sizes = {}, {}, (1, 4) if quick else (1, 4, 16)
    for dp, tp in GRIDS:
        print(f"Racing on {dp} x {tp} ranks ...", flush=True)
        arguments = (rounds, names, folder, LAYERS, WIDTH)
        race[f"{dp}x{tp}"] = launch.run(RACE, arguments, dp=dp, tp=tp, timeout=PATIENCE)[0]
    for dp, tp in TRAINED_ON:
        print(f"Whole training steps on {dp} x {tp} ranks ...", flush=True)
        training[f"{dp}x{tp}"] = launch.run(TRAINING, (sizes, rounds // 2), dp=dp, tp=tp)[0]
    return {"peers": here, "race": race, "training": training}
