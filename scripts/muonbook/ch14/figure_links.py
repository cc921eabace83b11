"""One pipelined step read in four ways, link by link, and the report's asynchronous run after it."""

from __future__ import annotations

from typing import Any

from muonbook.ch14.trace_tables import Found, on_every_link, readings
from muonbook.figures.player import Frame
from muonbook.figures.plots import describe_bars, draw_bars

NOTE = "Recorded steps, each over its own synchronous one (dashes)."


def frames_of_links(found: Found, synchronous: Found, asynchronous: Found) -> list[Frame]:
    """Return a frame for every link, slowest first, all on one scale; the last is the report's.

    found: the stored races. synchronous, asynchronous: two public traces, `trace_tables.in_ms`.
    """
    looks: dict[str, tuple[Found, Found]] = {}
    for link, race in on_every_link(found).items():
        step = race["recorded"]
        looks[f"Ours, {link}"] = step["synchronous"], step["pipelined"]
    looks["The report's GPUs"] = synchronous, asynchronous
    read = {title: readings(*runs) for title, runs in looks.items()}
    most = max(value for values in read.values() for value in values.values())
    frames = []
    for title, (_, after) in looks.items():
        shown: dict[str, Any] = {"title": title, "unit": "×", "level": 1.0}
        picture = draw_bars(read[title], **shown, note=NOTE, most=most)
        caption = f"{after['overlap'] / after['communication']:.0%} of the union lies under work."
        frames.append(Frame(picture, describe_bars(read[title], **shown), caption))
    return frames
