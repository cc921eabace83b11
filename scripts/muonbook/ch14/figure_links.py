"""What a rank is at in a synchronous step and in one that hides, link by link; and in the report's two runs, which are
also drawn as they were recorded."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muonbook.ch14.figure_schedules import HIGH, LABELS, PITCH, empty_lanes
from muonbook.ch14.figure_timeline import KINDS
from muonbook.ch14.trace_tables import Found, on_every_link, parts, readings
from muonbook.figures.player import Frame
from muonbook.figures.plots import describe_bars, draw_bars, head
from muonbook.figures.style import ACCENT, CARD, COLD, INK, MARGIN, MUTED, ROW, WIDTH, Block, box, card, mix, put

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


# ---- The report's gathers, as recorded --------------------------------------------------------------------

LANES = {"work": ACCENT, "DP": KINDS["gathers of momentum"][0], "TP": COLD}
GROUPS = {"DP": [0, 2], "TP": [0, 1]}  # the report's rank 0 is in these
STEP = 2  # of five, from 0: the first is never like the others
Lanes = dict[str, list[tuple[float, float]]]  # lane -> from when to when, ms from the step's DP gather on


def draw_report(synchronous: Found, asynchronous: Found, title: str = "") -> Figure:
    """Draw work and gathers of the report's rank 0, synchronous over asynchronous, on one scale.

    From one step's DP gather to the next one's. synchronous, asynchronous: two public traces, `trace_tables.in_ms`.
    """
    steps = {name: one_step(run) for name, run in _named(synchronous, asynchronous).items()}
    longest = max(length for _, length in steps.values())
    note = "Recorded on the report's GPUs: rank 0, the third of five steps, from its DP gather to the next one."
    return card(title, note, *(_recorded(name, *step, longest) for name, step in steps.items()))


def describe_report(synchronous: Found, asynchronous: Found, title: str = "") -> str:
    """Return alt text for `draw_report`: when either gather begins and ends."""
    told = []
    for name, run in _named(synchronous, asynchronous).items():
        lanes, length = one_step(run)
        (dp,), (tp,) = lanes["DP"], lanes["TP"]
        told.append(f"{name}, {length:.0f} ms: DP gather {dp[0]:.1f} to {dp[1]:.1f}, TP {tp[0]:.1f} to {tp[1]:.1f}")
    return f"{head(title, 'Gathers as recorded')} {'; '.join(told)}."


def one_step(run: Found) -> tuple[Lanes, float]:
    """Return what each of `LANES` holds from a step's DP gather to the next one's, and how long that is: ms."""
    sent = {lane: [(a, b) for a, b, ranks in run["timeline"]["collectives"] if ranks == group]
            for lane, group in GROUPS.items()}  # fmt: skip
    (begin, _), (end, _) = sent["DP"][STEP : STEP + 2]
    lanes = {lane: [(max(a, begin) - begin, min(b, end) - begin) for a, b in spans if a < end and b > begin]
             for lane, spans in {"work": run["timeline"]["work"], **sent}.items()}  # fmt: skip
    return lanes, end - begin


def _named(synchronous: Found, asynchronous: Found) -> dict[str, Found]:
    return {"synchronous": synchronous, "asynchronous": asynchronous}


def _recorded(name: str, lanes: Lanes, length: float, longest: float) -> Block:
    left, scale = MARGIN + LABELS, (WIDTH - 2 * MARGIN - LABELS) / longest

    def paint(axes: Axes, top: float) -> None:
        rows = empty_lanes(axes, top, name, f"{length:.0f} ms", lanes, scale * length)
        for lane, spans in lanes.items():
            for start, end in spans:
                x, across = left + scale * start, scale * (end - start)
                box(axes, x, rows[lane], across, HIGH, LANES[lane], gid=f"{name}-{lane}")
            if lane in GROUPS:
                ((start, end),) = spans
                put(axes, left + scale * end + 5, rows[lane] + 4, f"{end - start:.1f} ms", bold=True)

    return 12 + ROW + PITCH * len(LANES) + 4, paint
