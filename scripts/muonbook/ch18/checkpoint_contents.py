"""What a run has left in its folder: how far it came, and its checkpoints, compared to the bit."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from distmuon.extras.checkpoint import manifest, runs

STEP = re.compile(r'\{"step": (\d+)')  # how a line of metrics.jsonl begins


def contents(checkpoint: Path) -> tuple[dict[tuple[str, tuple[int, ...]], str], list[manifest.StoredGroup], Any]:
    """Return what is in a checkpoint, wherever in its files: {(tensor, where a piece begins): sha256}, groups, notes.

    A run that has begun anew writes the same tensors in another order.
    """
    found = manifest.read_manifest(checkpoint)
    files = {name: (checkpoint / name).read_bytes() for name in found.files}
    pieces = {
        (name, tuple(side.start for side in chunk.box)): hashlib.sha256(
            files[chunk.file][chunk.offset : chunk.offset + chunk.length]
        ).hexdigest()
        for name, tensor in found.tensors.items()
        for chunk in tensor.chunks
    }
    return pieces, found.groups, found.notes


def reached(run: Path) -> int:
    """Return the last step of which a run has kept an observation; 0 if there is none."""
    file = run / "metrics.jsonl"
    found = STEP.findall(file.read_text()) if file.exists() else []
    return int(found[-1]) if found else 0


def last_loss(run: Path) -> float:
    """Return the loss of the last step that was observed, in nats per token."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [float(record["scalars"]["loss"]) for record in records if "loss" in record["scalars"]][-1]


def same_end(run: Path, other: Path) -> bool:
    """Say whether two runs have the same last checkpoint, to the bit, and nothing half-written or half-removed."""
    ends = [runs.saved_steps(folder)[:1] for folder in (run, other)]
    if [] in ends or ends[0] != ends[1] or any(path.name.startswith(".") for path in run.iterdir()):
        return False
    ours, theirs = (contents(runs.at_step(folder, *end)) for folder, end in zip((run, other), ends, strict=True))
    return ours == theirs
