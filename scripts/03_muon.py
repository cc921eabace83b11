"""Chapter 3: train the digits with Muon and AdamW side by side, and measure what each line of the step does.

python scripts/03_muon.py
python scripts/03_muon.py --rms --json out/rms.json
python scripts/03_muon.py --decay --json out/decay.json
python scripts/03_muon.py --embedding --json out/embedding.json
python scripts/03_muon.py --oracle
"""

import json
from pathlib import Path

from distmuon import launch, puzzles
from distmuon.puzzles import write_step

WIDTHS, BATCH, SEED = (64, 256, 128, 128, 10), 256, 0
WATCHED = "layers.1.weight"  # [128, 256], in the middle of the network
LR, DECAY = 0.01, 0.1  # for Muon and AdamW alike
SHOWN = (1, 2, 5, 10, 20, 50, 100)  # steps that are printed
VOCABULARY, COMMON, ONCE, NEVER, RECENT = (
    64,
    20,
    62,
    63,
    80,
)  # tokens 0..19 come all the time, 62 in the first batch only

# torch is imported inside the functions: a wrong argument is answered at once.


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


def hybrid(model, **options):
    """Return two optimizers: Muon for the hidden matrices of `model`, AdamW for all else, at one rate and decay."""
    import torch

    from distmuon.muon import Muon
    from distmuon.routing import split_parameters

    params = {group["algorithm"]: group["params"] for group in split_parameters(model)}
    both = {"lr": LR, "weight_decay": DECAY} | {key: options[key] for key in ("lr", "weight_decay") if key in options}
    return Muon(params["muon"], **(both | options)), torch.optim.AdamW(params["adamw"], **both)


def update_of(before, after, group):
    """Return the update of one step of a matrix [A, B], with the learning rate and the weight decay taken out."""
    lr = group["lr"]
    return ((1 - lr * group["weight_decay"]) * before - after) / lr


def metrics(weight, update):
    """Return three numbers that are worth a line in every log. weight, update: [A, B]."""
    import torch

    from distmuon.newton_schulz import orthogonality_error

    rms = update.square().mean().sqrt()
    orthogonalized = update / (0.2 * max(update.shape) ** 0.5)  # what Newton–Schulz returned
    spectral = torch.linalg.matrix_norm(weight, ord=2)
    return {"rms": rms.item(), "error": orthogonality_error(orthogonalized).item(), "spectral": spectral.item()}


def digits_run(optimizers_for, steps):
    """Train a fresh network in float64; return one dict per step and the held-out accuracy."""
    from distmuon.data import digits
    from distmuon.grid import Grid
    from distmuon.models import MLP, initial_weights

    data, held_out = digits(Grid.alone(), SEED)
    model = MLP(WIDTHS).double()  # float64: the printed digits are the same on every processor
    model.load_state_dict(initial_weights(model, SEED))
    weight, optimizers = model.get_parameter(WATCHED), optimizers_for(model)
    (group,) = [g for o in optimizers for g in o.param_groups if any(weight is p for p in g["params"])]
    losses, rows = train(model, optimizers, data, steps), []
    for _ in range(steps):
        before = weight.detach().clone()
        loss = next(losses)
        rows.append({"loss": loss} | metrics(weight.detach(), update_of(before, weight.detach(), group)))
    right = model(held_out.images).argmax(dim=-1) == held_out.labels
    return rows, right.double().mean().item()


def show_training():
    """Train once with the hybrid, and print the losses and the metrics."""
    rows, accuracy = digits_run(hybrid, SHOWN[-1])
    print(f"  step   loss   of {WATCHED}: update RMS   orthogonality error   spectral norm")
    for step in SHOWN:
        row = rows[step - 1]
        print(f"{step:6}{row['loss']:7.2f}{row['rms']:33.2f}{row['error']:22.2f}{row['spectral']:16.2f}")
    print(f"held-out accuracy: {accuracy:.2f}")
    return {"loss": [row["loss"] for row in rows]}


