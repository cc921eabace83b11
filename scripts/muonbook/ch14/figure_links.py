"""What a rank is at in a synchronous step and in one that hides, link by link; and in the report's two runs."""

from __future__ import annotations

from typing import Any

from muonbook.ch14.trace_tables import Found, on_every_link, parts, readings
from muonbook.figures.player import Frame
from muonbook.figures.plots import describe_bars, draw_bars
from muonbook.figures.style import ACCENT, CARD, INK, MUTED, mix

NOTE = "Recorded. 100 %: its own synchronous step."
COLOURS = {"work": ACCENT, "both": mix(ACCENT, INK, 0.45), "collectives": INK, "neither": mix(MUTED, CARD, 0.5)}


def frames_of_links(found: Found, synchronous: Found, asynchronous: Found) -> list[Frame]:
    """Return a frame for every link, slowest first, all on one scale; the last is the report's.

    found: the stored races. synchronous, asynchronous: two public traces, `trace_tables.in_ms`.
    """
    looks = {}
    for link, race in on_every_link(found).items():
        step = race["recorded"]
        looks[f"Ours, {link}"] = {name: step[name] for name in ("synchronous", "pipelined")}
    looks["The report's GPUs"] = {"synchronous": synchronous, "asynchronous": asynchronous}
    frames = []
    for title, runs in looks.items():
        before, after = runs.values()
        bars = {name: parts(run, before["span"]) for name, run in runs.items()}
        shown: dict[str, Any] = {"title": title, "unit": "%", "level": 100.0}
        picture = draw_bars(bars, **shown, note=NOTE, colours=COLOURS, most=110.0)
        _, union, _, whole = readings(before, after).values()
        caption = f"In collectives: {union:.2f} × as long. The step: {whole:.2f} ×."
        frames.append(Frame(picture, describe_bars(bars, **shown), caption))
    return frames
