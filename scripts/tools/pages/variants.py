"""Tables of the page on Muon since the blueprint: schedules in half precision, and the race of variants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from muonbook.ch04 import sweep, tables
from muonbook.ch04.search_space import title
from muonbook.measure import results

MUON = "muon"
TITLES = {
    "muon": "Jordan's quintic",
    "polar_express": "Polar Express",
    "cans": "CANS",
    "deepseek_v4": "DeepSeek-V4's 8 + 2",
    "cubic5": "five cubics",
    "polar_express, 1.05": "Polar Express, safety 1.05",
}
FORMS = {
    "centred Gram, bf16": "centred Gram form fails in bf16",
    "Gram, bf16": "Gram form in bf16",
    "Gram, fp16, restart as published": "in fp16, as published",
    "Gram, fp16": "in fp16, our restarts",
}


def schedules() -> str:
    """Return what each schedule costs, and on how many spectra each form fails in half precision."""
    found = results.load("schedules")
    rows = [
        (
            TITLES[name],
            f"{cost['products']}",
            f"{cost['time 512x2048']['median']:.2f}",
            *(_fails(found["rows"], name, form) for form in FORMS),
            f"{_row(found['rows'], name, 'standard, bf16')['rank_one']:.2g}",
        )
        for name, cost in found["costs"].items()
    ]
    return _table(("schedule", "products", "time over Jordan's", *FORMS.values(), "error of rank 1"), rows)


def race() -> str:
    """Return how each variant ends in the race, beside Muon, and what may be claimed."""
    found = results.load("race_variants")
    muon = tables.gaps(found, MUON)
    rows = []
    for name in tables.by_median(found):
        gaps, racer = tables.gaps(found, name), found["racers"][name]
        against = sweep.verdict(gaps, muon)
        verdict = "" if name == MUON else _verdict(against)
        counts = "" if name == MUON else f"{against.wins} of {against.seeds}"
        flops = racer["flops"]["optimizer"] / found["racers"][MUON]["flops"]["optimizer"]
        cells = (sweep.span(gaps), f"{racer['best']['lr']:g}", f"{flops:.2f}", counts, verdict)
        rows.append((title(name), *cells))
    heads = ("", "gap to the floor", "its best rate", "operations over Muon's", "seeds ahead of Muon", "verdict")
    return _table(heads, rows)


def _verdict(against: sweep.Verdict) -> str:
    if not against.claimed:
        return "cannot tell"
    return "better" if against.wins else "worse"


def _row(rows: Sequence[dict[str, Any]], schedule: str, form: str) -> dict[str, Any]:
    return next(row for row in rows if (row["schedule"], row["form"]) == (schedule, form))


def _fails(rows: Sequence[dict[str, Any]], schedule: str, form: str) -> str:
    row = _row(rows, schedule, form)
    return f"{row['fails']} of {row['spectra']}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"
