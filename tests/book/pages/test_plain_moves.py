"""The nine moves in plain words: no word that a newcomer does not have, and no number that the layout does not say."""

from __future__ import annotations

import re

import pytest
from figure_helpers import boxes, texts

from muonbook.figures import player
from muonbook.figures.nine_moves import HOLDINGS, CutMatrix, small_layer_layout
from muonbook.figures.player import Frame
from tools.pages import plain_moves

JARGON = re.compile(r"[\[\]{}_]|\b(?:DP|TP|ranks?|shards?|buckets?|blocks?|reduce|scatter|gather)\b", re.IGNORECASE)
TERM = re.compile(r" \((?:reduce-scatter|all-gather|Newton–Schulz)\)\.$")  # what may follow the plain words


@pytest.fixture(scope="module")
def frames() -> dict[str, Frame]:
    return dict(zip(HOLDINGS, plain_moves.frames(), strict=True))


def test_the_words_are_plain(frames: dict[str, Frame]) -> None:
    for frame in frames.values():
        for words in (TERM.sub(".", frame.caption), frame.alt, *texts(frame.figure)):
            assert not JARGON.search(words), words
    assert not JARGON.search(plain_moves.describe_film())


def test_the_terms_of_the_field_stand_where_processes_send_or_orthogonalize(frames: dict[str, Frame]) -> None:
    sending = {move for move, holding in HOLDINGS.items() if holding.sent}
    named = {move for move, frame in frames.items() if TERM.search(frame.caption)}
    assert named == sending | {"newton_schulz"}
    for move in sending:
        op = HOLDINGS[move].sent.split()[0].replace("_", "-")
        assert frames[move].caption.endswith(f" ({op}).")


def test_the_moves_are_counted_and_the_heading_is_on_every_card(frames: dict[str, Frame]) -> None:
    starts = [re.match(r"Move \d of \d\.|Before the step\.", frame.caption) for frame in frames.values()]
    assert [start and start[0] for start in starts] == ["Before the step.", *(f"Move {n} of 9." for n in range(1, 10))]
    for frame in frames.values():
        assert texts(frame.figure)[:2] == ["Eight processes, one matrix.", "Colour shows what each of them holds."]


def test_the_words_fit_the_grid_that_is_drawn(frames: dict[str, Frame]) -> None:
    """Eight processes, rows of two, halves that lie left and right, and every process owns a piece."""
    matrix = CutMatrix.find(small_layer_layout(), "weight", plain_moves.TP)
    assert (matrix.layout.dp, matrix.tp, matrix.spec.tp_split_dim) == (4, 2, 1)
    assert len(matrix.owners) == 4
    for frame in frames.values():
        assert len(boxes(frame.figure, "whole")) == 8
        assert {"left half", "right half", *(f"data {n}" for n in range(1, 5))} <= set(texts(frame.figure))


def test_alt_text_has_the_true_numbers(frames: dict[str, Frame]) -> None:
    assert frames["gradients"].alt == (
        "The outline of a matrix, once for each of 8 processes, in 4 rows and 2 columns. Before the step each holds "
        "its own gradient, 64 of 128 numbers, in the colour of its row."
    )
    assert frames["momentum"].alt == (
        "After move 2 each holds its piece of the momentum, 10 to 18 of 128 numbers, in the colour of its row."
    )
    assert frames["tp_gather"].alt == (
        "After move 4 each holds all of the momentum, 128 of 128 numbers, in the colours of all rows."
    )


def test_the_still_frame_is_the_one_where_all_hold_the_whole_matrix_in_all_colours(frames: dict[str, Frame]) -> None:
    assert "whole matrix" in list(frames.values())[plain_moves.STILL].caption
    assert "128 of 128 numbers, in the colours of all rows" in list(frames.values())[plain_moves.STILL].alt


def test_in_the_film_each_caption_stands_on_its_card() -> None:
    for frame in plain_moves.frames(captioned=True)[::3]:
        assert frame.caption in " ".join(texts(frame.figure))


def test_all_of_it_plays_in_less_than_a_minute(frames: dict[str, Frame]) -> None:
    assert sum(map(player.stay, frames.values())) < 60_000
