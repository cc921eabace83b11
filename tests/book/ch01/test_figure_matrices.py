"""Chapter 1's heat maps: the numbers themselves, on a scale around zero."""

from typing import Any

import numpy as np
import pytest
from figure_helpers import assert_readable, texts

from muonbook.ch01.figure_matrices import describe_matrices, draw_matrices


@pytest.mark.parametrize("shared", [True, False])
def test_heat_maps_hold_the_numbers_on_a_scale_around_zero(shared: bool) -> None:
    matrices = {"M": np.arange(12.0).reshape(3, 4) - 5, "O": np.eye(3) / 2}
    figure = draw_matrices(matrices, "Two", shared=shared)
    for array, axes, own in zip(matrices.values(), figure.axes[1:], (6.0, 0.5), strict=False):
        (image,) = axes.images
        assert np.array_equal(np.asarray(image.get_array()), array)
        assert image.get_clim() == ((-6.0, 6.0) if shared else (-own, own))
    assert ("−6 to 6, blank is zero" in texts(figure)) == shared
    assert ("± 0.5" in texts(figure)) != shared
    assert_readable(figure)


@pytest.mark.parametrize("matrices", [{}, {f"{n}": [[1]] for n in range(5)}, {"a": [1]}, {"a": [[float("inf")]]}])
def test_matrices_that_cannot_be_drawn_say_why(matrices: Any) -> None:
    with pytest.raises(ValueError, match=r"matrices|finite"):
        draw_matrices(matrices)


def test_alt_text_has_the_true_numbers() -> None:
    assert describe_matrices({"M": [[1, -2]]}, "One") == "One. M: 1 × 2, from −2 to 1."
