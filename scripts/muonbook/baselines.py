"""The baselines, ways to train that the book compares: one list of names and titles, for whatever names or draws one.

AdamW, and Muon on what does not know of our layouts; then distributed Muon by layout; then MuonW. Imports without
torch.

    muon_single   `gather_all`, a bucket for every matrix: the paper's Algorithm 1 as it is written
    muon          `gather_all`, in buckets, each gathered whole: the paper's public proof of concept
    muon_flat     `gather_all`, flat: one bucket, gathered whole; the fewest matrices lie across a shard boundary
    muon_cut      `gather_cut`, flat: what a shard boundary cuts, among its owners: what the paper's author asks for
    muon_owner    `owner`: nothing over DP; no shard cuts a matrix (chapter 16)

`measure.trainers` makes those that wrap torch's DDP, ZeRO and FSDP2; `runnable_baselines` has all that run, and what is
predicted of them.

Source: Liu et al. 2025, section 2.3; its author on layouts: NVIDIA/Megatron-LM, PR 1428, 27 February 2025.
"""

from __future__ import annotations

from typing import NamedTuple


class Baseline(NamedTuple):
    """title: in every table and figure. strategy: of `distmuon.optim.strategies`, if this is distributed Muon."""

    title: str
    strategy: str = ""


BASELINES = {  # name, as in options and stored results
    "ddp": Baseline("AdamW, DDP"),
    "zero1": Baseline("AdamW, ZeRO-1"),
    "torch_zero": Baseline("AdamW, torch's ZeRO-1"),
    "adamw_fsdp2": Baseline("AdamW, FSDP2"),
    "muon_ddp": Baseline("Muon, DDP"),
    "muon_fsdp2": Baseline("torch Muon, FSDP2"),
    "muon_single": Baseline("gather all, per matrix", "gather_all"),
    "muon": Baseline("gather all, bucketed", "gather_all"),
    "muon_flat": Baseline("gather all, flat", "gather_all"),
    "muon_cut": Baseline("gather cut", "gather_cut"),
    "muon_owner": Baseline("owner", "owner"),
    "muonw": Baseline("MuonW"),
}
TITLES = {name: baseline.title for name, baseline in BASELINES.items()}
