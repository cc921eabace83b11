"""The kit as pytest runs it: a test for every check; what is not claimed is skipped, and says what was seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from muon_conformance import arithmetic, conventions, ranks
from muon_conformance.kit import CHECKS, FAILED, UNCLAIMED, Subject, judge
from muon_conformance.plugin import PROPERTY

ROOMS = (arithmetic, conventions, ranks)  # each adds its own to the checks


@pytest.mark.parametrize("name", CHECKS)
def test_claim(name: str, subject: Subject, record_property: Callable[[str, object], None]) -> None:
    observation = judge(CHECKS[name], subject)
    record_property(PROPERTY, observation._asdict())
    if observation.verdict == UNCLAIMED:
        pytest.skip(f"not claimed: {observation.seen}")
    if observation.verdict == FAILED:
        pytest.fail(f"{observation.seen}\n{observation.why}", pytrace=False)
