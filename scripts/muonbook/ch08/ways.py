"""Forty matrices of mixed sizes, gathered over DP in every way there is: calls and bytes, or times."""

from __future__ import annotations

from distmuon.launch import World
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import ParamSpec
from muonbook.measure import coalescing

SHAPES = ((64, 96), (31, 45), (128, 32), (50, 50), (17, 90), (80, 64), (33, 33), (96, 96))
MANY = tuple(ParamSpec(str(n), SHAPES[n % len(SHAPES)], "float32") for n in range(40))


def gather(world: World, timed: bool) -> list[dict[str, coalescing.Found | None]] | None:
    """Gather many matrices in every way, and count; or take the time."""
    return world.gather(coalescing.compare(Grid.of(world), MANY, timed))


def report(ranks: list[dict[str, coalescing.Found | None]], timed: bool) -> tuple[bool, None]:
    """Print calls and bytes of each way, or its time beside the quickest, as rank 0 found them."""
    found, dp = ranks[0], len(ranks)
    known = {name: row for name, row in found.items() if row is not None}
    if timed:
        for name, row in known.items():
            print(f"{name:<34}{row.seconds / min(row.seconds for row in known.values()):>6.1f} x the quickest")
        return True, None
    needed = 2 * sum(spec.numel for spec in MANY) * (dp - 1) / dp  # bf16; no ring sends less
    print(f"{len(MANY)} matrices, {dp} ranks             asked  made  bytes sent  padding")
    for name in found:
        if name not in known:
            print(f"{name:<34}skipped: torch has none here")
            continue
        row = known[name]
        sent = row.made.sent_bytes
        print(f"{name:<32}{row.asked.calls:>6}{row.made.calls:>6}{sent:>12,}{1 - needed / sent:>9.2%}")
    right = all(row.right for row in known.values())
    same = all(row.asked.sent_bytes == row.made.sent_bytes for row in known.values())
    print(f"All ways gave the same {len(MANY)} matrices, bit for bit: {right}.")
    print(f"Ledger and torch count the same bytes: {same}.")
    return right and same, None
