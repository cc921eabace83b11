"""What the studies found: lines of chapter 4b's page and mappings for its figures. Nothing here measures anything.

Every number is a median over seeds, with [least, greatest] beside it: losses above the floor, in nats per letter. A
difference is claimed as `sweep.verdict` says: on every seed, and at least 5 of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from muonbook.ch04.search_space import title
from muonbook.ch04.studies.ablations import MATCHED
from muonbook.ch04.sweep import span, verdict

Data = Mapping[str, Any]  # what a study returned
Curves = dict[str, tuple[list[float], list[float]]]  # for `draw_curves`: name -> (x, y)
GAP = "gap [least, greatest]"


def ahead(name: str, first: Sequence[float], second: Sequence[float]) -> str:
    """Return on how many seeds the first, called `name`, has the smaller value or the greater, and if that is a claim.

    Whichever of the two is seen more often is told.
    """
    found = verdict(first, second)
    where, seeds = ("behind", found.losses) if found.losses > found.wins else ("ahead", found.wins)
    return f"{name} {where} on {seeds} of {found.seeds}: {'claimed' if found.claimed else 'no claim'}"


def _medians(rows: Sequence[Data]) -> list[float]:
    return [statistics.median(row["gaps"]) for row in rows]


def _by(rows: Sequence[Data], *keys: str) -> dict[Any, Data]:
    """Return the rows by the value of one key, or by the values of several."""
    return {row[keys[0]] if len(keys) == 1 else tuple(row[key] for key in keys): row for row in rows}


def spectra_lines(data: Data) -> list[str]:
    """Return effective ranks over the moments of training, and whose weights use more directions in the end."""
    lines = []
    for matrix, (rows, columns) in data["shapes"].items():
        full = min(rows, columns)
        lines.append(f"effective rank of {matrix} [{rows}, {columns}], at most {full}; after step")
        lines.append(" " * 18 + "".join(f"{step:8d}" for step in data["steps"]) + "   in the end, range")
        for name, kinds in data["ranks"].items():
            for kind, seeds in kinds[matrix].items():
                medians = "".join(f"{statistics.median(moment):8.1f}" for moment in zip(*seeds, strict=True))
                last = [moments[-1] for moments in seeds]
                lines.append(f"  {title(name):6s}{kind:10s}{medians}   [{min(last):.1f}, {max(last):.1f}]")
        ends = {name: [seed[-1] for seed in kinds[matrix]["weight"]] for name, kinds in data["ranks"].items()}
        for other in (name for name in ends if name != "muon"):
            found = verdict(ends[other], ends["muon"])
            lines.append(f"  Muon's weight ends with more than {title(other)}'s on {found.wins} of {found.seeds} seeds")
    return lines


def rms_lines(data: Data) -> list[str]:
    """Return what the RMS of Muon's update does: at one learning rate, and at the best one for each."""
    lines = []
    for told, rows in ((f"lr {data['lr']:g} throughout", data["rows"]), ("lr retuned", data["tuned"])):
        lines.append(f"  RMS of Muon's update, {told:20s}{GAP}")
        matched = _by(rows, "rms").get(MATCHED)
        for row in rows:
            lr = f"lr {row['lr']:g}" if "lr" in row else ""
            words = "" if matched is None or row is matched else ahead(f"{MATCHED:g}", matched["gaps"], row["gaps"])
            lines.append(f"  {row['rms']:6g}  {lr:14s}{span(row['gaps']):24s}{words}".rstrip())
    return lines


def decay_lines(data: Data) -> list[str]:
    """Return what weight decay does in short and in long runs."""
    lines = [f"  {'':6s}{'steps':>6s}{'decay':>7s}{'lr':>8s}  {GAP:22s}{'spectral norm':>14s}{'RMS':>7s}"]
    for row in data["rows"]:
        spectral, size = (statistics.median(row[key]) for key in ("spectral", "sizes"))
        how = f"{title(row['optimizer']):6s}{row['steps']:6d}{row['weight_decay']:7g}{row['lr']:8.3g}"
        lines.append(f"  {how}  {span(row['gaps']):22s}{spectral:14.2f}{size:7.3f}")
    rows = _by(data["rows"], "optimizer", "steps", "weight_decay")
    none, some = min(key[2] for key in rows), max(key[2] for key in rows)
    for name, steps in dict.fromkeys(key[:2] for key in rows):
        words = ahead(f"decay {some:g}", rows[name, steps, some]["gaps"], rows[name, steps, none]["gaps"])
        lines.append(f"  {title(name)}, {steps} steps: {words}")
    return lines


