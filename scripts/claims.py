"""Measure what the claims page needs and no chapter of part III measures.

How closely Muon's update meets its root mean square of 0.2; what the paper's two fits of loss against computation say
about each other; what the report's run compared, in bytes, and what whole steps would have sent; and whether a matrix
is still one in the eyes of an optimizer under torch's FSDP, old and new.

python scripts/claims.py
python scripts/claims.py --json out/claims.json
"""

from distmuon import launch
from distmuon.measured import results

SHAPES = ((96, 64), (64, 96), (256, 256), (512, 128), (1024, 64))
MATRICES = 20  # of each shape
TARGET = 0.2  # Moonlight, section 2.2: about the RMS of AdamW's update
FITS = {"muon": (2.506, -0.052), "adamw": (2.608, -0.054)}  # Moonlight, Table 3: loss = a C^b, C in PFLOP/s-days
BUDGETS = (1, 10, 100)  # C of AdamW; what is beyond the paper's own points would be guessing


def update_rms():
    """Return "AxB" -> spread of (RMS of the update per unit of learning rate) / 0.2, over Gaussian matrices."""
    import torch

    from distmuon.muon import scale
    from distmuon.newton_schulz import newton_schulz

    generator = torch.Generator().manual_seed(0)
    found = {}
    for shape in SHAPES:
        updates = [scale(shape) * newton_schulz(torch.randn(shape, generator=generator)) for _ in range(MATRICES)]
        found[f"{shape[0]}x{shape[1]}"] = results.spread([float(u.square().mean().sqrt()) / TARGET for u in updates])
    return found


def flops_to_the_same_loss():
    """Return AdamW's budget -> the share of it with which Muon's fit reaches the same loss. Arithmetic, no training."""
    (muon, falls), (adamw, drops) = FITS["muon"], FITS["adamw"]
    return {str(budget): (adamw * budget**drops / muon) ** (1 / falls) / budget for budget in BUDGETS}


def the_reported_run():
    """Return bytes per rank and step of what the report compared, and whole steps of its model, Muon / ZeRO-1 AdamW."""
    from distmuon.measured import reported

    gathers = [step.gathers for step in reported.steps(2, 2)]
    mean, other = sum(gathers) / len(gathers), reported.all_reduces(4)
    whole = {}
    for dp, tp in ((2, 2), (4, 1)):
        steps = reported.steps(dp, tp)
        whole[f"{dp}x{tp}"] = sum(step.muon for step in steps) / sum(step.adamw for step in steps)
    return {"muon_2x2": mean, "adamw_4x1": other, "over": mean / other, "whole_step": whole}


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


def parse():
    parser = launch.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="changes nothing: this takes seconds")
    parser.add_argument("--json", metavar="FILE", help="write what was found to this file")
    arguments = parser.parse_args()
    launch.check_writable("--json", arguments.json)
    return arguments


def main():
    arguments = parse()
    ranks = launch.run(look, dp=2, tp=1)
    handed = {kind: [ndim for rank in ranks for ndim in rank[kind]] for kind in ranks[0]}
    found = {
        "update_rms": (rms := update_rms()),
        "update_rms_least": min(one["quartiles"][0] for one in rms.values()),
        "update_rms_most": max(one["quartiles"][1] for one in rms.values()),
        "flops_share": flops_to_the_same_loss(),
        "reported_bytes": the_reported_run(),
        "matrices_handed_over": {kind: len(ndims) for kind, ndims in handed.items()},
        "still_matrices": {kind: sum(ndim == 2 for ndim in ndims) for kind, ndims in handed.items()},
    }
    print(f"update RMS / {TARGET}, five shapes: {found['update_rms_least']:.2f} to {found['update_rms_most']:.2f}")
    for budget, share in found["flops_share"].items():
        print(f"by the paper's fits, Muon matches AdamW's loss at {budget} PFLOP/s-days with {share:.2f} of them")
    bytes_ = found["reported_bytes"]
    print(f"the report's two sides in bytes: {bytes_['over']:.2f}; whole steps: {bytes_['whole_step']}")
    for kind, count in found["still_matrices"].items():
        print(f"{kind}: {count} of {found['matrices_handed_over'][kind]} weights are matrices to an optimizer")
    if arguments.json:
        results.write(arguments.json, found)


if __name__ == "__main__":
    launch.command(main)
