"""A figure as SVG for the inside of a page: small, and with the same bytes wherever it is drawn.

Of what matplotlib writes, the half that shows nothing is dropped; the rest is rounded to hundredths of a point. Styles
become attributes, because a style inside an SVG holds for the whole page. What frames have in common by name (hatches,
markers, clips) is kept once for all of them: hatches are long.
"""

from __future__ import annotations

import functools
import re
from html import escape
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from matplotlib.figure import Figure

from muonbook.figures import style

FONT = "DejaVu Sans, Verdana, sans-serif"  # what matplotlib measures text in, and what is as wide
TILE = 24.0  # points: how much of a dotted hatch is kept; matplotlib repeats the same dots over 72

_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
_NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?|-?\d+e-?\d+")
_REFERENCE = re.compile(r'(url\(#|href="#)([^)"]+)')
_RECTANGLE = re.compile(r"M(\S+) (\S+)L(\S+) \2L\3 (\S+)L\1 \4(?:L\1 \2)?z")
_DEFINED = ("clipPath", "pattern", "path")  # what has a name that is referred to
_ROUNDED = ("d", "x", "y", "width", "height", "transform")
_UNSAID = {  # what SVG assumes anyway, or our root says once
    "stroke-dashoffset": "0", "stroke-width": "1", "text-anchor": "start", "opacity": "1", "font-style": "normal",
    "font-weight": "400", "stroke-linejoin": "round", "stroke-linecap": "butt", "fill": "#000000",
}  # fmt: skip


class Definitions:
    """Hatches, markers and clips of several figures on one page, each kept once under a name that begins alike."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._names: dict[str, str] = {}  # what is defined, without its name -> its name

    def name(self, tag: str, attributes: str, content: str) -> str:
        """Return the name under which this is defined, from now on if it was not."""
        return self._names.setdefault(
            f"<{tag}[[ID]]{attributes}>{content}</{tag}>", f"{self._prefix}-{len(self._names)}"
        )

    def html(self) -> str:
        """Return them all in an SVG that takes no room; one that is not displayed would paint no hatch."""
        inside = "".join(text.replace("[[ID]]", f' id="{name}"', 1) for text, name in self._names.items())
        return f'<svg width="0" height="0" aria-hidden="true"><defs>{inside}</defs></svg>' if inside else ""


def inline(figure: Figure, alt: str, definitions: Definitions) -> str:
    """Return `figure` as an inline SVG with its alt text; what it refers to is added to `definitions`.

    Raises ValueError for an empty `alt`, for type that is too small, and for an image of pixels, whose bytes differ
    from machine to machine.
    """
    root = ElementTree.fromstring(style.vector(figure, alt))
    box = root.attrib["viewBox"].split()
    everywhere = {node.get("id", "") for node in root.iter() if _tag(node) == "clipPath" and _covers(node, box)}
    for node in root.iter():
        if _tag(node) == "image":
            raise ValueError("a frame holds an image of pixels, which differs from machine to machine; draw shapes.")
        _simplify(node, everywhere)
    names: dict[str, str] = {}  # matplotlib's -> ours
    for parent in list(root.iter()):
        for node in list(parent):
            if node.get("id") and _tag(node) in _DEFINED:
                own = node.attrib.pop("id")
                _repeat_less(node)
                content = "".join(_written(child, names) for child in node)
                names[own] = definitions.name(_tag(node), _attributes(node, names), content)
                parent.remove(node)
    seen = " ".join(f"{float(side):g}" for side in box)
    opening = f'<svg viewBox="{seen}" width="100%" role="img" aria-label="{escape(alt)}" xmlns="{_SVG[1:-1]}"'
    content = "".join(_written(child, names) for child in root)
    return f'{opening} font-family="{FONT}" stroke-linejoin="round">{content}</svg>'


def _tag(node: Element) -> str:
    return node.tag.removeprefix(_SVG)


def _covers(node: Element, box: list[str]) -> bool:
    """Return whether a clip path cuts nothing off the card."""
    if len(node) != 1 or _tag(node[0]) != "rect":
        return False
    left, top, across, down = (float(node[0].attrib[side]) for side in ("x", "y", "width", "height"))
    return left <= 0 and top <= 0 and left + across >= float(box[2]) - 0.01 and top + down >= float(box[3]) - 0.01


def _simplify(node: Element, everywhere: set[str]) -> None:
    """Turn a node's style into attributes, round its numbers, and leave out what says nothing."""
    said: dict[str, str] = {}
    for key, value in node.attrib.items():
        if key == "style":
            said |= _looks(value)
        elif value[5:-1] not in everywhere and not value.startswith(("rotate(-0 ", "rotate(0 ")):
            said[key.removeprefix(_LINK)] = value
    for key in set(_ROUNDED) & set(said):
        digits = 4 if "scale" in said[key] or "matrix" in said[key] else 2
        said[key] = (_path if key == "d" else _rounded)(re.sub(r"\s+", " ", said[key]), digits)
    node.attrib.clear()
    node.attrib.update({key: value for key, value in said.items() if _UNSAID.get(key) != value})