def routing_lines(data: Data) -> list[str]:
    """Return what comes of it when Muon gets more than the hidden matrices."""
    hidden = data["rows"][0]
    lines = [f"  {'Muon moves':20s}{'lr':>6s}  {GAP}  hidden alone is"]
    for row in data["rows"]:
        words = "" if row is hidden else ahead("hidden", hidden["gaps"], row["gaps"]).removeprefix("hidden ")
        lines.append(f"  {row['route']:20s}{row['lr']:6.3g}  {span(row['gaps']):22s}{words}".rstrip())
    return lines


def batch_lines(data: Data) -> list[str]:
    """Return how the gaps change with the batch, and their ratio: what AdamW has left over what Muon has."""
    lines = [f"  {data['windows']} windows; gap [least, greatest], and AdamW's over Muon's"]
    lines.append(f"  {'batch':>5s}{'steps':>7s}  {'AdamW':22s}{'Muon':22s}{'ratio':>5s}")
    rows = _by(data["rows"], "optimizer", "batch")
    for batch in dict.fromkeys(row["batch"] for row in data["rows"]):
        adamw, muon = rows["adamw", batch], rows["muon", batch]
        ratio = statistics.median(a / m for a, m in zip(adamw["gaps"], muon["gaps"], strict=True))
        both = f"{span(adamw['gaps']):22s}{span(muon['gaps']):22s}"
        lines.append(f"  {batch:5d}{adamw['steps']:7d}  {both}{ratio:5.2f}")
        lines.append(f"{'':16s}lr {adamw['lr']:<19.3g}lr {muon['lr']:.3g}")
        lines.append(f"{'':16s}{ahead('Muon', muon['gaps'], adamw['gaps'])}")
    return lines


def finetune_lines(data: Data) -> list[str]:
    """Return the table of who pretrained and who fine-tuned, and who should have fine-tuned."""
    lines = [f"  pretrained for {data['pretraining_steps']} steps, then {data['steps']} steps on another grammar"]
    lines += [f"  {title(name)} pretrains to {span(gaps)}" for name, gaps in data["pretrained"].items()]
    lines.append(f"  {'pretrained':12s}{'fine-tuned':12s}{'lr':>8s}  {GAP}")
    rows = _by(data["rows"], "pretrained", "optimizer")
    for (first, second), row in rows.items():
        lines.append(f"  {title(first):12s}{title(second):12s}{row['lr']:8.3g}  {span(row['gaps'])}")
    for first in data["pretrained"]:
        words = ahead("Muon", rows[first, "muon"]["gaps"], rows[first, "adamw"]["gaps"])
        lines.append(f"  fine-tuning what {title(first)} pretrained: {words}")
    return lines


LINES = {
    "spectra": spectra_lines,
    "rms": rms_lines,
    "decay": decay_lines,
    "routing": routing_lines,
    "batch": batch_lines,
    "finetune": finetune_lines,
}


# ---- For figures ------------------------------------------------------------------------------------------


def spectra_curves(data: Data, matrix: str, kind: str, moment: int = -1) -> dict[str, list[float]]:
    """Return optimizer -> singular values over the largest, for `draw_spectra`. moment: place in data["steps"]."""
    return {title(name): kinds[matrix][kind][moment] for name, kinds in data["values"].items()}


def rms_curves(data: Data) -> Curves:
    """Return (RMS, median gap) at one learning rate, and at the best one for each."""
    kinds = {"lr unchanged": data["rows"], "lr retuned": data["tuned"]}
    return {name: ([row["rms"] for row in rows], _medians(rows)) for name, rows in kinds.items()}


def decay_curves(data: Data, optimizer: str, what: str = "gaps") -> Curves:
    """Return decay -> (steps, values) along the long run of the first seed. what: "gaps", "spectral" or "rms"."""
    rows = [row for row in data["rows"] if row["optimizer"] == optimizer]
    long = max(row["steps"] for row in rows)
    return {
        f"decay {row['weight_decay']:g}": (row["on_the_way"]["steps"], row["on_the_way"][what])
        for row in rows
        if row["steps"] == long
    }
