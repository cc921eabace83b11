"""Chapter 3: train the digits with Muon and AdamW side by side, and measure what each line of the step does.

python scripts/03_muon.py
python scripts/03_muon.py --rms --json out/rms.json
python scripts/03_muon.py --decay --json out/decay.json
python scripts/03_muon.py --embedding --json out/embedding.json
python scripts/03_muon.py --oracle
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

from distmuon import launch
from muonbook import puzzles
from muonbook.ch03 import puzzle as write_step

SHOWN = (1, 2, 5, 10, 20, 50, 100)  # the steps that are printed

# torch, and what needs it, is imported inside the functions: a wrong argument is answered at once.


def show_training():
    """Train once with the hybrid; print the losses and three numbers that are worth a line in every log."""
    from muonbook.ch03 import single_device as one

    def look(weight, update):
        return one.rms(update), one.not_orthogonal(update), one.spectral_norm(weight)

    model, losses, seen = one.watched_run(one.hybrid, SHOWN[-1], look)
    print(f"  step   loss   {one.WATCHED}: update RMS   orthogonality error   spectral norm")
    for step in SHOWN:
        size, error, norm = seen[step - 1]
        print(f"{step:6}{losses[step - 1]:7.2f}{size:30.2f}{error:22.2f}{norm:16.2f}")
    _, _, held_out = one.fresh()
    right = model(held_out.images).argmax(dim=-1) == held_out.labels
    print(f"accuracy on {len(right)} held-out digits: {right.double().mean():.2f}")
    return {"loss": losses}


def show_rms():
    """Train with AdamW alone and with Muon at two scales; print the RMS of one matrix's updates."""
    from muonbook.ch03 import single_device as one

    original = partial(one.hybrid, scale="original")
    runs: dict[str, Any] = {"AdamW": one.adamw_alone, "match_rms": one.hybrid, "original": original}
    found = {name: one.watched_run(make, SHOWN[-1], lambda _, update: one.rms(update)) for name, make in runs.items()}
    print(f"RMS of the update of {one.WATCHED}, per unit of learning rate (and the loss)")
    print("  step" + "".join(f"{name:>16}" for name in found))
    for step in SHOWN:
        pairs = (f"{seen[step - 1]:.3f} ({losses[step - 1]:.2f})" for _, losses, seen in found.values())
        print(f"{step:6}" + "".join(f"{pair:>16}" for pair in pairs))
    return {name: seen for name, (_, _, seen) in found.items()}


def show_decay():
    """Train at several strengths of weight decay; print the spectral norm of one matrix beside its ceiling."""
    from muonbook.ch03 import single_device as one

    steps, lr, found = 120, 2 * one.LR, {}
    print(f"Spectral norm of {one.WATCHED}, lr {lr}")
    print("  decay   step 1   step 60   step 120   ceiling   mean of the last 20 losses")
    for decay in (0.0, 0.1, 1.0, 3.0):
        make = partial(one.hybrid, lr=lr, weight_decay=decay)
        _, losses, norms = one.watched_run(make, steps, lambda weight, _: one.spectral_norm(weight))
        top = f"{one.ceiling(256, decay):.2f}" if decay else "none"
        print(f"{decay:7.1f}{norms[0]:9.2f}{norms[59]:10.2f}{norms[-1]:11.2f}{top:>10}{sum(losses[-20:]) / 20:29.2f}")
        found[f"{decay:g}"] = norms
    return found


def show_embedding():
    """Follow rows of a transformer's embedding under AdamW and under Muon, without decay."""
    import torch

    from distmuon.optim.muon import Muon
    from muonbook.ch03 import single_device as one

    runs = [one.embedding_run(make) for make in (torch.optim.AdamW, Muon)]
    print(f"An embedding of {one.VOCABULARY} rows: how many move in a step, and the RMS of two rows' steps")
    print("                  |         AdamW         |         Muon")
    print("  step   in batch | moved  always   once  | moved  always   once")
    for step in (*SHOWN[:-1], one.EMBEDDING_STEPS):
        line = f"{step:6}{runs[0][1][step - 1]:11} "
        for moved, _ in runs:
            rows = moved[step - 1]
            line += f"|{int((rows > 0).sum()):6}{rows[0]:8.3f}{rows[one.ONCE]:8.3f} "
        print(line.rstrip())
    still = all(rows[one.NEVER] == 0 for moved, _ in runs for rows in moved)
    print(f"The row of the token that never came stayed where it was, with both: {still}")
    named = {"always": 0, "once": one.ONCE}
    return {
        f"{name}, {which}": [rows[token].item() for rows in moved]
        for name, (moved, _) in zip(("AdamW", "Muon"), runs, strict=True)
        for which, token in named.items()
    }


def show_oracle():
    """Repeat a short run with one thing changed at a time; print which share of the movement is different."""
    from muonbook.ch03 import single_device as one

    print("10 steps beside ours, in float64: difference / movement")
    print(f"{'':30}  made-up gradients   training on digits")
    for name, shares in one.oracle(steps=10):
        print(f"{name:30}" + "".join(f"{bounded(share):>19}" for share in shares))


def bounded(share):
    """Return a share as every processor would print it: what is rounding differs from one to the next."""
    for low, high in ((0, 1e-9), (1e-9, 0.02), (0.02, 0.1)):
        if share < high:
            return f"{low:g} to {high:g}" if low > 1e-9 else f"below {high:g}"
    return f"{share:.2f}"


SHOWS = {"rms": show_rms, "decay": show_decay, "embedding": show_embedding, "oracle": show_oracle}


def work(world, name):
    """Show what was asked for, in this one process; return the curves behind it."""
    return SHOWS.get(name, show_training)()


def parse():
    parser = launch.parser(__doc__)
    which = parser.add_mutually_exclusive_group()
    for name, show in SHOWS.items():
        which.add_argument(f"--{name}", dest="show", action="store_const", const=name, help=show.__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the curves behind the page here")
    puzzles.add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, write_step.PUZZLE)) is not None:
        return code
    launch.check_writable("--json", arguments.json)
    curves = launch.run(work, (arguments.show,))[0]
    if arguments.json:
        Path(arguments.json).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.json).write_text(json.dumps(curves), encoding="utf-8")
    return 0


if __name__ == "__main__":
    launch.command(main)
