"""Chapter 3's experiments: Muon on one device, compared with AdamW; what the worker shows.

All in float64, so that all processors print the same. `watched_run` trains the digits and looks at one matrix, and
`embedding_run` follows the rows of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from distmuon.extras.metrics.matrix import rms, spectral_norm, update_of
from distmuon.launch import World
from distmuon.models.digits import Split, batch_rows, digits
from distmuon.models.networks import MLP, Transformer, initial_weights
from distmuon.optim.muon import Muon, scale
from distmuon.optim.newton_schulz import orthogonality_error
from distmuon.optim.param_groups import split_parameters
from distmuon.sharding.grid import Grid

WIDTHS, BATCH, SEED = (64, 256, 128, 128, 10), 256, 0
WATCHED = "layers.1.weight"  # [128, 256], in the middle of the network
LR, DECAY = 0.01, 0.1  # for Muon and AdamW alike
VOCABULARY, WIDTH, CONTEXT, COMMON = 64, 32, 16, 20  # of the transformer; tokens 0 to 19 are all that comes, but for
ONCE, NEVER = 62, 63  # this one in the very first batch, and this one never
SENTENCES, EMBEDDING_STEPS = 8, 80  # per batch; of training the transformer


# ---- The hybrid -------------------------------------------------------------------------------------------


def adamw_alone(model: nn.Module) -> list[Optimizer]:
    """Return AdamW for all of `model`, in a list of one."""
    return [AdamW(model.parameters(), lr=LR, weight_decay=DECAY)]


def hybrid(model: nn.Module, lr: float = LR, weight_decay: float = DECAY, **options: Any) -> tuple[Muon, AdamW]:
    """Return Muon for the hidden matrices and AdamW for all else, at one rate and one decay."""
    params = {group["algorithm"]: group["params"] for group in split_parameters(model)}
    muon = Muon(params["muon"], lr=lr, weight_decay=weight_decay, **options)
    adamw = AdamW(params["adamw"], lr=lr, weight_decay=weight_decay)
    return muon, adamw


def train(model: nn.Module, optimizers: Sequence[Optimizer], data: Split, steps: int) -> Iterator[float]:
    """Train; yield the loss after every step."""
    for step in range(steps):
        rows = batch_rows(step, BATCH, len(data.labels), SEED)
        loss = F.cross_entropy(model(data.images[rows]), data.labels[rows])
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        yield loss.item()


def fresh() -> tuple[MLP, Split, Split]:
    """Return the seeded network, and training and held-out digits, all in float64."""
    model = MLP(WIDTHS).double()
    model.load_state_dict(initial_weights(model, SEED))
    return model, *digits(Grid.alone(), SEED)


# ---- What to watch ----------------------------------------------------------------------------------------


def ceiling(longer_side: int, weight_decay: float) -> float:
    """Return what no spectral norm exceeds for long: scale / decay, and 1.2 for what Newton–Schulz leaves above 1."""
    return 1.2 * 0.2 * longer_side**0.5 / weight_decay


def watched_run(
    make_optimizers: Callable[[nn.Module], Sequence[Optimizer]],
    steps: int,
    look: Callable[[Tensor, Tensor], Any],
    lr: float = LR,
    weight_decay: float = DECAY,
) -> tuple[MLP, list[float], list[Any]]:
    """Train; return the model, the losses, and what `look(weight, update)` said of the watched matrix at every step.

    lr, weight_decay: those of the optimizer that moves the matrix.
    """
    model, data, _ = fresh()
    weight, losses, seen = model.get_parameter(WATCHED), [], []
    run = train(model, make_optimizers(model), data, steps)
    for _ in range(steps):
        before = weight.detach().clone()
        losses.append(next(run))
        seen.append(look(weight.detach(), update_of(before, weight.detach(), lr, weight_decay)))
    return model, losses, seen


# ---- An embedding's rows ----------------------------------------------------------------------------------


def embedding_run(make: Callable[..., Optimizer]) -> tuple[list[Tensor], list[int]]:
    """Train a transformer, its embedding by the optimizer that `make` builds, the rest by AdamW, all without decay.

    Return per step the RMS of every row's step per unit of learning rate, [VOCABULARY], and how many rows are used.
    """
    model = Transformer(VOCABULARY, WIDTH, layers=1, heads=2, context=CONTEXT).double()
    model.load_state_dict(initial_weights(model, SEED))
    table = model.tokens.weight
    others = [p for p in model.parameters() if p is not table]
    optimizers = [maker(params, lr=LR, weight_decay=0.0) for maker, params in ((make, [table]), (AdamW, others))]
    moved, in_batch = [], []
    for tokens in sentences():
        logits = model(tokens[:, :-1])
        model.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        before = table.detach().clone()
        for optimizer in optimizers:
            optimizer.step()
        moved.append(((table.detach() - before) / LR).square().mean(dim=1).sqrt())
        in_batch.append(len(tokens[:, :-1].unique()))
    return moved, in_batch


def sentences() -> Iterator[Tensor]:
    """Yield batches [SENTENCES, CONTEXT + 1]: common tokens, n with weight 1 / (n + 1), and ONCE in the first batch."""
    frequency, generator = 1 / torch.arange(1.0, COMMON + 1), torch.Generator().manual_seed(SEED)
    for step in range(EMBEDDING_STEPS):
        tokens = frequency.multinomial(SENTENCES * (CONTEXT + 1), replacement=True, generator=generator)
        tokens = tokens.view(SENTENCES, -1)
        if step == 0:
            tokens[0, 3] = ONCE
        yield tokens


# ---- What is shown ----------------------------------------------------------------------------------------

SHOWN = (1, 2, 5, 10, 20, 50, 100)  # the steps that are printed


def show_training() -> dict[str, Any]:
    """Train once with the hybrid; print the losses and three numbers that are worth a line in every log."""

    def look(weight: Tensor, update: Tensor) -> tuple[float, float, float]:
        orthogonalized = update / scale(update.shape)
        return rms(update), orthogonality_error(orthogonalized).item(), spectral_norm(weight)

    model, losses, seen = watched_run(hybrid, SHOWN[-1], look)
    print(f"On {WATCHED}, per step, at a learning rate of {LR} and a decay of {DECAY}:")
    print("  step   loss   update RMS   orthogonality error   spectral norm")
    for step in SHOWN:
        size, error, norm = seen[step - 1]
        print(f"{step:6}{losses[step - 1]:7.2f}{size:13.2f}{error:22.2f}{norm:16.2f}")
    _, _, held_out = fresh()
    right = model(held_out.images).argmax(dim=-1) == held_out.labels
    print(f"accuracy on {len(right)} held-out digits: {right.double().mean():.2f}")
    columns = zip(*seen, strict=True)
    return {"loss": losses} | dict(zip(("update RMS", "orthogonality error", "spectral norm"), columns, strict=True))


def show_rms() -> dict[str, Any]:
    """Train with AdamW alone and with Muon at two scales; print the RMS of one matrix's updates."""
    original = partial(hybrid, scale="original")
    runs: dict[str, Any] = {"AdamW": adamw_alone, "Muon, match_rms": hybrid, "Muon, original": original}
    found = {name: watched_run(make, SHOWN[-1], lambda _, update: rms(update)) for name, make in runs.items()}
    print(f"RMS of the update of {WATCHED} / learning rate (and loss)")
    print("  step" + "".join(f"{name:>17}" for name in found))
    for step in SHOWN:
        pairs = (f"{seen[step - 1]:.3f} ({losses[step - 1]:.2f})" for _, losses, seen in found.values())
        print(f"{step:6}" + "".join(f"{pair:>17}" for pair in pairs))
    return {name: seen for name, (_, _, seen) in found.items()}


