"""The networks that chapter 13 weighs: those of chapter 12, and the one of its film."""

from __future__ import annotations

from dataclasses import replace

from muonbook.measure.workload import SHAPES, TIMED, Workload

FILM = replace(TIMED, bucket_size=1 << 20)  # three waves of matrices, and an end of all the rest
WEIGHED: dict[str, Workload] = {"film": FILM, **SHAPES}
