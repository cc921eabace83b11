"""Measure what the claims page needs and no chapter of part III measures.

How large Muon's and AdamW's updates are, on random matrices and in training; what the paper's two fits of loss against
computation say about each other; what the report's run compared, in bytes, and what whole steps would have sent; what
its projection to several nodes adds up; how long the tutorial's runs took by its own tables; and whether a matrix is
still one in the eyes of an optimizer under torch's FSDP, old and new.
"""

import itertools
from dataclasses import replace

from distmuon import launch
from muonbook.measure import results

SHAPES = ((96, 64), (64, 96), (256, 256), (512, 128), (1024, 64))
MATRICES = 20  # of each shape
TARGET = 0.2  # Moonlight, section 2.2: about the RMS of AdamW's update
FITS = {"muon": (2.506, -0.052), "adamw": (2.608, -0.054)}  # Moonlight, Table 3: loss = a C^b, C in PFLOP/s-days
HALF_A_DIGIT = 0.0005  # of the fits' last
BUDGETS = {"least": 0.25, "one": 1, "most": 4}  # C of AdamW; Table 2, 6 x parameters x tokens: from 0.25 to 4.1
CLAIMED = 0.52  # Moonlight, section 3.2: of AdamW's FLOPs, for the same loss
STEPS, WATCHED = 50, (1, 10, 50)  # of training on the workload "even"
LR, BETAS = 1e-3, (0.9, 0.95)  # AdamW's betas as is usual for language models


def update_rms():
    """Return "AxB" -> spread of (RMS of the update per unit of learning rate) / 0.2, over Gaussian matrices."""
    import torch

    from distmuon.optim.muon import scale
    from distmuon.optim.newton_schulz import newton_schulz

    generator = torch.Generator().manual_seed(0)
    found = {}
    for shape in SHAPES:
        updates = [scale(shape) * newton_schulz(torch.randn(shape, generator=generator)) for _ in range(MATRICES)]
        ratios = [float(u.square().mean().sqrt()) / TARGET for u in updates]
        found[f"{shape[0]}x{shape[1]}"] = {"least": min(ratios), "most": max(ratios), **results.spread(ratios)}
    return found


def update_rms_in_training(baseline):
    """Return {"step", "least", "median", "most"} per watched step: RMS of the update per unit of learning rate, without
    weight decay, over the hidden matrices of the transformer of part III, trained in one process."""
    import torch

    from distmuon.optim.param_groups import by_algorithm
    from distmuon.sharding.grid import Grid
    from muonbook.measure import workload
    from muonbook.runnable_baselines import RUNNABLE

    torch.set_num_threads(1)  # the last bits depend on it
    job, grid = replace(workload.SHAPES["even"], lr=LR), Grid.alone("cpu")
    trainer = RUNNABLE[baseline].make(job, grid)
    for group in trainer.optimizers[0].param_groups:
        group["betas"] = BETAS
    matrices = by_algorithm(trainer.model)["muon"]
    batches = workload.batches(job, workload.pixels(grid, job.context), 1, 0)
    found = []
    for step in range(1, STEPS + 1):
        before = [p.detach() * (1 - LR * job.weight_decay) for p in matrices]
        trainer.step(next(batches))
        if step in WATCHED:
            moved = zip(before, matrices, strict=True)
            sizes = sorted(float((old - p.detach()).square().mean().sqrt()) / LR for old, p in moved)
            found.append({"step": step, "least": sizes[0], "median": sizes[len(sizes) // 2], "most": sizes[-1]})
    return found


def flops_to_the_same_loss():
    """Return the share of AdamW's budget with which Muon's fit reaches the same loss, at the ends of the paper's range
    and between them; the budget at which it is the share that is claimed, and where that lies at least and at most for
    fits that round to the printed ones. Arithmetic, no training."""
    at_one, grows = share_of_budget(*FITS["muon"], *FITS["adamw"])
    shares = {name: at_one * budget**grows for name, budget in BUDGETS.items()}
    rounded = [(number - HALF_A_DIGIT, number + HALF_A_DIGIT) for fit in FITS.values() for number in fit]
    allowed = [share_of_budget(*corner) for corner in itertools.product(*rounded)]
    reached = [(CLAIMED / at) ** (1 / power) for at, power in allowed]
    claimed_at = (CLAIMED / at_one) ** (1 / grows)
    return shares | {"claimed_at": claimed_at, "claimed_at_least": min(reached), "claimed_at_most": max(reached)}


def share_of_budget(muon, falls, adamw, drops):
    """Return (s, p): Muon's fit a C^b reaches AdamW's loss with s C^p of AdamW's budget C."""
    return (adamw / muon) ** (1 / falls), drops / falls - 1


def the_reported_run():
    """Return bytes per rank and step of what the report compared, and whole steps of its model, Muon / ZeRO-1 AdamW."""
    from muonbook.measure import reported

    gathers, whole, sent, adamw = {}, {}, {}, {}
    for dp, tp in ((2, 2), (4, 1), (1, 4)):
        steps = reported.steps(dp, tp)
        grid = f"{dp}x{tp}"
        gathers[grid] = sum(step.gathers for step in steps) / dp
        sent[grid] = sum(step.muon for step in steps) / dp
        adamw[grid] = sum(step.adamw for step in steps) / dp
        if dp > 1:  # alone, ZeRO-1 AdamW sends nothing
            whole[grid] = sum(step.muon for step in steps) / sum(step.adamw for step in steps)
    other = reported.all_reduces(4)
    over = gathers["2x2"] / other
    in_bytes = {"gathers": gathers, "all_reduces_4": other, "whole_step_bytes": sent, "adamw_step_bytes": adamw}
    return {**in_bytes, "over": over, "whole_step": whole}


def look(world):
    """Return what an optimizer on this rank is handed for the two matrices of a small network, per kind of sharding."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    def network():
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

    def dimensions(model):
        return [p.ndim for name, p in model.named_parameters() if name.endswith("weight")]

    old = FullyShardedDataParallel(network(), use_orig_params=True, device_id=torch.device("cpu"))
    new = fully_shard(network(), mesh=torch.distributed.init_device_mesh("cpu", (world.size,)))
    return {"fsdp1": dimensions(old), "fsdp2": dimensions(new)}


def tutorial_time():
    """Return {data set: Muon's time over AdamW's}, by the tutorial's own tables, in seconds."""
    seconds = {"mnist": (28.86, 22.71), "cifar10": (49.47, 50.25)}
    return {data: muon / adamw for data, (muon, adamw) in seconds.items()}


def measure(quick):
    """Return everything that book/results/claims.json holds; starts two ranks. This takes seconds, quick or not."""
    from tools.reported_projection import projection

    ranks = launch.run(look, dp=2, tp=1)
    handed = {kind: [ndim for rank in ranks for ndim in rank[kind]] for kind in ranks[0]}
    rms = update_rms()
    return {
        "update_rms": rms,
        "update_rms_least": min(one["least"] for one in rms.values()),
        "update_rms_most": max(one["most"] for one in rms.values()),
        "update_rms_in_training": {
            name: update_rms_in_training(baseline) for name, baseline in (("muon", "muon"), ("adamw", "zero1"))
        },
        "flops_share": flops_to_the_same_loss(),
        "reported_bytes": the_reported_run(),
        "projection": projection(),
        "tutorial_time": tutorial_time(),
        "matrices_handed_over": {kind: len(ndims) for kind, ndims in handed.items()},
        "still_matrices": {kind: sum(ndim == 2 for ndim in ndims) for kind, ndims in handed.items()},
    }
