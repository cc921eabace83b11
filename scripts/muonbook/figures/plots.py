"""Measurements as cards, for what belongs to no rank: curves, singular values and bars.

A series that is an optimizer, or a layout of Muon's, looks as `LOOKS` says; all others differ in lightness and
dashes first and use one accent, because colour means DP rank in this book. Names of lines stand at their ends. Every
`describe_*` takes what its `draw_*` takes and tells the same numbers in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, log2
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator, ScalarFormatter

from muonbook.figures.style import ACCENT, CARD, COLD, INK, LOOKS, MARGIN, MUTED, ROW, WIDTH, Block

from muonbook.figures.style import baseline_of, box, card, in_bytes, inset, mix, put, wide  # isort: skip

Curve = tuple[Any, Any]  # x and y, sequences or arrays of one length
HIGH, LABELS = 190.0, 42.0  # of the plotting area; room for the numbers on its left
POLE, LONGEST = 14.0, 84.0  # to a name; of a name
LINES: tuple[dict[str, Any], ...] = (
    {"color": INK, "lw": 2.2, "ls": "-"},
    {"color": ACCENT, "lw": 2.2, "ls": (0, (5, 1.6))},
    {"color": mix(MUTED, CARD, 0.35), "lw": 2.8, "ls": "-"},
    {"color": INK, "lw": 1.8, "ls": (0, (1, 1.4))},
    {"color": mix(ACCENT, CARD, 0.4), "lw": 2.8, "ls": (0, (2.2, 0.7))},
    {"color": MUTED, "lw": 1.8, "ls": (0, (6, 1.6, 1, 1.6))},
)
AGAIN = (0, (1.6, 0.7))  # the dashes of a baseline's second line in a picture
HUED = (LINES[1], LINES[4])  # not beside a baseline, as long as there are others
MARKERS = "os^Dv*"  # of dots
ROUND = (1, 2, 2.5, 5, 10)  # between numbers along an axis, times a power of ten
Parts = Mapping[str, float]
SHADES = ((INK, ""), (mix(MUTED, CARD, 0.5), ""), (ACCENT, ""), (CARD, "////"), (mix(ACCENT, CARD, 0.6), ""))


def head(title: str, kind: str) -> str:
    """Return how alt text begins: the title, or else what kind of picture this is."""
    return f"{title.rstrip('.')}." if title else f"{kind}."


def short(value: float) -> str:
    """Return a number with three digits."""
    return f"{value:.3g}".replace("-", "−")


# ---- Curves -----------------------------------------------------------------------------------------------


def draw_curves(
    series: Mapping[str, Curve], x_label: str, y_label: str, title: str = "", note: str = "",
    log_x: bool = False, log_y: bool = False,
    bands: Mapping[str, tuple[Any, Any, Any]] | None = None, marks: Sequence[tuple[float, str]] = (),
    levels: Sequence[tuple[float, str]] = (), dots: bool = False,
) -> Figure:  # fmt: skip
    """Draw up to six curves, each with its name at its end, or over the plot where a name is long.

    series: name -> (x, y). bands: name -> (x, low, high), shaded in the style of the series of that name. marks:
    (x, text) of vertical lines. levels: (y, text) of horizontal ones. dots: the values alone, and no line from one to
    the next. A value that is not finite, or not positive on a logarithmic axis, is left out.
    """
    curves = _finite(series, log_x, log_y)
    styles, longest = line_styles(curves), max(map(wide, curves))
    for (name, (x, _)), marker in zip(curves.items(), MARKERS, strict=False):
        if len(x) == 1:
            styles[name] = styles[name] | {"marker": marker, "ms": 6}
        if dots:
            styles[name] = styles[name] | {"marker": "o", "ms": 4, "ls": "none"}
    named = longest <= LONGEST
    ends = POLE + 4 + longest if named else 4.0
    across = WIDTH - 2 * MARGIN - LABELS - ends

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 4, y_label, color=MUTED)
        y_top = top + 10 + ROW + 14 * bool(marks)
        plot = inset(axes, MARGIN + LABELS, y_top, across, HIGH)
        for name, (x, low, high) in (bands or {}).items():
            plot.fill_between(x, low, high, color=styles[name]["color"], alpha=0.16, lw=0, gid=f"band-{name}")
        for name, (x, y) in curves.items():
            plot.plot(x, y, gid=f"curve-{name}", **styles[name])
        for x, text in marks:
            plot.axvline(x, color=MUTED, lw=1, ls=(0, (2, 2)), zorder=0)
            above = plot.get_xaxis_transform()
            plot.text(x, 1.01, text, transform=above, parse_math=False, ha="center", va="bottom", color=MUTED)
        for height, text in levels:
            plot.axhline(height, color=MUTED, lw=1, ls=(0, (2, 2)), zorder=0)
            beside = plot.get_yaxis_transform()
            plot.text(0.01, height, text, transform=beside, parse_math=False, va="bottom", color=MUTED)
        half = wide(x_label, bold=False) / 2  # below the middle, but on the card
        middle = max(half, min(LABELS + across / 2, WIDTH - 2 * MARGIN - half))
        plot.set_xlabel(x_label, x=(middle - LABELS) / across)
        plot.margins(x=0.02)
        _scales(plot, log_x, log_y, sorted({float(value) for x, _ in curves.values() for value in x}))
        if named:
            _name_ends(plot, curves, styles)

    key = [] if named else [_line_key(styles)]
    return card(title, note, *key, (HIGH + 10 + ROW + 34 + 14 * bool(marks), paint))


def line_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return how the line of each name is drawn: a baseline as ever, a second line of it paler, in short dashes."""
    of = {name: baseline_of(name) for name in names}
    seen: list[str] = []
    others = iter(sorted(LINES, key=lambda look: look in HUED) if any(of.values()) else LINES)
    styles = {}
    for name, baseline in of.items():
        if baseline is None:
            styles[name] = next(others)
            continue
        styles[name] = look = dict(LOOKS[baseline])
        if baseline in seen:
            look.update(color=mix(look["color"], CARD, 0.4), ls=AGAIN)
        seen.append(baseline)
    return styles


