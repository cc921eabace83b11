"""Tables of the page on Muon since the blueprint: coefficients in half precision, the Gram form on a GPU, the race."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from muonbook.ch04 import sweep, tables
from muonbook.ch04.search_space import RACERS
from muonbook.markdown_table import table
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
OTHERS = {"unit_rms": "unit RMS"}  # which do not race
# What ranks would have to add up for a matrix [A, B] that is cut over them, in the worse of the two directions
IF_CUT = {
    "muoneq": "A numbers",
    "muon_plus": "A + B + 1 numbers, one after the other",
    "normuon": "A + 1 numbers, one after the other",
}
FORMS = {
    "centred Gram, bf16": "centred Gram form fails in bf16",
    "Gram, bf16": "Gram form fails in bf16",
    "Gram, fp16, restart as published": "in fp16 with one restart",
    "Gram, fp16": "in fp16 with our restarts",
}

IN_SHORT = ("1024x4096", "24x1024x4096", "4096x16384")  # of the matrices that were timed on a GPU


def ns_coefficients() -> str:
    """Return what the published coefficients cost, and on how many spectra each form fails in half precision."""
    found = results.load("ns_coefficients")
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
    return table(("coefficients", "products", "time over Jordan's", *FORMS.values(), "relative error at rank 1"), rows)


def on_a_gpu() -> str:
    """Return how long both forms take on a GPU for three matrices, and in a fold for all, with their products alone."""
    short, whole = [], []
    for row in results.load("gpu")["speed"]["rows"]:
        alone = row["products_ms"]
        cells = (
            row["shape"].replace("x", " × "),
            f"{row['standard_ms']:.2f} ms",
            f"{row['half_ms'] / row['standard_ms']:.2f}",
            f"{row['half_products_ms'] / alone:.2f}",
            f"{row['half_cublas_ms'] / alone:.2f}",
            f"{row['gram_ms'] / row['standard_ms']:.2f}",
        )
        whole.append(cells)
        if row["shape"] in IN_SHORT:
            short.append((*cells[:2], f"{row['half_ms']:.2f} ms"))
    heads = ("matrices", "standard form, bf16", "Gram form, float16")
    more = ("over standard", "products alone, over standard's", "the same without our kernel")
    table_of_all = table((*heads[:2], f"{heads[2]}, {more[0]}", *more[1:], "centred form, bf16, over standard"), whole)
    note = "Below 1 means quicker than the standard form. The centred form is for CPUs, because it has more kernels."
    return f"{table(heads, short)}\n```{{dropdown}} All seven matrices\n{table_of_all}\n{note}\n```\n"


def costs() -> str:
    """Return how long each variant takes, and what it would send if matrices stayed cut."""
    times = results.load("variant_costs")["time_over_muons"]
    rows = [
        (OTHERS.get(name) or RACERS[name].title, f"{ratio['median']:.2f}", IF_CUT.get(name, "nothing"))
        for name, ratio in times.items()
        if name != MUON
    ]
    return table(("", "time over Muon's", "sent if matrices stayed cut"), rows)


def race() -> str:
    """Return how each variant ends in the race, beside the Muon of the same race, and what may be claimed."""
    races = [results.load(name) for name in ("race_normuon", "race_variants")]
    source = {name: race for race in races for name in race["racers"]}
    rows = []
    for name in sorted(source, key=lambda name: statistics.median(tables.gaps(source[name], name))):
        racers, gaps = source[name]["racers"], tables.gaps(source[name], name)
        against = sweep.verdict(gaps, tables.gaps(source[name], MUON))
        verdict = "" if name == MUON else _verdict(against)
        counts = "" if name == MUON else f"{against.wins} of {against.seeds}"
        flops = racers[name]["flops"]["optimizer"] / racers[MUON]["flops"]["optimizer"]
        cells = (sweep.span(gaps), f"{racers[name]['best']['lr']:g}", f"{flops:.2f}", counts, verdict)
        rows.append((RACERS[name].title, *cells))
    heads = (
        "",
        "gap to the floor, nats per letter",
        "its best rate",
        "operations over Muon's",
        "seeds ahead of Muon",
        "verdict",
    )
    return table(heads, rows)


def _verdict(against: sweep.Verdict) -> str:
    if not against.claimed:
        return "cannot tell"
    return "better" if against.wins else "worse"


def _row(rows: Sequence[dict[str, Any]], name: str, form: str) -> dict[str, Any]:
    return next(row for row in rows if (row["coefficients"], row["form"]) == (name, form))


def _fails(rows: Sequence[dict[str, Any]], name: str, form: str) -> str:
    row = _row(rows, name, form)
    return f"{row['fails']} of {row['spectra']}"
