"""The drills for the page: a few in a table of plain text, all of them in one that folds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FEW = (
    "killed in a collective", "killed before the rename", "a stopped rank", "out of memory", "a machine loses its power",
    "a cable is pulled",
)  # fmt: skip


def few(found: Mapping[str, Any]) -> list[str]:
    """Return a few drills in aligned lines: what was done, when it was noticed, how many steps were lost."""
    by_name = {row["drill"]: row for row in found["drills"]}
    rows = [by_name[name] for name in FEW]
    width = max(len(_done(row)) for row in rows)
    told = [f"{_done(row):<{width}}  {row['when']:<15}{row['lost']:>3}" for row in rows]
    return [f"{'what was done':<{width}}  {'noticed':<15}steps lost", *told, *_in_all(found)]


def markdown(found: Mapping[str, Any]) -> str:
    """Return all drills as a table."""
    head = "| what was done | what was seen | noticed | steps lost | how it goes on |\n|---|---|---|---|---|\n"
    cells = [(_done(r), _code(r["seen"]), r["when"], str(r["lost"]), f"{r['goes_on']}: {r['end']}") for r in found["drills"]]
    return head + "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _in_all(found: Mapping[str, Any]) -> list[str]:
    return [f"{len(found['drills'])} drills in all"]


def _done(row: Mapping[str, Any]) -> str:
    return row["done"]


def _code(words: str) -> str:
    return words.replace("|", "\\|").replace("\n", " ")
