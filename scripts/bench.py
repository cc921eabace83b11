"""`make bench`: measure what this stage claims, and write it with its spread.

Two questions: is our single-device Muon step as fast as torch's, in the same run; and how long does a world of eight
ranks take from the command's start to its first collective.

python scripts/bench.py
python scripts/bench.py --quick
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from distmuon import launch, results
from distmuon.muon import Muon

ROOT = Path(__file__).resolve().parent.parent
FULL, QUICK = "book/results/bench.json", "out/bench-quick.json"  # a first impression never replaces the full results
MODELS = {  # name -> shapes of the hidden matrices
    "12.6M: 16 of 512x512, 4 of 2048x512, 4 of 512x2048": [(512, 512)] * 16 + [(2048, 512)] * 4 + [(512, 2048)] * 4,
    "0.8M: 48 of 64x256": [(64, 256)] * 48,
    "3.1M: 12 of 512x512, 12 of 16x16": [(512, 512)] * 12 + [(16, 16)] * 12,
}


def optimizers(shapes, seed=0):
    """Return (ours, torch's) over equal copies of the same matrices, with the same gradients."""
    made = []
    for make in (
        lambda ps: Muon(ps, lr=1e-3),
        lambda ps: torch.optim.Muon(ps, lr=1e-3, adjust_lr_fn="match_rms_adamw"),
    ):
        generator = torch.Generator().manual_seed(seed)
        parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        made.append(make(parameters))
    return made


def step_ratio(shapes, rounds):
    """Return the ratios ours / torch's of `rounds` pairs of steps, taken in turn so that both see the same machine."""
    ours, theirs = optimizers(shapes)
    for optimizer in (ours, theirs):
        optimizer.step()
    ratios = []
    for number in range(rounds):
        seconds = {}
        for optimizer in (ours, theirs) if number % 2 else (theirs, ours):
            began = time.perf_counter()
            optimizer.step()
            seconds[optimizer] = time.perf_counter() - began
        ratios.append(seconds[ours] / seconds[theirs])
    return ratios


def start_seconds(repeats):
    """Return the seconds from the start of the main job's command to the first collective of its 8 ranks."""
    found = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.json"
            command = [
                sys.executable,
                str(ROOT / "scripts" / "10_dp_tp.py"),
                "--dtype",
                "float64",
                "--steps",
                "1",
                "--quiet",
                "--json",
                str(path),
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found.append(json.loads(path.read_text())["start_seconds"])
    return found


def parse():
    parser = launch.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for a first impression")
    parser.add_argument("--json", metavar="FILE", help=f"write here (default: {FULL}; with --quick: {QUICK})")
    arguments = parser.parse_args()
    arguments.json = arguments.json or str(ROOT / (QUICK if arguments.quick else FULL))
    launch.check_writable("--json", arguments.json)
    return arguments


def main():
    arguments = parse()
    rounds, repeats = (8, 3) if arguments.quick else (40, 5)

    print(f"Starting 8 ranks {repeats} times, from the command's start to the first collective ...", flush=True)
    starts = results.spread(start_seconds(repeats))
    low, high = starts["quartiles"]
    print(f"  {starts['median']:.2f} s ({low:.2f} to {high:.2f})")
    print(f"Taking {rounds} pairs of steps per model; ours / torch.optim.Muon, below 1: ours is faster ...", flush=True)
    steps = {}
    for name, shapes in MODELS.items():
        steps[name] = results.spread(step_ratio(shapes, rounds))
        low, high = steps[name]["quartiles"]
        print(f"  {steps[name]['median']:.2f} ({low:.2f} to {high:.2f})  {name}", flush=True)
    results.write(arguments.json, {"start_seconds": starts, "step_ratio": steps})
    print(f"Medians, with quartiles in brackets. Written to {arguments.json}")


if __name__ == "__main__":
    launch.command(main)
