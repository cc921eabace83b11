"""The conformance kit: hold any Muon against what it claims, by one command.

    pytest --pyargs muon_conformance --optimizer torch.optim:Muon               # after pip install
    pytest scripts/muon_conformance --optimizer my_adapter.py:adapter           # in a clone

A summary follows pytest's own output: each check, its verdict (passed, failed, not claimed), and what was seen;
--report FILE writes it as JSON. `adapter.Adapter` says what can be claimed, `ours` shows three; `kit.judge` is the kit
without pytest. It needs pytest, which `pip install distmuon` does not bring.
"""

from __future__ import annotations

from typing import Any


def pytest_load_initial_conftests(early_config: Any, args: list[str]) -> None:
    """Let an installed kit's options be known where the kit is asked for, and in nobody else's pytest."""
    if any(argument.partition("::")[0] == __name__ for argument in args):
        early_config.pluginmanager.import_plugin(f"{__name__}.plugin")
