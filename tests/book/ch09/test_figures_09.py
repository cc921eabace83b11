"""Chapter 9's pictures: the pair of layers shows what its ranks hold, the block its heads, and blocks their values."""

import numpy as np
import pytest
import torch
from figure_helpers import assert_readable, boxes, texts

from muonbook.ch09.figures import (
    ANGLES,
    HEADS,
    RANKS,
    describe_heads,
    draw_heads,
    draw_update,
    frames_of_blocks,
    frames_of_pair,
    pair,
    rows_at,
    strengths,
)
from muonbook.ch09.small_layers import whole_numbers
from muonbook.figures.player import Frame


@pytest.fixture(scope="module")
def frames() -> list[Frame]:
    return frames_of_pair()


def test_the_pair_is_what_autograd_says() -> None:
    tensors, (X, W1, W2, dY) = pair(), whole_numbers()
    x = X.clone().requires_grad_()
    y = torch.relu(x @ W1.T) @ W2.T
    y.backward(dY)
    assert torch.equal(tensors["Y"], y.detach())
    assert x.grad is not None
    assert torch.equal(tensors["dX"], x.grad)
    for name in ("Y", "dX"):
        assert torch.equal(tensors[name], torch.stack([tensors[f"{name}{rank}"] for rank in range(RANKS)]).sum(0))


def test_the_pair_shows_every_number_and_whose_it_is(frames: list[Frame]) -> None:
    for frame in frames:
        assert_readable(frame.figure)
    whole, cut, *_, summed = (frames[n].figure for n in (0, 1, 4))
    tensors = pair()
    for name in ("X", "W1", "H", "W2", "Y"):
        assert {f"{value:g}" for value in tensors[name].flatten().tolist()} <= set(texts(whole))
    assert len(boxes(whole, "both")) == sum(tensors[name].numel() for name in ("X", "W1", "H", "W2", "Y"))
    assert not boxes(whole, "tp")
    assert not {"TP 0", "both"} & set(texts(whole))  # one process
    assert "on both ranks" not in frames[0].alt
    for rank in range(RANKS):  # half of both weights
        assert len(boxes(cut, f"tp{rank}")) == (tensors["W1"].numel() + tensors["W2"].numel()) // RANKS
    assert len(boxes(summed, "sum")) == tensors["Y"].numel()


def test_captions_name_the_bytes_that_the_worker_counts(frames: list[Frame]) -> None:
    captions = [frame.caption for frame in frames]
    assert "Each rank sends 24 bytes." in captions[4]  # 2 (T - 1) / T of 2 x 3 in float32
    assert "Its all-reduce sends 32 bytes." in captions[6]  # and of 2 x 4


def test_the_block_shows_whole_heads_on_each_rank_and_two_sums() -> None:
    figure = draw_heads()
    assert_readable(figure)
    assert [text for text in texts(figure) if text.startswith("head ")] == [f"head {n}" for n in range(HEADS)]
    assert len(boxes(figure, "tp0")) == len(boxes(figure, "tp1")) > HEADS
    assert len(boxes(figure, "sent")) == 2  # all-reduces forward, as the engine's block makes
    between = (boxes(figure, "tp0")[-1].get_x() + boxes(figure, "tp0")[-1].get_width(), boxes(figure, "tp1")[0].get_x())
    assert between[0] < between[1]


def test_with_sequence_parallelism_nothing_is_whole_on_a_rank_and_each_sum_becomes_a_gather_and_a_scatter() -> None:
    figure = draw_heads(by_tokens=True)
    assert_readable(figure)
    assert not boxes(figure, "both")
    assert len(boxes(figure, "sent")) == 4
    said = [text for text in texts(figure) if text.startswith(("all-", "reduce-"))]
    assert said == ["all-gather of tokens", "reduce-scatter by tokens"] * 2
    assert describe_heads(by_tokens=True).count("reduce-scatter") == 2


def test_singular_values_are_all_drawn() -> None:
    matrix = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, words = draw_update(matrix)
    assert words.count("for share of the singular values 0 to 1") == 4


@pytest.mark.parametrize("angle", ANGLES)
def test_blocks_come_to_the_singular_values_of_unit_rows_with_their_angle(angle: int) -> None:
    values = np.linalg.svd(np.array(rows_at(angle)), compute_uv=False)
    assert values == pytest.approx(strengths(angle))
    assert strengths(90) == pytest.approx((1, 1))


def test_bars_are_as_long_as_singular_values() -> None:
    for angle, frame in zip(ANGLES, frames_of_blocks(), strict=True):
        assert_readable(frame.figure)
        widths = [bar.get_width() for bar in boxes(frame.figure, "strength")]
        assert widths == pytest.approx([80 * value for value in (*strengths(angle), 1, 1)])
