"""Chapter 3: train the digits with Muon and AdamW side by side, and measure what each line of the step does.

python scripts/03_muon.py
python scripts/03_muon.py --rms --json out/rms.json
python scripts/03_muon.py --decay --json out/decay.json
python scripts/03_muon.py --embedding --json out/embedding.json
python scripts/03_muon.py --oracle
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distmuon import launch, puzzles
from distmuon.puzzles import write_step

WIDTHS, BATCH, SEED = (64, 256, 128, 128, 10), 256, 0
WATCHED = "layers.1.weight"  # [128, 256], in the middle of the network
LR, DECAY = 0.01, 0.1  # for Muon and AdamW alike
SHOWN = (1, 2, 5, 10, 20, 50, 100)  # the steps that are printed
VOCABULARY, WIDTH, CONTEXT, COMMON = 64, 32, 16, 20  # of the transformer; tokens 0 to 19 are all that comes, but for
ONCE, NEVER = 62, 63  # this one in the very first batch, and this one never

# torch is imported inside the functions: a wrong argument is answered at once.


# ---- The hybrid -------------------------------------------------------------------------------------------


def hybrid(model, lr=LR, weight_decay=DECAY, **options):
    """Return Muon for the hidden matrices of `model` and AdamW for all else, at one learning rate and decay."""
    import torch

    from distmuon.muon import Muon
    from distmuon.routing import split_parameters

    params = {group["algorithm"]: group["params"] for group in split_parameters(model)}
    muon = Muon(params["muon"], lr=lr, weight_decay=weight_decay, **options)
    adamw = torch.optim.AdamW(params["adamw"], lr=lr, weight_decay=weight_decay)
    return muon, adamw


def train(model, optimizers, data, steps):
    """Train; yield the loss after every step."""
    from torch.nn import functional as F

    from distmuon.data import batch_rows

    for step in range(steps):
        rows = batch_rows(step, BATCH, len(data.labels), SEED)
        loss = F.cross_entropy(model(data.images[rows]), data.labels[rows])
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        yield loss.item()


def fresh():
    """Return the seeded network, in float64 so that all processors print the same, and training and held-out digits."""
    from distmuon.data import digits
    from distmuon.grid import Grid
    from distmuon.models import MLP, initial_weights

    model = MLP(WIDTHS).double()
    model.load_state_dict(initial_weights(model, SEED))
    return model, *digits(Grid.alone(), SEED)


# ---- What to watch ----------------------------------------------------------------------------------------


def update_of(before, after, lr, weight_decay):
    """Return the update of one step of a matrix [A, B]: decay and learning rate are taken out again."""
    return ((1 - lr * weight_decay) * before - after) / lr


def rms(update):
    """Return the root of the mean of all squares."""
    return update.square().mean().sqrt().item()


def not_orthogonal(update, kind="match_rms"):
    """Return how far what Newton–Schulz returned is from semi-orthogonal: 0 where all singular values are 1."""
    from distmuon.muon import scale
    from distmuon.newton_schulz import orthogonality_error

    return orthogonality_error(update / scale(update.shape, kind)).item()


def spectral_norm(weight):
    """Return the largest factor by which `weight` stretches any input."""
    import torch

    return torch.linalg.matrix_norm(weight, ord=2).item()


def watched_run(make_optimizers, steps, look, lr=LR, weight_decay=DECAY):
    """Train; return the model, the losses, and what `look(weight, update)` said of the watched matrix at every step."""
    model, data, _ = fresh()
    weight, losses, seen = model.get_parameter(WATCHED), [], []
    run = train(model, make_optimizers(model), data, steps)
    for _ in range(steps):
        before = weight.detach().clone()
        losses.append(next(run))
        seen.append(look(weight.detach(), update_of(before, weight.detach(), lr, weight_decay)))
    return model, losses, seen


# ---- What can be shown ------------------------------------------------------------------------------------


def show_training():
    """Train once with the hybrid; print the losses and three numbers that are worth a line in every log."""

    def look(weight, update):
        return rms(update), not_orthogonal(update), spectral_norm(weight)

    model, losses, seen = watched_run(hybrid, SHOWN[-1], look)
    print(f"  step   loss   {WATCHED}: update RMS   orthogonality error   spectral norm")
    for step in SHOWN:
        size, error, norm = seen[step - 1]
        print(f"{step:6}{losses[step - 1]:7.2f}{size:30.2f}{error:22.2f}{norm:16.2f}")
    _, _, held_out = fresh()
    right = model(held_out.images).argmax(dim=-1) == held_out.labels
    print(f"accuracy on {len(right)} held-out digits: {right.double().mean():.2f}")
    return {"loss": losses}


def show_rms():
    """Train with AdamW alone and with Muon at two scales; print the RMS of one matrix's updates."""
    import torch

    runs = {
        "AdamW": lambda model: [torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)],
        "match_rms": hybrid,
        "original": lambda model: hybrid(model, scale="original"),
    }
    found = {name: watched_run(make, SHOWN[-1], lambda _, update: rms(update)) for name, make in runs.items()}
    print(f"RMS of the update of {WATCHED}, per unit of learning rate (and the loss)")
    print("  step" + "".join(f"{name:>16}" for name in found))
    for step in SHOWN:
        pairs = (f"{seen[step - 1]:.3f} ({losses[step - 1]:.2f})" for _, losses, seen in found.values())
        print(f"{step:6}" + "".join(f"{pair:>16}" for pair in pairs))
    return {name: seen for name, (_, _, seen) in found.items()}