@functools.lru_cache(maxsize=1024)  # frames repeat their hatches, of up to 75 kB each
def _path(d: str, digits: int) -> str:
    """Return what a path draws, rounded, with no blank too many, and rectangles by their sides."""
    d = re.sub(r" ?([A-Za-z]) ?", r"\1", _rounded(d, digits)).strip()
    return _RECTANGLE.sub(_by_sides, d).replace(" -", "-")


def _by_sides(corners: re.Match[str]) -> str:
    """Return a rectangle as its first corner and its sides, which is shorter than four corners."""
    left, top, right, bottom = map(float, corners.groups())
    across, down = (f"{round(side, 2) + 0.0:g}" for side in (right - left, bottom - top))
    back = f"{round(left - right, 2) + 0.0:g}"
    return f"M{corners[1]} {corners[2]}h{across}v{down}h{back}z"


def _looks(css: str) -> dict[str, str]:
    looks: dict[str, str] = {}
    for part in css.split(";"):
        key, _, value = (piece.strip() for piece in part.partition(":"))
        if key == "font":  # how older matplotlib says it: 700 14px 'DejaVu Sans'
            found = re.search(r"(?:\b(bold|\d00) )?([\d.]+)px (.+)", value)
            assert found is not None, value
            weight = {"font-weight": found[1].replace("bold", "700")} if found[1] else {}
            looks |= weight | {"font-size": found[2]} | _family(found[3])
        elif key == "font-family":
            looks |= _family(value)
        elif key:
            looks[key] = _rounded(value.removesuffix("px"), 3) if value[0].isdigit() else value
    return looks


def _family(value: str) -> dict[str, str]:
    return {} if value.startswith("'DejaVu Sans'") else {"font-family": value.replace("'", "")}


def _rounded(text: str, digits: int) -> str:
    def short(number: re.Match[str]) -> str:
        return f"{round(float(number[0]), digits) + 0.0:.{digits}f}".rstrip("0").rstrip(".")

    return _NUMBER.sub(short, text)


def _written(node: Element, names: dict[str, str]) -> str:
    """Return a node and what is in it; nothing where it would show nothing."""
    tag = _tag(node)
    node.attrib.pop("id", None)  # what is referred to has gone to the definitions
    invisible = tag == "path" and node.get("fill") == "none" and "stroke" not in node.attrib
    if tag in ("style", "title", "metadata") or invisible:  # the alt text is an attribute of our root
        return ""
    own = escape(node.text or "", quote=False) if tag in ("text", "tspan") and (node.text or "").strip() else ""
    content, attributes = own + "".join(_written(child, names) for child in node), _attributes(node, names)
    if tag in ("g", "defs") and not (content and attributes):
        return content
    return f"<{tag}{attributes}>{content}</{tag}>" if content else f"<{tag}{attributes}/>"


def _attributes(node: Element, names: dict[str, str]) -> str:
    said = "".join(f' {key}="{escape(value)}"' for key, value in node.attrib.items())
    return _REFERENCE.sub(lambda found: found[1] + names[found[2]], said)


def _repeat_less(node: Element) -> None:
    """Make a smaller tile of a hatch of circles, if it is one, and points of filled ones: theirs takes 75 kB."""
    path = node[-1] if _tag(node) == "pattern" and len(node) else None
    tile = None if path is None else _tile(path.attrib.get("d", ""))
    if path is None or tile is None:
        return
    d, thickness = tile
    path.set("d", d)
    if thickness is not None:
        path.set("stroke-width", f"{thickness + float(path.attrib.get('stroke-width', 1)):g}")
        path.set("stroke-linecap", "round")
    for side in ("width", "height"):
        node.set(side, f"{TILE:g}")


@functools.lru_cache(maxsize=64)
def _tile(d: str) -> tuple[str, float | None] | None:
    """Return what a hatch of circles draws within the smaller tile, and how thick its points are; None: no circles.

    The thickness is None where the circles differ in size, and stay circles.
    """
    drawn = [circle for circle in d.split("M") if circle]
    if any("C" not in circle for circle in drawn):
        return None
    kept, places, radii = [], [], set()
    for circle in drawn:
        xs, ys = (list(map(float, re.findall(r"-?[\d.]+", circle)[side::2])) for side in (0, 1))
        middle, radius = (max(ys) + min(ys)) / 2, (max(ys) - min(ys)) / 2
        if max(xs[0], middle) <= TILE + 0.01:
            kept.append(circle)
            places.append(f"{xs[0]:g} {round(middle, 2):g}h0")
            radii.add(round(radius, 2))
    if len(radii) == 1:
        return "M" + "M".join(places), 2 * radii.pop()
    return "M" + "M".join(kept), None
