"""Chapter 9's pictures: the pair of layers is what autograd says, and blocks have the singular values drawn."""

import numpy as np
import pytest
import torch

from muonbook.ch09.figures import ANGLES, RANKS, frames_of_pair, pair, rows_at, strengths
from muonbook.ch09.small_layers import whole_numbers


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


def test_captions_name_the_bytes_that_the_worker_counts() -> None:
    captions = [frame.caption for frame in frames_of_pair()]
    assert "Each rank sends 24 bytes." in captions[4]  # 2 (T - 1) / T of 2 x 3 in float32
    assert "Its all-reduce sends 32 bytes." in captions[6]  # and of 2 x 4


def test_blocks_come_to_the_singular_values_of_unit_rows_with_their_angle() -> None:
    for angle in ANGLES:
        values = np.linalg.svd(np.array(rows_at(angle)), compute_uv=False)
        assert values == pytest.approx(strengths(angle))
    assert strengths(90) == pytest.approx((1, 1))
