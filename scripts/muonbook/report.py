"""What a worker says at the end: one JSON shape for every worker, and the main job's page of text."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from distmuon.models.recipe import CONTROL_FACTOR, FLOAT64_BOUND
from distmuon.sharding.layout import Layout
from distmuon.sharding.ledger import Ledger
from distmuon.verify.certificate import EXACT_STEPS, Certificate


@contextlib.contextmanager
def progress(total: int, rank: int) -> Iterator[Callable[[], object]]:
    """Yield a function to call after each step; rank 0 draws a bar on a terminal, and none in a pipe or a notebook.

    `!python` in Jupyter looks like a terminal to its child; JPY_PARENT_PID tells that it is not one.
    """
    if rank or not sys.stderr.isatty() or "JPY_PARENT_PID" in os.environ:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="step", leave=False) as bar:
        yield bar.update


def machine() -> dict[str, Any]:
    """Return what the numbers depend on: processor, cores, system, versions, GPU."""
    return {
        "processor": torch.cpu.get_capabilities().get("cpu_name") or platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def write_json(path: str, result: dict[str, Any]) -> None:
    """Write a worker's results, making the folder if need be."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def ledger_rows(counted: list[Ledger], predicted: list[Ledger]) -> list[dict[str, Any]]:
    """Return the JSON form of all ranks' ledgers: one row per rank, collective and group, labels summed."""
    rows = []
    for rank, (mine, theirs) in enumerate(zip(counted, predicted, strict=True)):
        for op, group in dict.fromkeys([*theirs.by_collective(), *mine.by_collective()]):
            traffic = mine.total(op=op, group=group)
            rows.append({"rank": rank, "op": op, "group": group} | traffic._asdict()
                        | {"predicted_sent_bytes": theirs.total(op=op, group=group).sent_bytes})  # fmt: skip
    return rows


def map_in_words(layout: Layout, tp: int) -> str:
    """Return the virtual map in a sentence or two."""
    padding = sum(bucket.padded - bucket.numel for bucket in layout.buckets)
    numel = sum(bucket.numel for bucket in layout.buckets)
    straddling = sum(len(layout.owners(bucket, i)) > 1 for bucket in layout.buckets for i in bucket.params)
    sizes = ", ".join(f"{bucket.padded:,}" for bucket in layout.buckets)
    where = f" on each of {tp} TP ranks" if tp > 1 else ""
    shards = f"is cut into {layout.dp} shards" if layout.dp > 1 else "is one shard"
    sentences = [
        f"{plural(len(layout.specs), 'parameter')} of {numel:,} elements{where},",
        f"laid out in {plural(len(layout.buffers), 'buffer')} and {plural(len(layout.buckets), 'bucket')} of {sizes};",
        f"each bucket {shards}, with {plural(padding, 'element')} of padding in all.",
        f"Straddling a shard boundary: {plural(straddling, 'parameter') if straddling else 'no parameter'}.",
    ]
    return " ".join(sentences)


def plural(number: int, noun: str) -> str:
    """Return "1 step", "1,024 steps"."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def certificate_lines(certificate: Certificate, steps: int, ranks: int) -> list[str]:
    """Return one line per verdict: what was compared, what came out, what is allowed."""
    c = certificate
    texts = {
        "exact": (f"{plural(EXACT_STEPS, 'step')} on the same gradients", "bitwise equal" if c.exact else "not equal"),
        "float64": (
            f"{plural(steps, 'step')}, difference / movement",
            f"{c.float64_relative_difference:.0e}, at most {FLOAT64_BOUND:.0e}",
        ),
        c.dtype if c.dtype != "float64" else "": (
            f"{plural(steps, 'step')}, difference / movement",
            f"{c.relative_difference:.0e}, at most {CONTROL_FACTOR:g} x control ({c.control_relative_difference:.0e})",
        ),
        "replicas": (
            f"whole parameters, as seen by {plural(ranks, 'rank')}",
            "bitwise equal" if c.replicas_agree else "not equal",
        ),
    }
    return [
        f"  {name:9s} {texts[name][0]:37s} {texts[name][1]:35s} {'pass' if passed else 'FAIL'}"
        for name, passed in sorted(c.verdicts.items(), key=lambda item: list(texts).index(item[0]))
    ]


def byte_lines(rows: list[dict[str, Any]], ranks: int, steps: int) -> list[str]:
    """Return the byte table: what a rank sends per step, mean over ranks, predicted beside counted."""
    if not rows:
        return ["  none: one process has nobody to send to"]
    lines = [f"  {'collective':16s}{'group':8s}{'calls':>8s}{'predicted':>14s}{'counted':>14s}"]
    sums: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        total = sums.setdefault((row["op"], row["group"]), [0.0, 0.0, 0.0])
        for position, key in enumerate(("calls", "predicted_sent_bytes", "sent_bytes")):
            total[position] += row[key] / (ranks * steps)
    for (op, group), (calls, predicted, counted) in sums.items():
        lines.append(f"  {op:16s}{group:8s}{calls:8.1f}{predicted:14,.0f}{counted:14,.0f}")
    predicted, counted = (sum(total[i] for total in sums.values()) for i in (1, 2))
    return [*lines, f"  {'all':24s}{sum(t[0] for t in sums.values()):8.1f}{predicted:14,.0f}{counted:14,.0f}"]
