"""What stands on the museum's labels: which alarms go off at which exhibit, and which do not."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from distmuon import launch
from muonbook.ch11.museum import EXHIBITS
from muonbook.ch11.museum_tour import DP, SCENARIOS, TP, Scenario, Visit, moved, visit

RIGHT = "right, to the last bit"
CLOSE = 0.05  # of the movement: rounding in bf16 moves a correct result less
Exhibit = str | None  # None: the healthy code
Ranks = Sequence[Mapping[tuple[Exhibit, str], Visit]]  # what every rank saw, by exhibit and scenario


def tour(world: launch.World, names: Sequence[Exhibit]) -> list[dict[tuple[Exhibit, str], Visit]] | None:
    """Return what every rank sees of each exhibit in every scenario."""
    return world.gather(visit(world, names))


def report(ranks: Ranks, names: Sequence[Exhibit]) -> tuple[bool, dict[str, list[str]]]:
    """Print the label of a single exhibit, or of many the table of alarms; return the labels of all."""
    labels = {name or "healthy": label_of(name, ranks) for name in names}
    if len(names) > 1:
        show_table(names, ranks)
    else:
        print("\n".join(*labels.values()))
    if list(names) == ["empty shard"]:
        show_lonely("empty shard")
    return True, labels


def where_seen(name: str, width: int = 88) -> str:
    """Return whose bug this is and how far we know it, from the exhibit's own docstring, in lines of this width."""
    told = (EXHIBITS[name].__doc__ or "").partition("Seen: ")[2].partition("Shows: ")[0]
    return textwrap.fill("Seen: " + " ".join(told.split()), width, subsequent_indent="  ")


def verdict(visit: Visit, scenario: Scenario) -> str:
    """Return what one rank sees of the result: "right", or which matrices are wrong and how."""
    if visit.error:
        return f"stops: {visit.error.splitlines()[0]}"
    if lost := [name for name, matrix in visit.parameters.items() if matrix.isnan().any()]:
        return f"NaN in {', '.join(lost)}"
    far = moved(visit.parameters, scenario)
    kinds = {
        "WRONG": [name for name, distance in far.items() if distance > CLOSE],
        "rounded differently": [name for name, distance in far.items() if 0 < distance <= CLOSE],
    }
    found = [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]
    return "; ".join(found) or RIGHT


def alarms(name: Exhibit, ranks: Ranks) -> dict[str, list[str]]:
    """Return which alarms go off in which scenarios: {alarm: [scenario, ...]}."""
    heard: dict[str, list[str]] = {"stops": [], "result": [], "bytes": [], "replicas": []}
    for label, scenario in SCENARIOS.items():
        visits = [rank[name, label] for rank in ranks]
        if any(visit.error for visit in visits):
            heard["stops"].append(label)
            continue
        if any(verdict(visit, scenario) != RIGHT for visit in visits):
            heard["result"].append(label)
        if any(visit.bytes for visit in visits):
            heard["bytes"].append(label)
        healthy = {key: seen for key, seen in visits[0].parameters.items() if not seen.isnan().any()}
        if any(not seen.equal(visit.parameters[key]) for visit in visits for key, seen in healthy.items()):
            heard["replicas"].append(label)
    return heard


def label_of(name: Exhibit, ranks: Ranks) -> list[str]:
    """Return what one exhibit does in every scenario, line by line."""
    heard = alarms(name, ranks)
    lines = [f"{name or 'healthy'}, on {DP} DP x {TP} TP ranks, beside one process:"]
    outcomes: dict[str, list[str]] = {}
    for label, scenario in SCENARIOS.items():
        counted = "" if label in heard["stops"] else f"; bytes {'WRONG' if label in heard['bytes'] else 'as predicted'}"
        outcomes.setdefault(verdict(ranks[0][name, label], scenario) + counted, []).append(label)
    for outcome, labels in sorted(outcomes.items(), key=lambda item: len(item[1])):
        where = "all scenarios" if len(outcomes) == 1 else "the others" if len(labels) > 2 else ", ".join(labels)
        lines.append(f"  {where:18s} {outcome}")
    if heard["bytes"]:
        different = [line for rank in ranks for line in rank[name, heard["bytes"][0]].bytes]
        row = different[0].partition(":")[0]
        lines.append(f"  ledger differs     {row}, among others")
    if not heard["stops"]:
        lines.append(f"  replicas           {'RANKS DIFFER' if heard['replicas'] else 'all ranks agree'}")
    return lines


def show_table(names: Sequence[Exhibit], ranks: Ranks) -> None:
    """Print which alarm hears which exhibit: in all scenarios, in some (how many), or in none."""
    print(f"{'scenarios, of ' + str(len(SCENARIOS)):30s}  stops  result  bytes  replicas")
    for name in names:
        heard = [len(labels) or "." for labels in alarms(name, ranks).values()]
        print(f"{name or 'healthy':30s}  {heard[0]!s:>5s}  {heard[1]!s:>6s}  {heard[2]!s:>5s}  {heard[3]!s:>8s}")


def show_lonely(name: str) -> None:
    """Show the one exhibit that can end a rank: it gets a world of its own."""
    try:
        launch.run("muonbook.ch11.museum_tour:visit_lonely", (name,), dp=DP, tp=TP, timeout=5)
        print("  a rank without a piece: nothing happened")
    except launch.WorldError as error:
        who = "a rank" if error.rank is None else f"DP rank {error.rank // TP}"
        where = "dp_gather" if " in dp_gather" in str(error) else "another collective"
        print(f"  a rank without a piece: the world ended; {who} was in {where}")
