"""A run as one picture: its certificate, its map, its losses over the reference's, and its bytes."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from distmuon.sharding.layout import Layout
from distmuon.verify.bounds import CONTROL_FACTOR, FLOAT64_BOUND, Drift
from muonbook.figures.style import INK, MARGIN, MUTED, TEXT, TITLE, WIDTH, Block, box, in_bytes, inset, page

from muonbook.figures.style import put, save, text_block  # isort: skip
from muonbook.figures.virtual_map import map_blocks
from muonbook.jobs import plural, write_file


def draw_run(result: dict[str, Any], layout: Layout, tp: int) -> Figure:
    """Draw what a run shows: its certificate, its map, its losses over the reference's, and bytes per collective.

    result: the worker's report. A row of "ledger" holds one rank and all steps; bars are means over ranks and steps.
        A check whose value is None was not made and is left out; so is a prediction.
    Raises ValueError as `draw_map` does.
    """
    verdict, *checks = _verdict(result)
    sent = _sent(result)
    legend = "filled: counted; outline: predicted from the layout" if _predicted(result) else "counted; not predicted"
    legend = legend if sent else "none: there is nobody to send to"
    blocks: list[Block] = [
        text_block(f"{layout.dp} DP × {tp} TP against one process", TITLE),
        text_block(verdict, TEXT),
        *map(text_block, checks),
        text_block("\nThe virtual map", TITLE),
        *map_blocks(layout, tp),
        text_block("\nLoss", TITLE),
        (184.0, lambda axes, top: _losses(axes, top, result)),
        text_block("\nBytes each rank sends per step", TITLE),
        text_block(legend),
        (5 + 40.0 * len(sent), lambda axes, top: _bars(axes, top + 5, sent, _predicted(result))),
    ]
    return page(blocks)


def describe_run(result: dict[str, Any]) -> str:
    """Return alt text for `draw_run`, computed from the result."""
    grid, losses, sent = result["grid"], result["losses"], _sent(result).values()
    run = f"{grid['dp']} DP × {grid['tp']} TP, {result['optimizer']}, {result['dtype']}, {result['backend']}"
    loss = f"loss from {losses[0]:.4g} to {losses[-1]:.4g} in {plural(len(losses), 'step')}" if losses else "no steps"
    counted, predicted = (in_bytes(sum(pair[part] for pair in sent)) for part in (0, 1))
    foretold = f"predicted {predicted}" if _predicted(result) else "not predicted"
    return f"{run}: {loss}; {_verdict(result)[0][2:]}. Each rank sends {counted} per step, {foretold}."


def save_run(result: dict[str, Any], layout: Layout, tp: int, path: str) -> None:
    """Draw a run into the file `path`; arguments and errors as for `draw_run` and `report.write_file`."""
    figure, words = draw_run(result, layout, tp), describe_run(result)
    write_file("--figure", path, lambda file: save(figure, file, words))


def _verdict(result: dict[str, Any]) -> list[str]:
    """Return the verdict and one line per check, each led by a tick or a cross, or a dash where it has no power."""
    exact, wide = result["exact"], result["float64_relative_difference"]
    checks: list[tuple[bool | None, str]] = []
    if exact is not None:
        checks.append((exact, f"exact: same gradients in, {'' if exact else 'not '}bitwise equal out"))
    if wide is not None:
        checks.append((wide <= FLOAT64_BOUND, f"float64: {wide:.1e} apart, {FLOAT64_BOUND:g} allowed"))
    for row, kind in (("unrounded", "unrounded_"), (result["dtype"], "")):
        apart, control = result[f"{kind}relative_difference"], result[f"{kind}control_relative_difference"]
        if apart is not None and control is not None:
            passed, allowed = Drift(apart, control).passed, f"{CONTROL_FACTOR * control:.1e} allowed"
            checks.append((passed, f"{row}: {apart:.1e} apart, {'no power here' if passed is None else allowed}"))
    if (replicas := result["replicas_agree"]) is not None:
        checks.append((replicas, f"replicas: ranks {'agree' if replicas else 'differ'} in their whole parameters"))
    if _predicted(result):
        agree = all(row["sent_bytes"] == row["predicted_sent_bytes"] for row in result["ledger"])
        checks.append((agree, f"bytes: counted and predicted {'agree' if agree else 'differ'}"))
    held, made = (sum(ok in counted for ok, _ in checks) for counted in ((True,), (True, False)))
    verdict = f"{'✓' if held == made else '✗'} {held} of {made} checks hold"
    marks = {True: "✓", False: "✗", None: "–"}
    return [verdict, *(f"{marks[ok]} {line}" for ok, line in checks)]


def _predicted(result: dict[str, Any]) -> bool:
    return all(row["predicted_sent_bytes"] is not None for row in result["ledger"])


def _losses(axes: Axes, top: float, result: dict[str, Any]) -> None:
    plot = inset(axes, MARGIN + 34, top + 5, WIDTH - 2 * MARGIN - 36, 145)
    steps = range(1, len(result["losses"]) + 1)
    plot.plot(steps, result["reference_losses"], color=INK, lw=2, label="one process")
    looks: dict[str, Any] = {"mfc": "none", "ms": 7, "markevery": len(steps) // 50 + 1}
    plot.plot(steps, result["losses"], "o", color=INK, label="distributed", **looks)
    plot.spines[["top", "right"]].set_visible(False)
    plot.xaxis.set_major_locator(MaxNLocator(integer=True))
    plot.set_xlabel("step")
    plot.legend()


def _sent(result: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return (counted, predicted) bytes per collective and group, means over ranks and steps."""
    share = 1 / (result["grid"]["dp"] * result["grid"]["tp"] * max(result["steps"], 1))
    sums: dict[str, tuple[int, int]] = {}
    for row in result["ledger"]:
        label = f"{row['op']} over {row['group']}"
        counted, predicted = sums.get(label, (0, 0))
        sums[label] = (counted + row["sent_bytes"], predicted + (row["predicted_sent_bytes"] or 0))
    return {label: (counted * share, predicted * share) for label, (counted, predicted) in sums.items()}


def _bars(axes: Axes, top: float, sent: dict[str, tuple[float, float]], are_predicted: bool) -> None:
    scale = (WIDTH - 2 * MARGIN) / max([1.0, *(value for pair in sent.values() for value in pair)])
    for n, (label, (counted, predicted)) in enumerate(sent.items()):
        y, differ = top + 40 * n, are_predicted and counted != predicted
        value = in_bytes(counted) + f" counted, {in_bytes(predicted)} predicted" * differ
        put(axes, MARGIN, y, label)
        put(axes, WIDTH - MARGIN, y, value, "right", differ)
        if are_predicted:
            box(axes, MARGIN, y + 16, predicted * scale, 14, "none", ec=INK, lw=1.2, gid=f"predicted-{n}")
        box(axes, MARGIN, y + 19, counted * scale, 8, MUTED, gid=f"counted-{n}")
