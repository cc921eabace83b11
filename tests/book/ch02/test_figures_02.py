"""The moving spectrum: its dots are the singular values that Newton–Schulz makes, its words their numbers."""

import numpy as np
import pytest
import torch
from figure_helpers import assert_readable, texts

from distmuon.optim import newton_schulz as ns
from distmuon.optim.coefficients import quintics
from muonbook.ch02 import figures
from muonbook.figures.healthy import HEALTHY, is_healthy

VALUES = 10.0 ** np.linspace(0, -3, 12)
SCHEDULE = quintics("polar_express", 3)


def dots(figure, name: str) -> np.ndarray:
    (line,) = (line for axes in figure.axes for line in axes.lines if line.get_gid() == name)
    return np.stack(line.get_data(), axis=-1)


def test_the_trail_is_what_newton_schulz_does_to_a_matrix_of_these_values() -> None:
    matrix = torch.diag(torch.as_tensor(VALUES))
    trail = figures.trail_of(VALUES, quintics("polar_express", 4))
    for steps in range(5):
        found = ns.newton_schulz(matrix, steps, "polar_express", torch.float64).diagonal()
        assert trail[steps] == pytest.approx(found.numpy(), rel=1e-12)


def test_a_frame_shows_the_values_and_where_on_the_curve_they_came_from() -> None:
    frames = figures.frames_of_iterations(VALUES, SCHEDULE)
    assert len(frames) == 4
    trail = figures.trail_of(VALUES, SCHEDULE)
    assert dots(frames[2].figure, "values")[:, 1] == pytest.approx(trail[2])
    assert dots(frames[2].figure, "on-curve") == pytest.approx(trail[1:3].T)
    a, b, c = SCHEDULE[1]
    s, after = dots(frames[2].figure, "curve").T
    assert after == pytest.approx(a * s + b * s**3 + c * s**5)
    for frame in frames:
        assert_readable(frame.figure)
        assert frame.figure.get_size_inches() == pytest.approx(frames[0].figure.get_size_inches())


def test_words_count_what_has_arrived() -> None:
    frames = figures.frames_of_iterations()
    assert "Where do the products take them?" in frames[0].caption
    assert "Before the first iteration" in texts(frames[0].figure)
    trail = figures.trail_of(figures.VALUES, figures.SIX)
    arrived = [int(((s > 0.675) & (s < 1.205)).sum()) for s in trail[5:]]
    assert arrived == [27, 32]  # the chapter says so below the picture
    assert frames[5].caption == "15 products: from 0.29 to 1.2, 27 of 32 in the grey band."
    assert frames[5].alt == "After iteration 5, 32 singular values: from 0.29 to 1.2, 27 near 1."


def test_the_band_is_where_five_of_muons_quintics_end() -> None:
    s = np.linspace(0.003, 1, 100_000)
    for a, b, c in quintics("muon", 5):
        s = a * s + b * s**3 + c * s**5
    assert (round(s.min(), 2), round(s.max(), 2)) == HEALTHY
    assert is_healthy(s).all()


def test_the_share_is_drawn_in_percent() -> None:
    figure, alt = figures.draw_share(lambda n, m, tokens: n / tokens)
    assert_readable(figure)
    assert "8192 × 8192: from 50 to 0.195" in alt