def describe_curves(
    series: Mapping[str, Curve], x_label: str, y_label: str, title: str = "", levels: Sequence[tuple[float, str]] = (),
    **_: Any,
) -> str:  # fmt: skip
    """Return alt text for `draw_curves`: per series its first, last, least and greatest value; and levels."""
    told = []
    for name, (x, y) in _finite(series, False, False).items():
        shape = f"from {short(y[0])} to {short(y[-1])}, least {short(y.min())}, greatest {short(y.max())}"
        told.append(f"{name}: {shape}, for {x_label} {short(x[0])} to {short(x[-1])}")
    told += [f"{text} at {short(height)}" for height, text in levels]
    return f"{head(title, 'Curves')} {y_label} over {x_label}. {'; '.join(told)}."


def draw_spectra(spectra: Mapping[str, Any], title: str = "", note: str = "", log_y: bool = True) -> Figure:
    """Draw singular values from the largest on, over the share of the index: matrices of any size compare."""
    return draw_curves(_sorted(spectra), "share of the singular values", "singular value", title, note, log_y=log_y)


def describe_spectra(spectra: Mapping[str, Any], title: str = "", **_: Any) -> str:
    """Return alt text for `draw_spectra`: per matrix the largest, the middle and the smallest singular value."""
    told = []
    for name, (_x, values) in _sorted(spectra).items():
        middle = short(float(np.median(values)))
        told.append(f"{name}: largest {short(values[0])}, median {middle}, smallest {short(values[-1])}")
    return f"{head(title, 'Singular values')} {'; '.join(told)}."