def show_rms():
    """Train with AdamW alone and with Muon at two scales; print the RMS of the updates of one matrix."""
    import torch

    runs = {
        "AdamW": lambda model: [torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)],
        "match_rms": hybrid,
        "original": lambda model: hybrid(model, scale="original"),
    }
    found = {name: digits_run(make, SHOWN[-1])[0] for name, make in runs.items()}
    print(f"RMS of the update of {WATCHED} [128, 256], per unit of learning rate; and the loss")
    print("  step" + "".join(f"{name:>18}" for name in found))
    for step in SHOWN:
        pairs = (f"{rows[step - 1]['rms']:10.3f} ({rows[step - 1]['loss']:.2f})" for rows in found.values())
        print(f"{step:6}" + "".join(f"{pair:>18}" for pair in pairs))
    return {name: [row["rms"] for row in rows] for name, rows in found.items()}


def show_decay():
    """Train at several strengths of decay; print the spectral norm of one matrix beside its ceiling."""
    steps, lr = 120, 2 * LR
    print(f"Spectral norm of {WATCHED}, lr {lr}")
    print("  decay   step 1  step 60  step 120   ceiling   last loss")
    found = {}
    for decay in (0.0, 0.1, 1.0, 3.0):
        rows, _ = digits_run(lambda model, decay=decay: hybrid(model, lr=lr, weight_decay=decay), steps)
        norms = [row["spectral"] for row in rows]
        ceiling = f"{ceiling_of(256, decay):9.2f}" if decay else "     none"
        print(f"{decay:7.1f}{norms[0]:9.2f}{norms[59]:9.2f}{norms[-1]:10.2f} {ceiling}{rows[-1]['loss']:12.2f}")
        found[f"{decay:g}"] = norms
    return found


def ceiling_of(longer_side, decay):
    """Return what the spectral norm cannot exceed for long: scale / decay, times 1.2 for what Newton–Schulz leaves."""
    return 1.2 * 0.2 * longer_side**0.5 / decay


def embedding_run(make):
    """Train a small transformer whose embedding `make` optimizes; return the RMS of every row's step, and the batches."""
    import torch
    from torch.nn import functional as F

    from distmuon.models import Transformer, initial_weights

    model = Transformer(VOCABULARY, width=32, layers=1, heads=2, context=16).double()
    model.load_state_dict(initial_weights(model, SEED))
    table = model.tokens.weight
    others = [p for p in model.parameters() if p is not table]
    optimizers = make(table), torch.optim.AdamW(others, lr=LR, weight_decay=0.0)
    generator = torch.Generator().manual_seed(SEED)
    moved, seen = [], []
    for step in range(RECENT):
        tokens = torch.multinomial(1 / torch.arange(1.0, COMMON + 1), 8 * 17, True, generator=generator).view(8, 17)
        if step == 0:
            tokens[0, 3] = ONCE
        logits = model(tokens[:, :-1])
        model.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        before = table.detach().clone()
        for optimizer in optimizers:
            optimizer.step()
        moved.append(((table.detach() - before) / LR).square().mean(dim=1).sqrt())
        seen.append(len(tokens[:, :-1].unique()))
    return moved, seen


def show_embedding():
    """Follow the rows of an embedding under AdamW and under Muon, without decay."""
    import torch

    from distmuon.muon import Muon

    makes = {
        "AdamW": lambda table: torch.optim.AdamW([table], lr=LR, weight_decay=0.0),
        "Muon": lambda table: Muon([table], lr=LR, weight_decay=0.0),
    }
    runs = {name: embedding_run(make) for name, make in makes.items()}
    print(f"An embedding [{VOCABULARY}, 32]: RMS of a row's step, per unit of learning rate")
    print("                |        AdamW          |         Muon")
    print("  step  in batch| moved  always   once  | moved  always   once")
    for step in (*SHOWN[:-1], RECENT):
        line = f"{step:6}{runs['AdamW'][1][step - 1]:10}"
        for moved, _ in runs.values():
            rows = moved[step - 1]
            line += f"|{int((rows > 0).sum()):6}{rows[0].item():8.3f}{rows[ONCE].item():8.3f}  "
        print(line.rstrip())
    still = all(rows[NEVER] == 0 for moved, _ in runs.values() for rows in moved)
    print(f"The row of a token that never came did not move at all, with either: {still}.")
    tokens = {"always": 0, "once": ONCE}
    return {
        f"{name}, {which}": [rows[token].item() for rows in moved]
        for name, (moved, _) in runs.items()
        for which, token in tokens.items()
    }


