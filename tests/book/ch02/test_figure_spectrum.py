"""The moving spectrum: its dots are the singular values that Newton–Schulz makes, its words their numbers."""

import numpy as np
import pytest
import torch
from figure_helpers import assert_readable, texts

from distmuon.optim import newton_schulz as ns
from distmuon.optim.coefficients import MUON, quintics
from muonbook.ch02.figure_spectrum import frames_of_iterations, trail_of

VALUES = 10.0 ** np.linspace(0, -3, 12)
BOTH = {name: quintics(name, 3) for name in ("muon", "polar_express")}


def dots(figure, name: str) -> np.ndarray:
    (line,) = (line for axes in figure.axes for line in axes.lines if line.get_gid() == name)
    return np.stack(line.get_data(), axis=-1)


def test_the_trail_is_what_newton_schulz_does_to_a_matrix_of_these_values() -> None:
    matrix = torch.diag(torch.as_tensor(VALUES))
    trail = trail_of(VALUES, quintics("polar_express", 4))
    for steps in range(5):
        found = ns.newton_schulz(matrix, steps, "polar_express", torch.float64).diagonal()
        assert trail[steps] == pytest.approx(found.numpy(), rel=1e-12)


def test_a_frame_shows_the_values_and_where_on_the_curve_they_came_from() -> None:
    frames = frames_of_iterations(VALUES, BOTH)
    assert len(frames) == 4
    for n, schedule in enumerate(BOTH.values()):
        trail = trail_of(VALUES, schedule)
        assert dots(frames[2].figure, f"values-{n}")[:, 1] == pytest.approx(trail[2])
        assert dots(frames[2].figure, f"on-curve-{n}") == pytest.approx(trail[1:3].T)
        a, b, c = schedule[1]
        s, after = dots(frames[2].figure, f"curve-{n}").T
        assert after == pytest.approx(a * s + b * s**3 + c * s**5)
    for frame in frames:
        assert_readable(frame.figure)
        assert frame.figure.get_size_inches() == pytest.approx(frames[0].figure.get_size_inches())


def test_words_count_what_has_arrived() -> None:
    values = 10.0 ** np.linspace(0, -3, 32)
    frames = frames_of_iterations(values, {"Muon's": quintics("muon", 5)})
    assert "Where do the products take them?" in frames[0].caption
    assert "Before the first iteration" in texts(frames[0].figure)
    last = trail_of(values, quintics("muon", 5))[-1]
    arrived = ((last > 0.675) & (last < 1.205)).sum()
    assert frames[-1].caption == f"15 products: from 0.29 to 1.2, {arrived} of 32 in the grey band."
    assert f"After iteration 5, 32 singular values. Muon's: from 0.29 to 1.2, {arrived} near 1." == frames[-1].alt


@pytest.mark.parametrize("schedules", [{}, {**BOTH, "third": BOTH["muon"]}, {"a": [MUON], "b": [MUON] * 2}])
def test_other_schedules_are_refused(schedules) -> None:
    with pytest.raises(ValueError, match="one schedule, or for two"):
        frames_of_iterations(VALUES, schedules)
