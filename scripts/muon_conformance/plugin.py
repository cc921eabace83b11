"""What the kit adds to pytest: its options, the optimizer under examination, the summary at the end, the report."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SUBJECT = pytest.StashKey[Any]()
PROPERTY = "observation"  # under which a test's report carries what was seen, from other processes too
OURS = "muon_conformance.ours:muon"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("muon_conformance")
    group.addoption("--optimizer", metavar="SOURCE", help="package.module:Class, or file.py:adapter (an Adapter)")
    group.addoption("--report", metavar="FILE", help="write what was found to this file, as JSON")


def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Find the optimizer before the first check, or say in a sentence why there is none."""
    from muon_conformance.adapter import load  # and with it torch
    from muon_conformance.kit import Subject

    if not any("subject" in getattr(item, "fixturenames", ()) for item in items):
        return
    source = config.getoption("--optimizer")
    if source is None:
        raise pytest.UsageError(
            f"the conformance kit needs an optimizer: add --optimizer torch.optim:Muon, say, or --optimizer {OURS}."
        )
    try:
        config.stash[SUBJECT] = Subject(load(source))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Any:
    return request.config.stash[SUBJECT]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table, and write the report, of what the tests' reports carry."""
    from muon_conformance.adapter import load

    reports = [one for some in terminalreporter.stats.values() for one in some if isinstance(one, pytest.TestReport)]
    reports.sort(key=lambda one: one.start)
    carried: list[Any] = [value for one in reports for name, value in one.user_properties if name == PROPERTY]
    observed = [*{o["check"]: o for o in carried}.values()]  # the report of a test's end carries it again
    if not observed:
        return
    adapter = load(str(config.getoption("--optimizer")))
    terminalreporter.section(f"conformance of {adapter.name} {adapter.version}".rstrip())
    for line in table(observed):
        terminalreporter.write_line(line)
    if (file := config.getoption("--report")) is not None:
        Path(file).write_text(json.dumps(report(adapter, observed), indent=1) + "\n", encoding="utf-8")


def table(observed: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each check: verdict, name, what was seen; programs that passed in one line."""
    from muon_conformance.conventions import PROGRAM
    from muon_conformance.kit import PASSED

    quiet = [o for o in observed if o["check"].startswith(PROGRAM) and o["verdict"] == PASSED]
    rows = [(o["verdict"], o["check"], o["seen"]) for o in observed if o not in quiet]
    if quiet:
        rows.append((PASSED, f"{len(quiet)} programs of torch's users", "each ends where plain arithmetic does."))
    width = max(len(name) for _, name, _ in rows)
    return [f"{verdict:11s}  {name:{width}s}  {seen}" for verdict, name, seen in rows]


def report(adapter: Any, observed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return everything that was found, and with what; no path of this machine."""
    import torch

    where, _, name = adapter.source.rpartition(":")
    source = f"{Path(where).name if where.endswith('.py') else where}:{name}"
    verdicts = [o["verdict"] for o in observed]
    return {
        "optimizer": adapter.name,
        "source": source,
        "version": adapter.version,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "precision": str(adapter.precision).removeprefix("torch."),
        "totals": {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)},
        "checks": list(observed),
    }
