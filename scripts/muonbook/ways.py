"""The ways to train that the book compares: one list of their names and titles. Whatever names or draws one reads here.

AdamW, and Muon on what does not know of our layouts; then distributed Muon by layout; then MuonW. Imports without
torch.

    muon_single   `gather_all`, a bucket for every matrix: the paper's Algorithm 1 as it is written
    muon          `gather_all`, in buckets, each gathered whole: the paper's public proof of concept
    muon_flat     `gather_all`, flat: one bucket, gathered whole; the fewest matrices lie across a shard boundary
    muon_cut      `gather_cut`, flat: what a shard boundary cuts, among its owners: what the paper's author asks for
    muon_owner    `owner`: nothing over DP; no shard cuts a matrix (chapter 16)

Source: Liu et al. 2025, section 2.3; its author on layouts: NVIDIA/Megatron-LM, PR 1428, 27 February 2025.
"""

from __future__ import annotations

from typing import NamedTuple


class Way(NamedTuple):
    """title: in every table and figure. strategy: of `distmuon.optim.strategies`, if this is distributed Muon."""

    title: str
    strategy: str = ""


WAYS = {  # name, as in options and stored results
    "ddp": Way("AdamW, DDP"),
    "zero1": Way("AdamW, ZeRO-1"),
    "torch_zero": Way("AdamW, torch's ZeRO-1"),
    "adamw_fsdp2": Way("AdamW, FSDP2"),
    "muon_ddp": Way("Muon, DDP"),
    "muon_fsdp2": Way("torch Muon, FSDP2"),
    "muon_single": Way("gather all, per matrix", "gather_all"),
    "muon": Way("gather all, bucketed", "gather_all"),
    "muon_flat": Way("gather all, flat", "gather_all"),
    "muon_cut": Way("gather cut", "gather_cut"),
    "muon_owner": Way("owner", "owner"),
    "muonw": Way("MuonW"),
}
TITLES = {name: way.title for name, way in WAYS.items()}
