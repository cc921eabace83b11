"""The moving spectrum: its dots are the singular values that Newton–Schulz makes, its words their numbers."""

import numpy as np
import pytest
import torch

from distmuon.optim import newton_schulz as ns
from distmuon.optim.coefficients import quintics
from muonbook.ch02 import figures
from muonbook.figures.healthy import HEALTHY, is_healthy

VALUES = 10.0 ** np.linspace(0, -3, 12)


def test_the_trail_is_what_newton_schulz_does_to_a_matrix_of_these_values() -> None:
    matrix = torch.diag(torch.as_tensor(VALUES))
    trail = figures.trail_of(VALUES, quintics("polar_express", 4))
    for steps in range(5):
        found = ns.newton_schulz(matrix, steps, "polar_express", torch.float64).diagonal()
        assert trail[steps] == pytest.approx(found.numpy(), rel=1e-12)


def test_words_count_what_has_arrived() -> None:
    trail = figures.trail_of(figures.VALUES, figures.SIX)
    arrived = [int(((s > 0.675) & (s < 1.205)).sum()) for s in trail[5:]]
    assert arrived == [27, 32]  # the chapter says so below the picture
    assert "27 of 32 in the grey band." in figures.frames_of_iterations()[5].caption


def test_the_band_is_where_five_of_muons_quintics_end() -> None:
    s = np.linspace(0.003, 1, 100_000)
    for a, b, c in quintics("muon", 5):
        s = a * s + b * s**3 + c * s**5
    assert (round(s.min(), 2), round(s.max(), 2)) == HEALTHY
    assert is_healthy(s).all()
