"""What watching costs is measured beside not watching; how much it is, the bench says."""

from __future__ import annotations

import pytest

from distmuon import launch
from muonbook.ch17 import costs


def test_overhead_is_made_of_its_parts() -> None:
    for optimizer, ranks in (("MuonW", 1), ("DistributedMuon", 2)):
        for found in launch.run(costs.watch, (optimizer, 2, 16, 1, (1, 4), 1, 4), dp=ranks):
            assert found["overhead"] == pytest.approx((3 * found["between"] + found["observed"]["median"]) / 4)
            assert found["between"] > 0
            assert found["observed"]["count"] == 2
