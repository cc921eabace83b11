"""A mixture of experts with a trillion parameters, dealt out over thousands of ranks by one process."""

from __future__ import annotations

import resource
import sys
import time
from statistics import median

from distmuon.optim import strategies
from distmuon.optim.newton_schulz import flops
from distmuon.sharding.layout import DEFAULT_BUCKET_SIZE
from distmuon.verify.prediction import predict_step, predict_work
from muonbook.measure.model_shapes import Experts, Latent, Shape

DP, TP = 1024, 8
SECONDS, BYTES = 10.0, 2e9  # within which a laptop should have the plan
MODEL = Shape(
    "a trillion parameters", "sizes of Kimi K2's config.json (Moonshot AI 2025), attention as in Moonlight",
    layers=61, width=7168, heads=64, key_heads=64, mlp=18432, vocabulary=163840, context=4096,
    experts=Experts(routed=384, active=8, width=2048, shared=2048, dense_layers=1), latent=Latent(rank=512, rotary=64),
)  # fmt: skip


def lines() -> list[str]:
    """Plan the model; return what was found, and whether it was quick."""
    began = time.monotonic()
    specs, muon = MODEL.specs(TP)
    layout = strategies.planner("owner")(specs, muon, DP, TP, DEFAULT_BUCKET_SIZE)
    work = predict_work("owner", layout, TP, muon)
    took, held = time.monotonic() - began, peak_bytes()
    ledger, adamw = predict_step(layout, TP, 0, muon, "owner"), predict_step(layout, TP, 0)
    fair = sum(work.values()) / len(work)
    more = ledger.total().sent_bytes / adamw.total().sent_bytes
    sizes = sorted(flops(specs[index].full_shape(TP)) for index in muon)
    return [
        f"{MODEL.parameters / 1e12:.2f} trillion parameters; {len(muon):,} matrices for {len(work):,} ranks",
        f"Newton–Schulz of the largest matrix takes as much work as {sizes[-1] / median(sizes):.0f} of the typical one",
        f"owners: slowest / fair share {max(work.values()) / fair:.3f}; without work: {list(work.values()).count(0)}",
        f"rank 0 sends {float(more):.3f} times the bytes of ZeRO-1 AdamW's step",
        f"planned within ten seconds: {took < SECONDS}; within two gigabytes: {held < BYTES}",
    ]


def peak_bytes() -> int:
    """Return the most memory that this process ever held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
