"""What pages include: the roofline a gather's seconds by link, the envelope models worked out and a calculator."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from muonbook import baselines
from muonbook.markdown_table import table
from muonbook.planner.fabrics import ADAPTER, INFINIBAND, NVLINK, PCIE
from tools.pages.envelope import LAYOUTS, PRESETS, REPEATING, Step, by_layout

LINKS = {  # 10^9 bytes per second, of one GPU
    "NVLink of an H100": NVLINK.bytes_per_second / 1e9,
    "eight adapters of 400 Gb/s in a host, for one ring (T = 1)": INFINIBAND.bytes_per_second / 1e9,
    "the same, each for a ring of its own (T = 8)": ADAPTER.bytes_per_second / 1e9,
    "PCIe 4, 16 lanes": PCIE.bytes_per_second / 1e9,
    "PCIe 4, 4 lanes": PCIE.bytes_per_second / 4e9,
}
GATHERED = 100e6  # bytes
REACHED = 400e12  # FLOPs per second
WAYS = ("muon_flat", "muon_cut", "muon_owner", "muonw")
TITLES = dict(zip(LAYOUTS, (baselines.TITLES[way] for way in WAYS), strict=True))
FOLDED = ("7b", "1t")  # of the presets
SCRIPT = Path(__file__).resolve().parents[3] / "book" / "_static" / "envelope.js"
FIELDS = {
    "layers": "layers",
    "width": "width",
    "mlp": "MLP width, of one expert",
    "vocabulary": "vocabulary",
    "heads": "heads",
    "kv_heads": "heads of keys and values",
    "mlp_matrices": "matrices in an MLP, 3 if gated",
    "experts": "experts in a layer, 1 if dense",
    "active": "experts that a token sees",
    "tokens": "tokens in a step, all ranks",
    "dp": "data-parallel ranks D",
    "tp": "tensor-parallel ranks T",
    "pp": "pipeline stages",
    "ep": "ranks that share the experts",
    "gradient": "bytes of a gradient",
    "parameter": "bytes of a weight",
    "tflops": "TFLOP/s that a rank reaches",
    "dp_link": "GB/s of a rank, data parallel",
    "tp_link": "GB/s of a rank, tensor parallel",
}


def links() -> str:
    """Return how long a gather takes on each link, and how many tokens hide gradients, as a table in Markdown."""
    rows = [
        (
            name,
            f"{rate:.3g} GB/s",
            seconds(GATHERED / rate / 1e9),
            f"{float(f'{REACHED / rate / 1e9:.3g}'):,.0f}",
        )
        for name, rate in LINKS.items()
    ]
    return table(
        ("link", "speed, each way", "gather of 100 MB, many ranks", "tokens that hide float32 gradients, see below"),
        rows,
    )


def models() -> str:
    """Return the models, each in all layouts, as tables in Markdown."""
    parts = []
    for name, (title, step) in PRESETS.items():
        found = by_layout(step)
        rows = [
            ("forward and backward", *(seconds(one.pass_seconds) for one in found.values())),
            ("ranks that a matrix lies on, over DP", *(_lies_on(one) for one in found.values())),
            ("Newton–Schulz", *(seconds(one.newton_schulz_seconds) for one in found.values())),
            ("a rank sends with AdamW", *(in_bytes(one.adamw_bytes) for one in found.values())),
            (
                "a rank sends in addition with Muon",
                *(in_bytes(one.muon_dp_bytes + one.muon_tp_bytes) for one in found.values()),
            ),
            ("states on a rank with AdamW", *(in_bytes(one.adamw_kept) for one in found.values())),
            ("states on a rank with Muon", *(in_bytes(one.muon_kept) for one in found.values())),
            ("**Muon adds to the step**", *(f"**{percent(one.share)}**" for one in found.values())),
        ]
        body = f"{_said(step)}\n\n{table(('', *(TITLES[layout] for layout in LAYOUTS)), rows)}"
        fold = name in FOLDED
        parts.append(f"```{{dropdown}} {title}\n{body.strip()}\n```" if fold else f"**{title}.** {body}")
    return "\n\n".join(parts)


def _lies_on(step: Step) -> str:
    """Return s, on average over Newton–Schulz's operations; with an owner it is 1, and FSDP2 cuts for all ranks."""
    if step.layout not in REPEATING:
        return "1" if step.layout == "owner" else "all"
    once = sum(part.newton_schulz_flops for part in step.parts)
    return f"{step.newton_schulz_flops / step.tp / once:.3g}"


def calculator() -> str:
    """Return the place of the calculator in a page of the book, which loads book/_static/envelope.js to fill it."""
    return f":::{{container}} envelope\n```{{raw}} html\n{_box('1b')}\n```\n:::\n"


def calculator_in_a_notebook(first: str) -> str:
    """Return the calculator with its script, for a cell that may be run again. first: the preset that it shows."""
    return f"{_box(first)}\n<script>(() => {{\n{SCRIPT.read_text(encoding='utf-8')}}})();</script>\n"


def _box(first: str) -> str:
    fields = [{"name": name, "label": label} for name, label in FIELDS.items()]
    presets = [{"title": title, "step": asdict(step)} for title, step in PRESETS.values()]
    cases = html.escape(json.dumps({"fields": fields, "presets": presets}))
    without = "The calculator needs JavaScript. The tables need none."
    return f'<div id="envelope" data-first="{[*PRESETS].index(first)}" data-cases="{cases}"><p>{without}</p></div>'


def _said(step: Step) -> str:
    experts = f", {step.experts} experts of width {step.mlp:,} of which a token sees {step.active}" * (step.experts > 1)
    mlp = f", MLPs of width {step.mlp:,}" * (step.experts == 1)
    grid = f"D = {step.dp}, T = {step.tp}" + f", {step.pp} pipeline stages" * (step.pp > 1)
    spread = f", experts over {step.ep} ranks" * (step.ep > 1)
    tp_link = f" and {step.tp_link:.0f} GB/s over TP" * (step.tp > 1)
    keys = f", {step.kv_heads} of {step.heads} heads with keys and values" * (step.kv_heads < step.heads)
    return (
        f"{step.layers} layers of width {step.width:,}{keys}{mlp}{experts}, a vocabulary of {step.vocabulary:,}; "
        f"{grid}{spread}; {step.tokens:,} tokens in a "
        f"step; a rank reaches {step.tflops:.0f} TFLOP/s, and sends {step.dp_link:.0f} GB/s over DP{tp_link}."
    )


def seconds(value: float) -> str:
    """Return seconds with a unit that suits them."""
    return f"{value:.3g} s" if value >= 1 else _unit(value * 1e6, ("µs", "ms"))


def percent(share: float) -> str:
    """Return a share in per cent, with two digits that count."""
    return f"{float(f'{100 * share:.2g}'):,.0f} %" if share >= 1 else f"{float(f'{100 * share:.2g}'):g} %"


def in_bytes(value: float) -> str:
    """Return bytes with a unit that suits them."""
    return _unit(value, ("B", "kB", "MB", "GB", "TB"))


def _unit(value: float, names: Sequence[str]) -> str:
    for name in names[:-1]:
        if value < 1000:
            return f"{_two(value)} {name}"
        value /= 1000
    return f"{_two(value)} {names[-1]}"


def _two(value: float) -> str:
    """Return a number with two digits, or all that it has before its point."""
    return f"{value:,.0f}" if value >= 100 else f"{float(f'{value:.2g}'):g}"