def show_decay() -> dict[str, Any]:
    """Train at several strengths of weight decay; print the spectral norm of one matrix and its ceiling."""
    steps, lr, found = 120, 2 * LR, {}
    print(f"Spectral norm of {WATCHED}, lr {lr}")
    print("  decay   step 1   step 60   step 120   ceiling   loss*")
    for decay in (0.0, 0.1, 1.0, 3.0):
        make = partial(hybrid, lr=lr, weight_decay=decay)
        _, losses, norms = watched_run(make, steps, lambda weight, _: spectral_norm(weight))
        top = f"{ceiling(256, decay):.2f}" if decay else "none"
        print(f"{decay:7.1f}{norms[0]:9.2f}{norms[59]:10.2f}{norms[-1]:11.2f}{top:>10}{sum(losses[-20:]) / 20:8.2f}")
        found[f"{decay:g}"] = norms
    print("* the mean of the last 20 steps")
    return found


def show_embedding() -> dict[str, Any]:
    """Follow rows of a transformer's embedding under AdamW and under Muon, without decay."""
    runs = [embedding_run(make) for make in (AdamW, Muon)]
    print(f"How many of {VOCABULARY} rows move, and the RMS of two rows' steps")
    print("                  |         AdamW         |         Muon")
    print("  step   in batch | moved  always   once  | moved  always   once")
    for step in (*SHOWN[:-1], EMBEDDING_STEPS):
        line = f"{step:6}{runs[0][1][step - 1]:11} "
        for moved, _ in runs:
            rows = moved[step - 1]
            line += f"|{int((rows > 0).sum()):6}{rows[0]:8.3f}{rows[ONCE]:8.3f} "
        print(line.rstrip())
    still = all(rows[NEVER] == 0 for moved, _ in runs for rows in moved)
    print(f"The row of the token that never came did not move: {still}")
    named = {"always": 0, "once": ONCE}
    return {
        f"{name}, {which}": [rows[token].item() for rows in moved]
        for name, (moved, _) in zip(("AdamW", "Muon"), runs, strict=True)
        for which, token in named.items()
    }


def show(world: World, name: str) -> dict[str, Any]:
    """Show what was asked for, in this one process; return the curves behind it."""
    shows = {"training": show_training, "rms": show_rms, "decay": show_decay, "embedding": show_embedding}
    return shows[name]()
