"""Measure what the one changed line does: the small transformer of scripts/examples, with AdamW and with MuonW.

Both train on Alice in Wonderland, on one device, with every learning rate of a list, on several seeds; then both take
turns on the clock, beside torch.optim.Muon with AdamW for the rest. Four replicas step with and without sharing.
"""

import io
import runpy
import statistics
import time
from functools import cache, partial
from types import SimpleNamespace

from muonbook.measure import interleaved_timing, results

STEPS = 200
ADAMW_RATES = (1e-3, 3e-3, 1e-2, 2e-2)
MUON_RATES = (3e-3, 1e-2, 2e-2, 4e-2, 8e-2)  # beside AdamW's best for what Muon does not train
DECAY, EVERY, RANKS = 0.1, 10, 4


@cache
def task():
    """Return scripts/examples/task.py, which the examples train as well: its names, by dot."""
    return SimpleNamespace(**runpy.run_path(str(results.ROOT / "scripts" / "examples" / "task.py")))


def new_model(seed=0):
    return task().make_model(seed=seed).cpu()  # where its batches are, on a machine with a GPU as well


def train(make, seed, steps):
    """Return the held-out loss, in nats per byte, every EVERY steps, and the trained model with its optimizer."""
    import torch

    from distmuon.models.corpus import corpus

    text, model = corpus("alice"), new_model(seed)
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    held_out, losses = text.held_out_windows(128, task().CONTEXT), []
    for step in range(steps):
        if step % EVERY == 0:
            losses.append(evaluated(model, held_out))
        task().loss_of(model, *text.batch(step, task().BATCH, task().CONTEXT, seed)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return [*losses, evaluated(model, held_out)], model, optimizer


def evaluated(model, windows):
    import torch

    with torch.no_grad():
        return task().loss_of(model, *windows).item()


def adamw(lr):
    import torch

    return lambda model: torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=DECAY)


def muonw(lr, adamw_lr):
    from distmuon.optim.muonw import MuonW

    return lambda model: MuonW(model, lr=lr, adamw_lr=adamw_lr, weight_decay=DECAY)


def sweep(make_of, rates, seeds, steps):
    """Return, for each learning rate, the loss in the end on every seed, and the course of the first seed."""
    rows = []
    for rate in rates:
        courses = [train(make_of(rate), seed, steps)[0] for seed in seeds]
        ends = [course[-1] for course in courses]
        rows.append({"lr": rate, "losses": ends, "mean": statistics.fmean(ends), "course": courses[0]})
        print(f"  lr {rate:g}: held-out loss {rows[-1]['mean']:.3f} nats per byte", flush=True)
    return rows


def best_of(rows):
    return min(rows, key=lambda row: row["mean"])


def steps_to(loss, course):
    """Return after how many steps a course is at this loss or below for the first time; None: never."""
    return next((EVERY * place for place, value in enumerate(course) if value <= loss), None)


def bytes_of(state):
    import torch

    file = io.BytesIO()
    torch.save(state, file)
    return len(file.getvalue())


def clocks(adamw_lr, lr, rounds):
    """Return how long a training step takes with each Muon, over AdamW's."""
    import torch

    from distmuon.models.corpus import corpus
    from distmuon.optim.param_groups import by_algorithm

    def torchs(model):
        divided = by_algorithm(model)
        muon = torch.optim.Muon(divided["muon"], lr=lr, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
        return muon, torch.optim.AdamW(divided["adamw"], lr=adamw_lr, weight_decay=DECAY)

    makes = {"adamw": adamw(adamw_lr), "muonw": muonw(lr, adamw_lr), "torch_muon": torchs}
    models = {name: new_model() for name in makes}
    made = {name: make(models[name]) for name, make in makes.items()}
    optimizers = {name: found if isinstance(found, tuple) else (found,) for name, found in made.items()}
    batch = corpus("alice").batch(0, task().BATCH, task().CONTEXT, 0)

    def step(name):
        task().loss_of(models[name], *batch).backward()
        for optimizer in optimizers[name]:
            optimizer.step()

    seconds = interleaved_timing.take_turns({name: partial(step, name) for name in makes}, rounds)
    over_adamws = {name: results.spread(interleaved_timing.ratios(seconds[name], seconds["adamw"])) for name in makes}
    return {
        "training_step_over_adamws": over_adamws["muonw"],
        "torch_muon_training_step_over_adamws": over_adamws["torch_muon"],
    }


def replicas(world, rounds):
    """Return the CPU seconds of `step` on this rank: {sharing or not: one per round}."""
    import torch
    import torch.distributed as dist

    from distmuon.optim.muonw import MuonW

    torch.manual_seed(0)
    shapes = [(512, 512)] * 4 * world.size
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizers = {"shared": MuonW(parameters, replicas=dist.group.WORLD), "alone": MuonW(parameters)}
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for number in range(rounds + 1):
        for name, optimizer in optimizers.items():
            dist.barrier()
            began = time.process_time()
            optimizer.step()
            if number:
                seconds[name].append(time.process_time() - began)
    return seconds


def measure(quick):
    """Return everything that book/results/one_line.json holds. quick: fewer steps, seeds and rounds."""
    from distmuon import launch

    steps, seeds, rounds = (40, (0,), 3) if quick else (STEPS, (0, 1, 2), 40)
    print("AdamW:")
    with_adamw = sweep(adamw, ADAMW_RATES, seeds, steps)
    base = best_of(with_adamw)
    print(f"MuonW, its AdamW part at {base['lr']:g}:")
    with_muonw = sweep(lambda lr: muonw(lr, base["lr"]), MUON_RATES, seeds, steps)
    best = best_of(with_muonw)
    first = next(row for row in with_muonw if row["lr"] > 3 * base["lr"])  # a few times AdamW's: the first to try
    _, model, of_adamw = train(adamw(base["lr"]), 0, 2)
    _, _, of_muonw = train(muonw(best["lr"], base["lr"]), 0, 2)
    ranks = launch.run(replicas, (rounds,), dp=RANKS)
    sums = {name: [sum(times) for times in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}
    return {
        "model": {"elements": sum(p.numel() for p in model.parameters()), "steps": steps, "seeds": len(seeds)},
        "tokens_per_step": task().BATCH * task().CONTEXT,
        "adamw": with_adamw,
        "muonw": with_muonw,
        "best": {"adamw": base, "muonw": best, "first_to_try": first},
        "steps_to_adamws_end": steps_to(base["course"][-1], best["course"]),
        "state_bytes": {"adamw": bytes_of(of_adamw.state_dict()), "muonw": bytes_of(of_muonw.state_dict())},
        "clock": clocks(base["lr"], best["lr"], rounds),
        "replicas": {
            "ranks": RANKS,
            "cpu_shared_over_alone": results.spread(interleaved_timing.ratios(sums["shared"], sums["alone"])),
        },
    }
