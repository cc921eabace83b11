"""Who keeps which claim: the table of book/results/conformance.json. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muonbook.markdown_table import table

SIGNS = {"passed": "✓", "failed": "✗", "not claimed": "·"}
PROGRAM = "program: "


def columns(found: Mapping[str, Any]) -> list[str]:
    """Return the candidates that were examined, in order."""
    return [name for name, report in found["candidates"].items() if "checks" in report]


def rows(found: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return (check, sign for each candidate); users' programs in one row, as passed of claimed."""
    names = columns(found)
    by_check: dict[str, dict[str, str]] = {}
    programs: dict[str, list[str]] = {name: [] for name in names}
    for name in names:
        for one in found["candidates"][name]["checks"]:
            if one["check"].startswith(PROGRAM):
                programs[name].append(one["verdict"])
            else:
                by_check.setdefault(one["check"], {})[name] = SIGNS[one["verdict"]]
    table = [(check, [signs.get(name, " ") for name in names]) for check, signs in by_check.items()]
    counts = [f"{some.count('passed')}/{len(some) - some.count('not claimed')}" for some in programs.values()]
    return [*table, ("users' programs", counts)]


def markdown(found: Mapping[str, Any]) -> str:
    """Return the table, and below it what failed, in the kit's own sentences, and who was not here."""
    names = columns(found)
    who = ", ".join(f"{number} {name}" for number, name in enumerate(names, 1))
    heads = ("check", *map(str, range(1, len(names) + 1)))
    *checks, (programs, counts) = rows(found)
    told = table(heads, [(check, *signs) for check, signs in checks])
    passed = ", ".join(f"{number}: {count}" for number, count in enumerate(counts, 1))
    below = [f"- {line}" for line in [*failures(found), *absent(found)]]
    return "\n".join([f"Columns: {who}.", "", told, f"Of {programs}, passed by column: {passed}.", "", *below])


def show_failures(found: Mapping[str, Any]) -> None:
    """Show in a notebook, folded, what failed and who was not here; of an error of torch's, not all signatures."""
    from IPython.display import Markdown, display

    sentences = [sentence.partition(" - got ")[0] for sentence in [*failures(found), *absent(found)]]
    below = "\n".join(f"- {sentence}" for sentence in sentences)
    display(Markdown(f"<details><summary>What failed, and who could not be tested</summary>\n\n{below}\n\n</details>"))


def failures(found: Mapping[str, Any]) -> list[str]:
    """Return a sentence for every claim that is not kept, those that failed alike together; of programs the names."""
    told = []
    for name in columns(found):
        alike: dict[str, list[str]] = {}
        of_programs = [one for one in found["candidates"][name]["checks"] if one["check"].startswith(PROGRAM)]
        programs = [one["check"].removeprefix(PROGRAM) for one in of_programs if one["verdict"] == "failed"]
        for one in found["candidates"][name]["checks"]:
            if one["verdict"] == "failed" and one not in of_programs:
                alike.setdefault(one["seen"], []).append(one["check"])
        told += [f"{name}, {', '.join(checks)}: {seen}" for seen, checks in alike.items()]
        if programs and len(programs) == len(of_programs):
            told.append(f"{name}, all of users' programs.")
        elif programs:
            told.append(f"{name}, {len(programs)} of users' programs: {', '.join(programs)}.")
    return told


def absent(found: Mapping[str, Any]) -> list[str]:
    """Return a sentence for everybody who could not be examined."""
    reasons = {name: report.get("missing") or report.get("broken") for name, report in found["candidates"].items()}
    return [f"{name}: {reason}" for name, reason in reasons.items() if reason]
