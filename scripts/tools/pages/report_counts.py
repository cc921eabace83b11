"""From 0.57 to 1.71: one report's two runs counted in six ways, each one change from the one before, as a table.

Durations are those of the run's public traces (book/results/report_traces.json), bytes those that our map plans for
its five matrices (`measure.reported`). Both are of the run's five steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any, NamedTuple

from muonbook.figures.style import in_bytes
from muonbook.markdown_table import table
from muonbook.measure import reported
from tools.reported_projection import STEPS

MUON, ADAMW = "trace_muon_FULLSTEP_dp2_tp2", "trace_adamw_FULLSTEP"
GRID, ADAMWS_GRID = (2, 2), (4, 1)
Parts = Mapping[str, float]


class WayToCount(NamedTuple):
    """One way to count: what; {part: amount} of each side, in `unit`; what that changes; digits of the ratio."""

    counts: str
    muon: Parts
    adamw: Parts
    changes: str
    unit: str = "B"
    digits: int = 2

    @property
    def written(self) -> str:
        """The ratio as it is written."""
        return f"{sum(self.muon.values()) / sum(self.adamw.values()):.{self.digits}f}"

    def side(self, parts: Parts) -> str:
        """Return what was counted of a side, and what it consists of, where that is more than one thing."""
        amounts = [
            in_bytes(n) if self.unit == "B" else f"{n:.1f} {self.unit}" for n in (sum(parts.values()), *parts.values())
        ]
        made_of = ", ".join(f"{name} {amount}" for name, amount in zip(parts, amounts[1:], strict=True))
        return f"{amounts[0]} ({made_of})" if len(parts) > 1 else amounts[0]


def ways(found: Mapping[str, Any]) -> list[WayToCount]:
    """Return the six ways. found: report_traces.json."""
    runs, first = (
        {run["run"]: run for run in found["runs"]},
        [found["traces"][f"{name}_rank0"] for name in (MUON, ADAMW)],
    )
    planned, all_reduces = reported.steps(*GRID), STEPS * reported.all_reduces(ADAMWS_GRID[0])
    names = ("gathers", "over_tp", "muon", "adamw")
    gathers, over_tp, muon, adamw = (STEPS * fmean(getattr(row, name) for row in planned) for name in names)
    momentum = {"momentum over DP": gathers - over_tp, "over TP": over_tp}
    step = {**momentum, "the rest": muon - gathers}
    again = " and ".join(
        f"{name} {trace['name_matched_ms'] / trace['communication_ms']:.2f} times"
        for name, trace in zip(("Muon", "AdamW"), first, strict=True)
    )
    ranks = ", ".join(f"{ratio:.3f}" for who, ratio in by_rank(found).items() if who.startswith("rank "))
    return [
        WayToCount(
            "every event whose name matches, on rank 0",
            _by_name(first[0]),
            _by_name(first[1]),
            "This is her count. Each collective leaves several events: an operator, an annotation, a kernel.",
            "ms",
        ),
        WayToCount(
            "kernels alone, on rank 0",
            {"kernels": first[0]["communication_ms"]},
            {"kernels": first[1]["communication_ms"]},
            f"Each collective counts once. The ratio hardly moves, because names had counted {again}.",
            "ms",
            3,
        ),
        WayToCount(
            "kernels, mean of all four ranks",
            _kernels(runs[MUON]),
            _kernels(runs[ADAMW]),
            f"A kernel also waits for the last rank to come. Rank by rank the ratio is {ranks}.",
            "ms",
        ),
        WayToCount(
            "bytes of the same calls",
            momentum,
            {"everything": all_reduces},
            "A part of Muon's step stands beside all of AdamW's: that run never sent Muon's gradients and parameters.",
        ),
        WayToCount(
            "bytes of Muon's whole steps",
            step,
            {"everything": all_reduces},
            "It looks as if her number were confirmed, but AdamW still runs on another grid.",
            digits=3,
        ),
        WayToCount(
            "bytes of both on Muon's grid",
            step,
            {"everything": adamw},
            "AdamW sends as much as Muon's rest, and momentum comes on top. We planned it with ZeRO-1; nobody ran it.",
        ),
    ]  # fmt: skip


def _by_name(trace: Mapping[str, Any]) -> Parts:
    once = trace["communication_ms"]
    return {"counted once": once, "counted again": trace["name_matched_ms"] - once}


def _kernels(run: Mapping[str, Any]) -> Parts:
    return {"sending": run["transfer_ms"], "waiting": run["communication_ms"] - run["transfer_ms"]}


def by_rank(found: Mapping[str, Any]) -> dict[str, float]:
    """Return Muon / AdamW, of milliseconds in kernels: rank by rank, on the mean of all, and that without waiting."""
    ranks = range(4)
    muon, adamw = (
        [found["traces"][f"{name}_rank{rank}"]["communication_ms"] for rank in ranks] for name in (MUON, ADAMW)
    )
    sending = {run["run"]: run["transfer_ms"] for run in found["runs"]}
    ratios = {f"rank {rank}": muon[rank] / adamw[rank] for rank in ranks}
    return {**ratios, "all four": sum(muon) / sum(adamw), "all four, less waiting": sending[MUON] / sending[ADAMW]}


def markdown(found: Mapping[str, Any]) -> str:
    """Return the six counts as a table. found: report_traces.json."""
    grids = [f"DP {dp}{f' × TP {tp}' * (tp > 1)}" for dp, tp in (GRID, ADAMWS_GRID)]
    heads = (
        "what is counted",
        f"Muon, {grids[0]}",
        f"AdamW, {grids[1]} until the last row",
        "ratio",
        "what that changes",
    )
    return table(
        heads, [(w.counts, w.side(w.muon), w.side(w.adamw), f"**{w.written}**", w.changes) for w in ways(found)]
    )
