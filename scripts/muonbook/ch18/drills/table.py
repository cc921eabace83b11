"""All drills, and the table of what came of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from distmuon import launch
from distmuon.launch import session
from muonbook.ch18 import checkpoint_contents, cluster, outages
from muonbook.ch18.drills import harness
from muonbook.ch18.drills.drills import AT_ONCE, AT_TIMEOUT, BY_ITSELF, ON_GROUND
from muonbook.ch18.drills.harness import SAME, DrillFailed, DrillGround, Row

ALL = "all"
SAME_RANKS = f"{SAME}, of the same numbers of ranks"
WHERE = "a machine"
STAYS_AWAY, JOINS = "a machine does not come back", "a machine joins"
NAMES = (*ON_GROUND, *outages.OUTAGES, STAYS_AWAY, JOINS)


def asked_for(names: Sequence[str]) -> list[str]:
    """Return the drills of these names, or all, in the table's order. Raises UsageError for one that there is not."""
    for name in names:
        if name not in (ALL, *NAMES):
            raise launch.UsageError(f"--drill {name}: there is no such drill; there are {', '.join(NAMES)}, and {ALL}.")
    return [name for name in NAMES if ALL in names or name in names]


def rows_of(names: Sequence[str], apart: bool) -> Iterator[Row]:
    """Play the drills; yield what came of each. apart: machines have networks of their own (see `machines`).

    Raises DrillFailed, naming it, where something went otherwise than it must.
    """
    with tempfile.TemporaryDirectory(prefix="drills-", dir=session.directory()) as home:
        if here := [name for name in ON_GROUND if name in names]:
            place = DrillGround(Path(home))
            for name in here:
                yield ON_GROUND[name](place, name)
        if there := [n for n in outages.OUTAGES if n in names]:
            yield from _on_machines(Path(home) / "machines", there, apart)
        if {STAYS_AWAY, JOINS} & set(names):
            yield from (row for row in _on_fewer(Path(home) / "fewer", apart) if row.drill in names)


def stored(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the table as a results file holds it."""
    timeouts = {"timeout": harness.TIMEOUT, "timeout_of_machines": cluster.TIMEOUT}  # seconds
    return timeouts | {"drills": [row._asdict() for row in rows]}


def told(row: Row) -> str:
    """Return a row as it is printed: all of it but what was measured."""
    return (
        f"{row.drill}\n  done      {row.done}\n  seen      {row.when}: {row.seen}\n"
        f"  goes on   {row.goes_on}; {row.lost} steps are lost\n  ends      {row.end}"
    )


# ---- Machines ---------------------------------------------------------------------------------------------


def _on_machines(folder: Path, names: list[str], apart: bool) -> Iterator[Row]:
    """Let one training meet with all of that; its end decides for every row."""
    machines = cluster.Cluster(folder / "cluster", ranks=1, apart=apart)
    outages.prepare(machines, len(names))
    undisturbed = outages.undisturbed(machines, folder / "one machine")
    with machines:
        machines.start()
        passed = list(outages.go_through(machines, names))
        _end(machines, undisturbed)
    for one in passed:
        seen, when = f"{one.outage.notices}: {one.seen}", AT_TIMEOUT if one.outage.late else AT_ONCE
        yield Row(one.name, WHERE, one.outage.done, seen, when, one.lost, BY_ITSELF, SAME, one.after)


def _on_fewer(folder: Path, apart: bool) -> Iterator[Row]:
    """Let a machine stay away, and come back in the midst of what the other does alone."""
    machines = cluster.Cluster(folder / "cluster", nodes="1:2", apart=apart, tp=2)
    outages.prepare_for_fewer(machines)
    planned = outages.with_fewer_undisturbed(machines, folder / "one machine")
    with machines:
        machines.start()
        alone, together = outages.with_fewer(machines)
        _end(machines, planned)
    for drill, done, seen, when, lost in (
        (STAYS_AWAY, "b is switched off for long (--nnodes 1:2 --tp 2)", f"gone on from step {alone}, on one machine",
         AT_TIMEOUT, outages.LEAVES - 1 - alone),
        (JOINS, "b is switched on while a trains alone", f"gone on from step {together}, on both", AT_ONCE,
         outages.RETURNS - together),
    ):  # fmt: skip
        yield Row(drill, WHERE, done, seen, when, lost, BY_ITSELF, SAME_RANKS)


def _end(machines: cluster.Cluster, other: Path) -> None:
    codes = machines.wait_for_end()
    if set(codes) != {0} or not checkpoint_contents.same_end(machines.run, other):
        raise DrillFailed(f"the machines, with exit codes {codes}, did not end where one machine does")
