"""Fill numbers in from book/results when the book is built, so that nobody types a measurement.

    {measured}`bytes ratios.dp4.muon_over_zero1 .3f`

is the file bytes.json, a path of keys, and Python's format for one number: `.3f`, `,` or `.1%`. In a list, the step
`dp=4,dtypes=bf16*` of a path is the one entry with such values (* stands for anything), and a number a place, from 0.
A key with a * is the only one of its kind. `momentum+exp_avg` adds two keys up, `path + path` two values, and
`path / path` is a ratio, of such sums as well.

A text, a whole number and true or false need no format. A fraction does, or it would show digits that no machine
repeats. `null`, which a measurement leaves where the machine did not permit it, reads "not measured". What is missing,
or does not fit its format, is a warning that names page and path, and a strict build fails. Hovering over a number
shows its path.
"""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

FOLDER = "book/results"
logger = logging.getLogger(__name__)


class Unfit(ValueError):
    """What was asked for is not in the file, or not in this form; the message says which."""


def find(results: Any, path: str) -> Any:
    """Return what lies at `path` in a results file. Raises Unfit, naming what there is instead."""
    place = results
    for key in path.split("."):
        try:
            if isinstance(place, list):
                place = pick(place, key)
            elif "*" in key:
                (only,) = (name for name in place if fnmatchcase(name, key))
                place = place[only]
            else:
                place = sum(place[one] for one in key.split("+")) if "+" in key else place[key]
        except (KeyError, IndexError, ValueError, TypeError):
            there = ", ".join(place) if isinstance(place, dict) else f"a {type(place).__name__}"
            raise Unfit(f"has no {path!r}: at {key!r} there is {there}") from None
    return place


def pick(entries: list[Any], key: str) -> Any:
    """Return an entry by its place, "3", or the only one like "dp=4,tp=2"; raises IndexError, KeyError, ValueError."""
    if "=" not in key:
        return entries[int(key)]
    wanted = dict(pair.split("=") for pair in key.split(","))
    (found,) = (entry for entry in entries if all(fnmatchcase(str(entry[k]), v) for k, v in wanted.items()))
    return found


def value_of(results: Any, path: str) -> Any:
    """Return what lies at `path`, or for "a / b" the ratio, of sums for "a + b"; None where one is. Raises Unfit."""
    sides = [[find(results, one) for one in side.split(" + ")] for side in path.split(" / ")]
    values = [value for side in sides for value in side]
    if len(values) == 1 or None in values:
        return None if None in values else values[0]
    if not all(isinstance(value, int | float) for value in values) or sum(sides[-1]) == 0:
        raise Unfit(f"has no ratio for {path!r}: {' / '.join(' + '.join(map(repr, side)) for side in sides)}")
    return sum(sides[0]) / sum(sides[1]) if len(sides) > 1 else sum(sides[0])


def show(value: Any, form: str) -> str:
    """Return a stored value as a page shows it. Raises Unfit where it cannot be shown so."""
    if value is None:
        return "not measured"
    if isinstance(value, dict | list) or (isinstance(value, float) and not form):
        what = "needs a format such as .2f" if isinstance(value, float) else "is no single value"
        raise Unfit(f"holds {str(value)[:40]}, which {what}")
    if isinstance(value, bool):
        return "yes" if value else "no"
    try:
        return format(value, form).replace("-", "−") if isinstance(value, int | float) else format(value, form)
    except ValueError as error:
        raise Unfit(f"holds {value!r}, which does not take the format {form!r}: {error}") from None


class Measured(SphinxRole):
    """The role: `file path`, `file path format`, or a sum or ratio of paths with its format."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        match = re.fullmatch(r"(\w+) (\S+(?: [+/] \S+)*)(?: (\S+))?", self.text.strip())
        if match is None:
            return self._complain(f"{self.text!r} is not of the form `file path format`")
        name, path, form = match[1], match[2], match[3] or ""
        file = f"{FOLDER}/{name}.json"
        self.env.note_dependency(file)  # a new run rebuilds this page
        try:
            written = show(value_of(json.loads(Path(self.env.srcdir, file).read_text(encoding="utf-8")), path), form)
        except FileNotFoundError:
            return self._complain(f"{path!r}: there is no {file}; `make bench` writes it")
        except json.JSONDecodeError as error:
            return self._complain(f"{path!r}: {file} is not JSON: {error}")
        except Unfit as error:
            return self._complain(f"{path!r}: {file} {error}")
        return [nodes.abbreviation(written, written, explanation=f"{file}: {path}", classes=["measured"])], []

    def _complain(self, what: str) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        logger.warning("measured: %s", what, location=self.get_location())
        return [nodes.problematic(self.rawtext, self.rawtext)], []


def setup(app: Any) -> dict[str, bool]:
    """Add the role."""
    app.add_role("measured", Measured())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
