"""The drills for the page: a few in a table of plain text, all of them in one that folds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muonbook.markdown_table import table

HEADS = ("what was done", "what was seen", "noticed", "steps lost", "how it goes on")
FEW = (
    "killed in a collective",
    "killed before the rename",
    "out of memory",
    "a stopped rank",
    "a machine loses its power",
    "a cable is pulled",
)


def show(found: Mapping[str, Any]) -> None:
    """Show a few drills in a notebook, and all of them folded."""
    from IPython.display import Markdown, display

    print("\n".join(few(found)))
    display(Markdown(f"<details><summary>All of them</summary>\n\n{markdown(found)}\n\n</details>"))


def few(found: Mapping[str, Any]) -> list[str]:
    """Return a few drills in aligned lines: what was done, when it was noticed, how many steps were lost."""
    by_name = {row["drill"]: row for row in found["drills"]}
    rows = [by_name[name] for name in FEW]
    width = max(len(row["done"]) for row in rows)
    told = [f"{row['done']:<{width}}  {row['when']:<15}{row['lost']:>3}" for row in rows]
    return [f"{'what was done':<{width}}  {'noticed':<15}steps lost", *told]


def markdown(found: Mapping[str, Any]) -> str:
    """Return all drills as tables, one for each place where something may happen."""
    by_place: dict[str, list[Mapping[str, Any]]] = {}
    for row in found["drills"]:
        by_place.setdefault(row["where"], []).append(row)
    return "\n".join(
        f"**{place.capitalize()}** ({len(rows)})\n\n{table(HEADS, map(_cells, rows))}"
        for place, rows in by_place.items()
    ).rstrip("\n")


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    seen = row["seen"].replace("|", "\\|").replace("\n", " ").replace("/proc/", "")
    end = row["end"].replace("to the bit", "bit for bit")
    return row["done"], seen, row["when"], str(row["lost"]), f"{row['goes_on']}: {end}"
