"""The walk of the grid that sends least: parts that add up to what was counted, one scale, and a title that is true."""

import numpy as np
import pytest
from figure_helpers import assert_readable, boxes

from muonbook.ch15.figure_grids import PARTS, frames_of_grids, least, sent_by_grid
from muonbook.ch15.regimes import GRIDS
from muonbook.figures import player
from muonbook.measure import results
from muonbook.measure.workload import TIMED

BATCHES = (0, 512, 1024, 4096)


def test_the_parts_add_up_to_what_eight_processes_were_counted_to_send() -> None:
    counted = {f"{row['dp']} DP × {row['tp']} TP": row for row in results.load("regimes")["skew"]}
    sent = sent_by_grid(TIMED, GRIDS, 512)
    assert sent.keys() == counted.keys()
    for grid, parts in sent.items():
        assert list(parts) == list(PARTS)
        assert sum(parts.values()) == counted[grid]["muon"]["sent_bytes"]
        assert parts["gradients, parameters"] + parts["activations"] == counted[grid]["zero1"]["sent_bytes"]


def test_only_activations_grow_with_tokens_and_in_proportion() -> None:
    none, some, twice = (sent_by_grid(TIMED, GRIDS, tokens) for tokens in (0, 512, 1024))
    for grid, parts in some.items():
        others = [part for part in PARTS if part != "activations"]
        assert all(none[grid][part] == parts[part] == twice[grid][part] for part in others)
        assert (none[grid]["activations"], twice[grid]["activations"]) == (0, 2 * parts["activations"])
        assert (parts["activations"] > 0) == ("× 1 TP" not in grid)


def test_the_least_walks_from_the_row_to_the_column_and_every_title_says_where_it_is() -> None:
    frames = frames_of_grids(TIMED, GRIDS, BATCHES)
    best = [least(sent_by_grid(TIMED, GRIDS, tokens)) for tokens in BATCHES]
    assert best == ["1 DP × 8 TP", "2 DP × 4 TP", "4 DP × 2 TP", "8 DP × 1 TP"]
    for frame, grid, words in zip(frames, best, ("No activations", "512 tokens", "1,024", "4,096"), strict=True):
        assert frame.alt.startswith(words)
        assert f": {grid} sends least." in frame.alt
        assert grid in frame.caption


def test_all_frames_have_one_scale_and_can_be_read() -> None:
    frames = frames_of_grids(TIMED, GRIDS, BATCHES)
    still = "bar-8 DP × 1 TP-Muon's momentum"
    widths = [[bar.get_width() for bar in boxes(frame.figure, still)] for frame in frames]
    assert np.allclose(widths, widths[0])
    assert player.html("grids", frames)
    for frame in frames:
        assert_readable(frame.figure)


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="256 tokens are no whole number of sequences of 64 for each DP rank"):
        sent_by_grid(TIMED, GRIDS, 256)
