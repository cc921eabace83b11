"""Our own Muons as the kit sees them, and an example of how an adapter is written. Nothing else here knows of them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.muon import Muon
from distmuon.optim.muonw import MuonW
from distmuon.sharding.grid import Grid
from muon_conformance.adapter import Adapter, Groups

CLAIMS: dict[str, Any] = dict(nesterov=True, momentum_kind="sum", scale="match_rms", epsilon=0.0, decays_bf16=True)
MARKS = {"adamw": {"algorithm": "adamw"}}
DTENSORS = ("fsdp", "fsdp_uneven", "fsdp_short", "columns", "hybrid", "tp", "resumed")


def _apart(groups: Groups, momentum: float, **options: Any) -> Groups:
    """Give Muon's groups the momentum, which AdamW's do not have."""
    return [group if group.get("algorithm") == "adamw" else {"momentum": momentum} | group for group in groups]


def _alone(groups: Groups, momentum: float, **options: Any) -> DistributedMuon:
    return DistributedMuon(_apart(groups, momentum), Grid.alone(), **options)


def _on_grid(world: Any, mesh: Any, groups: Groups, momentum: float, **options: Any) -> DistributedMuon:
    return DistributedMuon(_apart(groups, momentum), Grid.of_groups(dp=dist.group.WORLD), **options)


muon = Adapter(
    lambda groups, **options: Muon(groups, batched=False, **options),
    **CLAIMS,
)
muonw = Adapter(
    lambda groups, momentum, **options: MuonW(_apart(groups, momentum), batched=False, **options),
    marks=MARKS,
    placements=("replicated", *DTENSORS),
    **CLAIMS,
)
distributed_muon = Adapter(
    _alone,
    on_ranks=_on_grid,
    marks=MARKS,
    placements=("own",),
    lacks={
        "gradients stay as they were": "a step uses the gradients up; `.grad` is None after it, as the contract says."
    },
    refuses={
        "the distributed checkpoints state by names": "this is no state of a sharded optimizer",
        "a model and its optimizer are copied by deepcopy": "cannot be copied or pickled",
        "a model and its optimizer are copied by pickle": "cannot be copied or pickled",
        "a parameter is replaced in its group": "the groups hold other parameters",
        "a parameter is taken out of its group": "the groups hold other parameters",
    },
    **CLAIMS,
)
