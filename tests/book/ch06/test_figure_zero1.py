"""The moving picture of ZeRO-1: what it says that a rank keeps and has sent is what the formulas say."""

from __future__ import annotations

import pytest
from figure_helpers import texts

from muonbook.ch06 import small_puzzles
from muonbook.ch06.figures import frames_of_zero1, sent_bytes


@pytest.mark.parametrize("D", [2, 4])
def test_kept_and_sent_stand_on_every_card(D: int) -> None:
    frames = frames_of_zero1(D)
    kept = [small_puzzles.kept_bytes(0 if n < 2 else 1, D) for n in range(len(frames))]
    reduce, gather, all_reduce = sent_bytes(D)
    sent = [0, 0, 0, 0, reduce, reduce, reduce, reduce + gather, reduce + gather]
    for frame, each_kept, each_sent in zip(frames, kept, sent, strict=True):
        lines = [f"A rank keeps {each_kept:g} B per parameter", f"It has sent {each_sent:g} B per parameter"]
        assert texts(frame.figure)[-2:] == lines
        assert all(f"{line}." in frame.alt for line in lines)
    assert f"sends {all_reduce:g}." in frames[-1].caption