def _finite(series: Mapping[str, Curve], log_x: bool, log_y: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the points that can be drawn, as float64 arrays."""
    curves = {}
    for name, pair in series.items():
        x, y = (np.asarray(values, dtype=float) for values in pair)
        kept = np.isfinite(x) & np.isfinite(y) & ((x > 0) | (not log_x)) & ((y > 0) | (not log_y))
        curves[name] = (x[kept], y[kept])
    return curves


def _sorted(spectra: Mapping[str, Any]) -> dict[str, Curve]:
    values = {name: np.sort(np.asarray(v, dtype=float).ravel())[::-1] for name, v in spectra.items()}
    return {name: ((np.arange(len(v)) + 0.5) / max(len(v), 1), v) for name, v in values.items()}


def _scales(plot: Axes, log_x: bool, log_y: bool, x_values: Sequence[float]) -> None:
    """Set both scales, and numbers along them. x_values: of all curves; powers of two are numbered so, as ranks are."""
    whole_x = all(value.is_integer() for value in x_values)
    plot.set_xscale("log" if log_x else "linear")
    plot.set_yscale("log" if log_y else "linear")
    plot.spines[["top", "right"]].set_visible(False)
    for axis, log in ((plot.xaxis, log_x), (plot.yaxis, log_y)):
        low, high = sorted(axis.get_view_interval())
        if not log:
            across = axis is plot.xaxis  # where numbers stand side by side, and need more room
            axis.set_major_locator(MaxNLocator(5 if across else 6, steps=ROUND, integer=across and whole_x))
            axis.set_major_formatter(ScalarFormatter(useOffset=False))
            continue
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: power(value)))
        if high > 100 * low:
            axis.set_major_locator(LogLocator(numticks=6 if axis is plot.yaxis else 5))
        else:  # powers of ten alone would leave an axis with one number
            axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
    if log_x and x_values[-1] < 10_000 and all(log2(value).is_integer() for value in x_values):
        plot.xaxis.set_major_locator(FixedLocator(x_values[:: ceil(len(x_values) / 6)]))
        plot.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"1/{1 / value:g}" if value < 1 else power(value))
        )
    plot.grid(axis="y", color=MUTED, alpha=0.15, lw=0.8)


def power(value: float) -> str:
    """Return a number along a logarithmic axis, short and without small type: "0.01", "500", "20k", "1M"."""
    if value < 1e-4:
        return f"{value:.0e}".replace("e-0", "e−").replace("e-", "e−")
    steps = ((1e9, "G"), (1e6, "M"), (1e4, "k"))
    least, unit = next(((least, unit) for least, unit in steps if value >= 0.999 * least), (1.0, ""))
    return f"{value / (1e3 if unit == 'k' else least):g}{unit}" if unit else f"{value:,g}"


def _name_ends(plot: Axes, curves: Mapping[str, Curve], styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Write every name beside the end of its curve, moved apart where ends are close."""
    plot.set_ylim(plot.get_ylim())
    ends = {name: (x[-1], y[-1]) for name, (x, y) in curves.items()}
    heights = {name: float(plot.transAxes.inverted().transform(plot.transData.transform(end))[1]) * HIGH
               for name, end in ends.items()}  # fmt: skip
    width = plot.get_position().width * WIDTH
    for name, at in apart(heights, 14.5, 4.0, HIGH - 4).items():
        colour = styles[name]["color"]
        place = (1 + POLE / width, at / HIGH)
        pole = {"arrowstyle": "-", "color": colour, "lw": 0.8, "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5)}
        plot.annotate(name, ends[name], place, textcoords="axes fraction", arrowprops=pole, va="center", weight="bold",
                      color=mix(colour, INK, 0.35), annotation_clip=False, parse_math=False)  # fmt: skip


def _line_key(styles: Mapping[str, Mapping[str, Any]]) -> Block:
    """Return a line per curve, for names that are too long to stand at its end."""

    def paint(axes: Axes, top: float) -> None:
        for n, (name, look) in enumerate(styles.items()):
            y = top + 4 + n * (ROW + 1)
            axes.plot([MARGIN, MARGIN + 30], [y + 6, y + 6], **look)
            put(axes, MARGIN + 38, y, name)

    return len(styles) * (ROW + 1) + 6, paint


def apart(wanted: Mapping[str, float], least: float, low: float, high: float) -> dict[str, float]:
    """Return positions in [low, high] at least `least` apart, near the wanted ones and in their order."""
    names = sorted(wanted, key=lambda name: wanted[name])
    places = [min(max(wanted[name], low), high) for name in names]
    for n in range(1, len(places)):  # push up
        places[n] = max(places[n], places[n - 1] + least)
    if places:
        places[-1] = min(places[-1], high)
    for n in range(len(places) - 2, -1, -1):  # push back down
        places[n] = min(places[n], places[n + 1] - least)
    return dict(zip(names, places, strict=True))


# ---- Bars -------------------------------------------------------------------------------------------------


def draw_bars(
    rows: Mapping[str, float | Parts], title: str = "", note: str = "", unit: str = "B", grouped: bool = False,
    most: float = 0.0, level: float | None = None, colours: Mapping[str, str] | None = None,
) -> Figure:  # fmt: skip
    """Draw horizontal bars with their values.

    rows: label -> value, or label -> {part: value}: parts are stacked, or drawn one under the other if `grouped`.
    unit: "B" prints kB, MB, GB; any other is printed after three digits. most: what the whole width stands for, so that
    frames share a scale; 0: the longest bar. level: a value that dashes mark across every bar. colours: of parts that
    have one elsewhere.
    """
    split, parts = _parts(rows)
    total = max(max(p.values()) if grouped else sum(p.values()) for p in split.values())
    total = max(total, most) or 1.0
    scale, thick = (WIDTH - 2 * MARGIN) / total, 9.0 if grouped and len(parts) > 1 else 15.0
    looks = {"": (MUTED, "")} if parts == [""] else _part_looks(parts)
    looks |= {part: (colour, "") for part, colour in (colours or {}).items()}
    pitch = ROW + 12 + thick * (len(parts) if grouped else 1)

    def bar(axes: Axes, x: float, y: float, label: str, part: str) -> float:
        colour, hatch = looks[part]
        if not part and (baseline := baseline_of(label)):
            colour = LOOKS[baseline]["color"]
        width = split[label].get(part, 0.0) * scale
        edge = 0.8 * bool(hatch and width)  # of nothing there is no edge
        box(axes, x, y, width, thick - 1, colour, hatch=hatch, ec=INK, lw=edge, gid=f"bar-{label}-{part}")
        return width

    def paint(axes: Axes, top: float) -> None:
        for label, values in split.items():
            put(axes, MARGIN, top + 6, label)
            amounts = values.values() if grouped else [sum(values.values())]
            told = " / ".join(_amount(value, unit) for value in amounts)
            put(axes, WIDTH - MARGIN, top + 6, told, "right", True)
            x, y = MARGIN, top + 6 + ROW
            for part in parts:
                width = bar(axes, x, y, label, part)
                x, y = (x, y + thick) if grouped else (x + width, y)
            if level is not None:
                ends = top + 3 + ROW, top + pitch - 4
                axes.vlines([MARGIN + level * scale], *ends, MUTED, lw=1, ls=(0, (2, 2)), gid=f"level-{label}")
            top += pitch

    return card(title, note, *part_key(looks), (pitch * len(split), paint))


def describe_bars(rows: Mapping[str, float | Parts], title: str = "", unit: str = "B", **_: Any) -> str:
    """Return alt text for `draw_bars`, with every value."""
    split, parts = _parts(rows)
    told = []
    for label, values in split.items():
        inner = ", ".join(f"{part} {_amount(value, unit)}" for part, value in values.items())
        told.append(f"{label}: {inner if len(parts) > 1 else _amount(sum(values.values()), unit)}")
    return f"{head(title, 'Bars')} {'; '.join(told)}."


def draw_dots(rows: Mapping[str, Sequence[float]], title: str = "", note: str = "", level: float = 1.0) -> Figure:
    """Draw a strip per row with a dot for each value, and dashes at `level`; those below it are red.

    rows: label -> values, 0 or more. At the right: how many are below.
    """
    scale = (WIDTH - 2 * MARGIN) / (1.05 * max(level, *(value for values in rows.values() for value in values)))
    high, pitch = 14.0, ROW + 26

    def paint(axes: Axes, top: float) -> None:
        for label, values in rows.items():
            put(axes, MARGIN, top + 6, label)
            put(axes, WIDTH - MARGIN, top + 6, _below(values, level), "right", True)
            y = top + 8 + ROW
            box(axes, MARGIN, y, WIDTH - 2 * MARGIN, high, mix(MUTED, CARD, 0.88))
            for red in (True, False):
                x = [MARGIN + value * scale for value in values if (value < level) == red]
                gid = f"dots-{label}-{'below' if red else 'above'}"
                axes.scatter(x, [y + high / 2] * len(x), 42, ACCENT if red else COLD, alpha=0.75, lw=0, gid=gid)
            axes.vlines([MARGIN + level * scale], y - 3, y + high + 3, INK, lw=1.3, ls=(0, (2, 2)))
            top += pitch
        for value in (0.0, level / 2, level):
            place = "center" if value else "left"
            put(axes, MARGIN + value * scale, top, f"{value:g}", place, color=MUTED)

    return card(title, note, (pitch * len(rows) + ROW, paint))


def describe_dots(rows: Mapping[str, Sequence[float]], title: str = "", level: float = 1.0, **_: Any) -> str:
    """Return alt text for `draw_dots`: the least and the greatest of each row, and how many are below."""
    told = (f"{label}: {min(values):.3g} to {max(values):.3g}, {_below(values, level)} below {level:g}"
            for label, values in rows.items())  # fmt: skip
    return f"{head(title, 'Dots')} {'; '.join(told)}."


def _below(values: Sequence[float], level: float) -> str:
    return f"{sum(value < level for value in values)} of {len(values)}"


def _amount(value: float, unit: str) -> str:
    if unit == "B":
        return in_bytes(value)
    return f"{value:,.0f} {unit}".strip() if value >= 1000 else f"{value:.3g} {unit}".strip()


def _parts(rows: Mapping[str, float | Parts]) -> tuple[dict[str, Parts], list[str]]:
    """Return rows with their parts, and all parts in order of appearance; a plain value is one part without a name."""
    split: dict[str, Parts] = {label: v if isinstance(v, Mapping) else {"": float(v)} for label, v in rows.items()}
    return split, list(dict.fromkeys(part for values in split.values() for part in values))


def _part_looks(parts: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return colour and hatch of each part: a baseline's own, or one of the shades."""
    shades, looks = iter(SHADES), {}
    for part in parts:
        baseline = baseline_of(part)
        looks[part] = (LOOKS[baseline]["color"], "") if baseline else next(shades)
    return looks


def part_key(looks: Mapping[str, tuple[str, str]]) -> list[Block]:
    """Return what the parts look like, in as many lines as they need; nothing for one part without a name."""
    if set(looks) == {""}:
        return []
    places: list[tuple[float, float]] = []
    x, y = MARGIN, 4.0
    for part in looks:
        if x > MARGIN and x + 20 + wide(part) > WIDTH - MARGIN:
            x, y = MARGIN, y + ROW + 2
        places.append((x, y))
        x += 34 + wide(part)

    def paint(axes: Axes, top: float) -> None:
        for (part, (colour, hatch)), (x, y) in zip(looks.items(), places, strict=True):
            box(axes, x, top + y + 1, 14, 10, colour, hatch=hatch, ec=INK, lw=0.8 * bool(hatch))
            put(axes, x + 20, top + y, part)

    return [(y + ROW + 4, paint)]