def made_up(make, steps):
    """Return how far made-up Gaussian gradients, the same for everyone, move two matrices; [elements]."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    params = [torch.nn.Parameter(torch.randn(*s, generator=generator).double() / 10) for s in ((128, 256), (128, 128))]
    start = torch.cat([p.detach().flatten() for p in params])
    optimizer = make(params)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).double()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in params]) - start


def really_trained(make, steps):
    """Return how far training on the digits moves the hidden matrices; [elements]."""
    import torch

    from distmuon.data import digits
    from distmuon.grid import Grid
    from distmuon.models import MLP, initial_weights

    data, _ = digits(Grid.alone(), SEED)
    model = MLP(WIDTHS).double()
    model.load_state_dict(initial_weights(model, SEED))
    muon, adamw = hybrid(model)
    params = [p for group in muon.param_groups for p in group["params"]]
    start = torch.cat([p.detach().flatten() for p in params])
    for _ in train(model, [make(params), adamw], data, steps):
        pass
    return torch.cat([p.detach().flatten() for p in params]) - start


def show_oracle():
    """Repeat a short run with one thing changed at a time; print how much of the movement is different."""
    import torch

    from distmuon.muon import Muon

    both = {"lr": LR, "weight_decay": DECAY}
    changes = {
        "momentum averaged, not summed": lambda p: Muon(p, momentum_kind="average", **both),
        "Newton–Schulz in bf16": lambda p: Muon(p, compute_dtype=torch.bfloat16, **both),
        "torch, match_rms_adamw": lambda p: torch.optim.Muon(p, adjust_lr_fn="match_rms_adamw", **both),
        "torch, its default scale": lambda p: torch.optim.Muon(p, **both),
        "ours without Nesterov": lambda p: Muon(p, nesterov=False, **both),
    }
    print("10 steps in float64: ||difference|| / ||movement||, against ours")
    print(f"{'':32}  made-up gradients   training on digits")
    runs = (made_up, really_trained)
    ours = [run(lambda p: Muon(p, **both), 10) for run in runs]
    for name, make in changes.items():
        shares = [float((run(make, 10) - mine).norm() / mine.norm()) for run, mine in zip(runs, ours, strict=True)]
        print(f"{name:32}" + "".join(f"{bounded(share):>19}" for share in shares))
    return None


def bounded(share):
    """Return a share in words that hold on every processor: rounding differs from one to the next."""
    for bound in (1e-9, 0.03, 0.1):
        if share < bound:
            return f"below {bound:g}"
    return f"{share:.1f}"


SHOWS = {"rms": show_rms, "decay": show_decay, "embedding": show_embedding, "oracle": show_oracle}


def work(world, names):
    """Show what was asked for; return the curves of the last, for a picture."""
    for name in names:
        curves = SHOWS[name]()
    return curves if names else show_training()


def parse():
    parser = launch.parser(__doc__)
    for name, show in SHOWS.items():
        parser.add_argument(f"--{name}", action="store_true", help=show.__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the curves behind the page here")
    puzzles.add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, write_step.PUZZLE)) is not None:
        return code
    launch.check_writable("--json", arguments.json)
    names = [name for name in SHOWS if getattr(arguments, name)]
    if len(names) > 1:
        raise launch.UsageError(f"--{' --'.join(names)}: choose one at a time.")
    curves = launch.run(work, (names,))[0]
    if arguments.json:
        Path(arguments.json).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.json).write_text(json.dumps(curves), encoding="utf-8")
    return 0


if __name__ == "__main__":
    launch.command(main)
