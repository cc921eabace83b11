"""Pipeline stages with an optimizer each clip by one norm, skip together and refuse together."""

from __future__ import annotations

from typing import Any

import pytest
from checks import on_every_rank

from distmuon.sharding.grid import Grid

test_two_stages = on_every_rank("stage_checks", dp=4)


def test_a_scaler_is_refused_where_stages_are_known_too() -> None:
    grid: Any = Grid.alone()
    grid.refuse_scaler()
    grid.stages.size = 2
    with pytest.raises(ValueError, match=r"a GradScaler would see one pipeline stage alone.*in bf16"):
        grid.refuse_scaler()
    grid.refuse_one_stage("clip_grad_norm_")
