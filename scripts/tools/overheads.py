"""Measure what the book's other measurements stand on: our single-device step, and what it takes to start a world.

Is our single-device Muon step as fast as torch's, in the same run; and how long does a world of eight ranks take from
the command's start to its first collective. `make bench` calls it with the chapters' measurements.

python scripts/tools overheads
python scripts/tools overheads --quick --json out/quick/bench.json
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from muonbook.measure import interleaved_timing, results

MODELS = {  # name -> shapes of the hidden matrices
    "large": [(512, 512)] * 16 + [(2048, 512)] * 4 + [(512, 2048)] * 4,  # 12.6M elements
    "many_small": [(64, 256)] * 48,  # 0.8M
    "mixed": [(512, 512)] * 12 + [(16, 16)] * 12,  # 3.1M
}


def optimizers(shapes, seed=0):
    """Return (ours, torch's) over equal copies of the same matrices, with the same gradients."""
    import torch

    from distmuon.optim.muon import Muon

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
    """Return the ratios ours / torch's of `rounds` pairs of steps."""
    ours, theirs = optimizers(shapes)
    seconds = interleaved_timing.take_turns({"ours": ours.step, "theirs": theirs.step}, rounds)
    return interleaved_timing.ratios(seconds["ours"], seconds["theirs"])


def start_seconds(repeats):
    """Return the seconds from the start of the main job's command to the first collective of its 8 ranks."""
    worker = str(results.ROOT / "scripts" / "10_dp_tp.py")
    found = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.json"
            options = ["--dtype", "float64", "--steps", "1", "--quiet", "--json", str(path)]
            subprocess.run([sys.executable, worker, *options], check=True, stdout=subprocess.DEVNULL)
            found.append(json.loads(path.read_text())["start_seconds"])
    return found


def main():
    arguments = results.parse(__doc__, quick="fewer rounds, for a first impression")
    rounds, repeats = (3, 2) if arguments.quick else (40, 5)

    starts = results.spread(start_seconds(repeats))
    low, high = starts["quartiles"]
    print(f"start of 8 ranks, up to their first collective: {starts['median']:.2f} s ({low:.2f} to {high:.2f})")
    steps = {}
    for name, shapes in MODELS.items():
        steps[name] = results.spread(step_ratio(shapes, rounds)) | {"matrices": len(shapes)}
        low, high = steps[name]["quartiles"]
        print(
            f"a step, ours / torch.optim.Muon: {steps[name]['median']:.2f} ({low:.2f} to {high:.2f})  "
            f"{sum(a * b for a, b in shapes) / 1e6:.1f}M in {len(shapes)} matrices",
            flush=True,
        )
    if arguments.json:
        results.write(arguments.json, {"start_seconds": starts, "step_ratio": steps})