def show_decay():
    """Train at several strengths of weight decay; print the spectral norm of one matrix beside its ceiling."""
    steps, lr, found = 120, 2 * LR, {}
    print(f"Spectral norm of {WATCHED}, lr {lr}")
    print("  decay   step 1   step 60   step 120   ceiling   mean of the last 20 losses")
    for decay in (0.0, 0.1, 1.0, 3.0):
        _, losses, norms = watched_run(
            lambda model, decay=decay: hybrid(model, lr, decay), steps, lambda weight, _: spectral_norm(weight)
        )
        top = f"{ceiling(256, decay):.2f}" if decay else "none"
        print(f"{decay:7.1f}{norms[0]:9.2f}{norms[59]:10.2f}{norms[-1]:11.2f}{top:>10}{sum(losses[-20:]) / 20:29.2f}")
        found[f"{decay:g}"] = norms
    return found


def ceiling(longer_side, weight_decay):
    """Return what no spectral norm exceeds for long: scale / decay, and 1.2 for what Newton–Schulz leaves above 1."""
    return 1.2 * 0.2 * longer_side**0.5 / weight_decay


def show_embedding():
    """Follow rows of a transformer's embedding under AdamW and under Muon, without decay."""
    import torch

    from distmuon.muon import Muon

    runs = [
        embedding_run(lambda table: torch.optim.AdamW([table], lr=LR, weight_decay=0.0)),
        embedding_run(lambda table: Muon([table], lr=LR, weight_decay=0.0)),
    ]
    print(f"An embedding of {VOCABULARY} rows: how many move in a step, and the RMS of two rows' steps")
    print("                  |         AdamW         |         Muon")
    print("  step   in batch | moved  always   once  | moved  always   once")
    for step in (*SHOWN[:-1], 80):
        line = f"{step:6}{runs[0][1][step - 1]:11} "
        for moved, _ in runs:
            rows = moved[step - 1]
            line += f"|{int((rows > 0).sum()):6}{rows[0]:8.3f}{rows[ONCE]:8.3f} "
        print(line.rstrip())
    still = all(rows[NEVER] == 0 for moved, _ in runs for rows in moved)
    print(f"The row of the token that never came stayed where it was, with both: {still}")
    named = {"always": 0, "once": ONCE}
    return {
        f"{name}, {which}": [rows[token].item() for rows in moved]
        for name, (moved, _) in zip(("AdamW", "Muon"), runs, strict=True)
        for which, token in named.items()
    }


def embedding_run(make):
    """Train a transformer, its embedding by `make`; return per step every row's RMS, and how many are used."""
    import torch
    from torch.nn import functional as F

    from distmuon.models import Transformer, initial_weights

    model = Transformer(VOCABULARY, WIDTH, layers=1, heads=2, context=CONTEXT).double()
    model.load_state_dict(initial_weights(model, SEED))
    table = model.tokens.weight
    others = [p for p in model.parameters() if p is not table]
    optimizers = make(table), torch.optim.AdamW(others, lr=LR, weight_decay=0.0)
    frequency, generator = 1 / torch.arange(1.0, COMMON + 1), torch.Generator().manual_seed(SEED)
    moved, in_batch = [], []
    for step in range(80):
        tokens = frequency.multinomial(8 * (CONTEXT + 1), replacement=True, generator=generator).view(8, -1)
        if step == 0:
            tokens[0, 3] = ONCE
        logits = model(tokens[:, :-1])
        model.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        before = table.detach().clone()
        for optimizer in optimizers:
            optimizer.step()
        moved.append(((table.detach() - before) / LR).square().mean(dim=1).sqrt())
        in_batch.append(len(tokens[:, :-1].unique()))
    return moved, in_batch


def show_oracle():
    """Repeat a short run with one thing changed at a time; print which share of the movement is different."""
    import torch

    from distmuon.muon import Muon

    same: Any = {"lr": LR, "weight_decay": DECAY}
    changes: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "momentum averaged, not summed": lambda p: Muon(p, momentum_kind="average", **same),
        "Newton–Schulz in bf16": lambda p: Muon(p, compute_dtype=torch.bfloat16, **same),
        "torch, match_rms_adamw": lambda p: torch.optim.Muon(p, adjust_lr_fn="match_rms_adamw", **same),
        "ours without Nesterov": lambda p: Muon(p, nesterov=False, **same),
        "torch, its default scale": lambda p: torch.optim.Muon(p, **same),
    }
    print("10 steps beside ours, in float64: difference / movement")
    print(f"{'':30}  made-up gradients   training on digits")
    runs = (on_made_up_gradients, on_digits)
    ours = [run(lambda p: Muon(p, **same), 10) for run in runs]
    for name, make in changes.items():
        shares = [float((run(make, 10) - mine).norm() / mine.norm()) for run, mine in zip(runs, ours, strict=True)]
        print(f"{name:30}" + "".join(f"{bounded(share):>19}" for share in shares))


def on_made_up_gradients(make, steps):
    """Return how far Gaussian gradients, the same for every optimizer, move two matrices: [elements]."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    params = [torch.nn.Parameter(torch.zeros(*shape).double()) for shape in ((128, 256), (128, 128))]
    optimizer = make(params)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).double()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in params])


def on_digits(make, steps):
    """Return how far training moves the hidden matrices: [elements]."""
    import torch

    model, data, _ = fresh()
    muon, adamw = hybrid(model)
    params = [p for group in muon.param_groups for p in group["params"]]
    start = torch.cat([p.detach().flatten() for p in params])
    for _ in train(model, [make(params), adamw], data, steps):
        pass
    return torch.cat([p.detach().flatten() for p in params]) - start


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
