"""What chapter 15 measures: the optimizer's share over the batch, skewed grids, and links of several speeds.

Worlds are started here, without torch; `timed_steps` is what their ranks do. Kept are ratios within a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from distmuon import launch
from muonbook import network_emulation
from muonbook.measure import interleaved_timing, results
from muonbook.measure.workload import TIMED, Workload

WIDTHS = (256,)  # of the models whose batch grows
MOST_TOKENS = 32_768
GRIDS = ((8, 1), (4, 2), (2, 4), (1, 8))  # dp, tp
RATES = (30.0, 100.0, 300.0, 1000.0, None)  # Mbit/s; None: unlimited
RANKS = 4  # of the worlds with links
LINKED = Workload(width=128, layers=2, sequences=RANKS)  # small enough for the slowest link
TIME_STEPS = "muonbook.ch15.timed_steps:time_steps"

Ranks = Sequence[dict[str, dict[str, Any]]]  # what `time_steps` returned of one grid, by rank


class SizedBaseline(NamedTuple):
    """A baseline, by its name, with a bucket size of its own: elements, for ours that are not flat."""

    baseline: str
    bucket_size: int = TIMED.bucket_size


MUON_LAYOUTS = ("muon", "muon_flat", "muon_cut", "muon_owner")
SKEW = {name: SizedBaseline(name) for name in (*MUON_LAYOUTS, "zero1", "ddp")}
LINKS = SKEW | {"zero1_small": SizedBaseline("zero1", 1 << 15)}


def measure(quick: bool, obstacle: str | None) -> dict[str, Any]:
    """Return all that is measured. obstacle: why ranks have no networks of their own, and "links" is None; or None."""
    rounds = 1 if quick else 8
    share = measure_share(2, 1024) if quick else measure_share(rounds)
    skew = measure_skew(rounds, GRIDS[::2] if quick else GRIDS)
    links = None if obstacle is not None else measure_links(rounds, (100.0, None) if quick else RATES)
    return {"share": share, "skew": skew, "links": links}


def measure_share(rounds: int, most_tokens: int = MOST_TOKENS) -> dict[str, Any]:
    """Return per width of a model {"tokens": [...], "muon": [spread, ...], "adamw": [spread, ...]}: what
    `optimizer_share` finds on one rank with one thread, as ranks have elsewhere.
    """
    job, tokens, found = "muonbook.ch15.timed_steps:optimizer_share", token_counts(most_tokens), dict[str, Any]()
    for width in WIDTHS:
        shares = launch.run(job, (width, tokens, rounds))[0]
        found[str(width)] = {"tokens": tokens} | {name: list(map(spread, each)) for name, each in shares.items()}
    return found


def token_counts(most: int) -> list[int]:
    """Return 64, 128, 256, ... up to `most`: tokens per step."""
    return [64 << n for n in range(most.bit_length()) if 64 << n <= most]


def measure_skew(rounds: int, grids: Sequence[tuple[int, int]] = GRIDS) -> list[dict[str, Any]]:
    """Return per grid (dp, tp): mean bytes per rank, and step time over ZeRO-1 AdamW's, of each baseline; rounds 0: no
    times. The same ranks stand on one grid after the other."""
    rows = []
    every = launch.run(TIME_STEPS, (TIMED, SKEW, rounds, False, grids), dp=GRIDS[0][0])
    for dp, tp in grids:
        ranks = [rank[dp, tp] for rank in every]
        row: dict[str, Any] = {"dp": dp, "tp": tp, "tokens": TIMED.tokens}
        for name in SKEW:
            row[name] = _bytes(ranks, name)
            if rounds:
                row[name]["seconds"] = spread(slowest(ranks, name))
                row[name]["over_zero1"] = ratios(ranks, name, "zero1")
        rows.append(row)
    return rows


def measure_links(rounds: int, rates: Sequence[float | None] = RATES) -> dict[str, Any]:
    """Return per rate the step times of each baseline, and what each computes without communication.

    Needs `network_emulation.setup_bridge`. Messages and bytes of a step, which the model is fed, come from the
    predictions.
    """
    steps: list[dict[str, Any]] = []
    computing: dict[str, list[float]] = {name: [] for name in LINKS}
    for rate in rates:
        rounds_here = rounds if rate is not None and rate < 200 else 2 * rounds  # where steps are short, more of them
        given, link = (LINKED, LINKS, rounds_here, True), network_emulation.Link(rate)
        ranks = [rank[RANKS, 1] for rank in network_emulation.run(TIME_STEPS, given, dp=RANKS, link=link)]
        steps.append({"rate_mbit": rate})
        for name in LINKS:
            seconds = spread(slowest(ranks, name))
            steps[-1][name] = {"seconds": seconds, "over_zero1": ratios(ranks, name, "zero1")}
            computing[name] += slowest(ranks, name, "computation_seconds")
    asked = {name: ranks[0][name]["demand"] | {"computation_seconds": spread(computing[name])} for name in LINKS}
    return {"ranks": RANKS, "tokens": LINKED.tokens, "baselines": asked, "steps": steps}


# ---- Of all ranks -----------------------------------------------------------------------------------------


def slowest(ranks: Ranks, name: str, key: str = "seconds") -> list[float]:
    """Return, per round, the time of the rank that took longest: ranks start together, and all must end."""
    return [max(times) for times in zip(*(rank[name][key] for rank in ranks), strict=True)]


def ratios(ranks: Ranks, name: str, to: str) -> dict[str, Any]:
    """Return the spread of step time over that of the baseline `to` in the same round."""
    return spread(interleaved_timing.ratios(slowest(ranks, name), slowest(ranks, to)))


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return `results.spread`, and beside it the range: of few values, quartiles say little."""
    return results.spread(values) | {"range": [min(values), max(values)]}


def _bytes(ranks: Ranks, name: str) -> dict[str, Any]:
    mine = [rank[name] for rank in ranks]
    found: dict[str, Any] = {
        key: sum(rank[key] for rank in mine) / len(mine) for key in ("sent_bytes", "predicted_bytes")
    }
    return found | {"equal_on_every_rank": all(rank["sent_bytes"] == rank["predicted_bytes"] for rank in mine)}
