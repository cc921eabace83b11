"""All ranks' ledgers as rows, and as the table that a certificate prints. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distmuon.sharding.ledger import Ledger


def ledger_rows(counted: Sequence[Ledger], predicted: Sequence[Ledger] | None) -> list[dict[str, Any]]:
    """Return the JSON form of all ranks' ledgers: one row per rank, collective and group, labels summed."""
    rows = []
    for rank, ledger in enumerate(counted):
        prediction = predicted[rank] if predicted else None
        for op, group in dict.fromkeys([*(prediction.by_collective() if prediction else ()), *ledger.by_collective()]):
            traffic = ledger.total(op=op, group=group)
            foretold = prediction.total(op=op, group=group).sent_bytes if prediction else None
            rows.append(
                {"rank": rank, "op": op, "group": group} | traffic._asdict() | {"predicted_sent_bytes": foretold}
            )
    return rows


def byte_lines(rows: list[dict[str, Any]], ranks: int, steps: int) -> list[str]:
    """Return the byte table: what a rank sends per step, mean over ranks, predicted ("-": nothing) beside counted."""
    if not rows:
        return ["  none" + ": one process has nobody to send to" * (ranks == 1)]
    known = rows[0]["predicted_sent_bytes"] is not None
    lines = [f"  {'collective':16s}{'group':8s}{'calls':>8s}{'predicted':>14s}{'counted':>14s}"]
    sums: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        total = sums.setdefault((row["op"], row["group"]), [0.0, 0.0, 0.0])
        for position, key in enumerate(("calls", "predicted_sent_bytes", "sent_bytes")):
            total[position] += (row[key] or 0) / (ranks * steps)
    everything = [sum(total[position] for total in sums.values()) for position in range(3)]
    for (op, group), (calls, predicted, counted) in (sums | {("all", ""): everything}).items():
        foretold = f"{predicted:,.0f}" if known else "-"
        lines.append(f"  {op:16s}{group:8s}{calls:8.1f}{foretold:>14s}{counted:14,.0f}")
    return lines
