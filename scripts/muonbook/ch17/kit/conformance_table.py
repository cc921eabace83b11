"""Who keeps which claim: what book/results/conformance.json says, for the page and for the command. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROGRAM = "program: "


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return a line for every Muon that was examined: claims kept, and users' programs run, of those claimed."""
    told = [f"{'':22s}{'claims kept':>12s}{'programs run':>14s}"]
    for name, report in found["muons"].items():
        if "checks" in report:
            claimed = [one for one in report["checks"] if one["verdict"] != "not claimed"]
            programs = [one["verdict"] for one in claimed if one["check"].startswith(PROGRAM)]
            others = [one["verdict"] for one in claimed if not one["check"].startswith(PROGRAM)]
            kept, ran = (f"{some.count('passed')} of {len(some)}" for some in (others, programs))
            told.append(f"{name:22s}{kept:>12s}{ran:>14s}")
    return told


def show_failures(found: Mapping[str, Any]) -> None:
    """Show in a notebook, folded, what failed and who was not here; of an error of torch's, not all signatures."""
    from IPython.display import Markdown, display

    below = "\n".join(f"- {sentence.partition(' - got ')[0]}" for sentence in failures(found))
    display(Markdown(f"<details><summary>What failed, and who could not be tested</summary>\n\n{below}\n\n</details>"))


def failures(found: Mapping[str, Any]) -> list[str]:
    """Return a sentence for every claim that is not kept, those that failed alike together; of programs the names.

    Then one for each Muon that could not be examined.
    """
    told, absent = [], []
    for name, report in found["muons"].items():
        if "checks" not in report:
            absent.append(f"{name}: {report.get('missing') or report['broken']}")
            continue
        alike: dict[str, list[str]] = {}
        of_programs = [one for one in report["checks"] if one["check"].startswith(PROGRAM)]
        programs = [one["check"].removeprefix(PROGRAM) for one in of_programs if one["verdict"] == "failed"]
        for one in report["checks"]:
            if one["verdict"] == "failed" and one not in of_programs:
                alike.setdefault(one["seen"], []).append(one["check"])
        told += [f"{name}, {', '.join(checks)}: {seen}" for seen, checks in alike.items()]
        if programs and len(programs) == len(of_programs):
            told.append(f"{name}, all of users' programs.")
        elif programs:
            told.append(f"{name}, {len(programs)} of users' programs: {', '.join(programs)}.")
    return [*told, *absent]
