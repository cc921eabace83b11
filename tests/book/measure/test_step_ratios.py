"""Whole steps on the clock: what is compared does the same, and the slowest rank counts."""

from typing import Any

import pytest

from muonbook.measure import results
from tools import step_ratios


def test_all_reduces_that_are_started_first_change_nothing_but_time() -> None:
    (one, other) = step_ratios.launch.run(step_ratios.RACE, (2,), dp=2)
    assert one["equal_parameters"]
    assert other["equal_parameters"]
    assert {way: len(taken) for way, taken in one["durations"].items()} == {"one by one": 2, "all started first": 2}


def test_a_ratio_is_that_of_the_slowest_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(awaited: float, started: float) -> dict[str, Any]:
        ways = {"one by one": [awaited], "all started first": [started]}
        return {"seconds": ways, "durations": ways, "equal_parameters": awaited < 2}

    monkeypatch.setattr(step_ratios.launch, "run", lambda *_, **__: [rank(1.0, 4.0), rank(2.0, 3.0)])
    found = step_ratios.asynchronous(rounds=1)
    assert found["elapsed"]["median"] == found["durations"]["median"] == 2.0
    assert not found["equal_parameters"]


def test_a_step_is_told_over_that_of_adamw_and_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon's on the slower rank takes 3 s there, AdamW's 2 s; the other rank is quicker with both."""
    names = ("zero1", *step_ratios.TIMED_TOO)
    slow, quick = ({name: {"seconds": [all_ - (name == "zero1")]} for name in names} for all_ in (3.0, 2.0))
    world = {(step_ratios.RANKS, 1): slow}, {(step_ratios.RANKS, 1): quick}
    monkeypatch.setattr(step_ratios.launch, "run", lambda *_, **__: list(world))
    (row,) = step_ratios.by_tokens(rounds=1, sequences=(4,))
    assert row["tokens_per_rank"] == 4 * step_ratios.TIMED.context
    assert {name: row[name]["median"] for name in step_ratios.TIMED_TOO} == dict.fromkeys(step_ratios.TIMED_TOO, 1.5)


def test_the_stored_ratios_are_of_the_world_that_the_job_starts_today() -> None:
    stored = results.load("step_ratios")
    assert stored["world"] == step_ratios.world()
    tokens = [each * step_ratios.TIMED.context for each in step_ratios.SEQUENCES]
    assert [row["tokens_per_rank"] for row in stored["by_tokens"]] == tokens
    assert all(set(row) == {"tokens_per_rank", *step_ratios.TIMED_TOO} for row in stored["by_tokens"])
