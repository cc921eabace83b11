"""Chapter 1: its measures mean what they say, its one step is fair, and its worker refuses what it cannot do."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import worlds
from figure_helpers import assert_readable, texts
from helpers_math import distance, gaussian
from matplotlib.figure import Figure
from torch import Tensor, nn

from distmuon.models.digits import Split
from distmuon.optim.newton_schulz import polar_factor, singular_values
from muonbook.ch01 import figure_circle, one_step

WORKER = str(worlds.ROOT / "scripts" / "01_why_orthogonalize.py")


def rank_two() -> Tensor:
    """[7, 9] of rank 2, with a silent row."""
    matrix = gaussian(7, 2, dtype=torch.float64) @ gaussian(2, 9, seed=1, dtype=torch.float64)
    matrix[3] = 0
    return matrix


# ---- What it measures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 5, 8])
def test_k_equal_directions_count_as_k(k: int) -> None:
    orthogonal = polar_factor(gaussian(12, 8, dtype=torch.float64))
    share, used = one_step.skew(3.0 * orthogonal[:, :k] @ polar_factor(gaussian(k, 10, dtype=torch.float64)))
    assert used == pytest.approx(k, abs=1e-6)
    assert share == pytest.approx(min(1.0, 5 / k))


def test_directions_in_use_are_counted_by_their_shares_of_the_squares() -> None:
    _, used = one_step.skew(torch.diag(torch.tensor([2.0, 1.0], dtype=torch.float64)))
    assert used == pytest.approx(math.exp(-0.8 * math.log(0.8) - 0.2 * math.log(0.2)))


def test_the_polar_factor_takes_no_step_where_the_matrix_has_nothing() -> None:
    found = polar_factor(rank_two())
    expected = torch.tensor([1.0, 1, 0, 0, 0, 0, 0], dtype=torch.float64)
    assert torch.allclose(singular_values(found), expected, atol=1e-12)
    assert found[3].abs().max() < 1e-12


def test_one_step_compares_equal_spectral_norms_and_puts_the_weight_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(9, 7).double()
    before = model.weight.detach().clone()
    data = Split(gaussian(5, 9, dtype=torch.float64), torch.arange(5))
    directions: list[Tensor] = []
    measure = one_step.losses_after

    def spy(model: nn.Module, weight: Tensor, direction: Tensor, parts: tuple[Split, ...]) -> list[list[float]]:
        directions.append(direction)
        return measure(model, weight, direction, parts)

    monkeypatch.setattr(one_step, "losses_after", spy)
    raw, polar = one_step.one_step(model, model.weight, rank_two(), (data, data))
    assert [singular_values(direction)[0].item() for direction in directions] == pytest.approx([1.0, 1.0])
    assert torch.equal(model.weight, before)
    for losses in (raw, polar):
        assert len(losses[0]) == len(one_step.LENGTHS)
        assert losses[0] == losses[1]

    with torch.no_grad():
        model.weight -= one_step.LENGTHS[4] * directions[1]
    assert polar[0][4] == nn.functional.cross_entropy(model(data.images), data.labels).item()


def test_the_gradients_are_those_of_the_step_that_follows() -> None:
    run = one_step.run_seed(0, 1, (0, 1))
    assert list(run["skew"]) == [0, 1]
    first = one_step.run_seed(0, 0, (0,))["matrices"]
    assert torch.equal(first["momentum"], first["gradient"]), "there is no past yet"
    momentum = one_step.MOMENTUM * first["gradient"] + run["matrices"]["gradient"]
    assert distance(run["matrices"]["momentum"], momentum) < 1e-14
    assert distance(run["matrices"]["weight"], first["weight"] - one_step.RATE * first["gradient"]) < 1e-14


# ---- The worker -------------------------------------------------------------------------------------------


def test_the_worker_prints_its_tables_and_saves_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "new" / "step.npz"
    code, output, errors = worlds.finish(WORKER, "--seeds", "1", "--step", "3", "--save", str(path))
    assert (code, errors) == (0, "")
    assert re.search(r"^ +20 +0\.\d{3} +9\d% +\d\.\d", output, re.MULTILINE)
    assert re.search(r"^ +0  gradient \|( +\d\.\d{3}){3}  \|( +\d\.\d{3}){3}$", output, re.MULTILINE)
    assert output.endswith("comparisons.\n")
    saved = np.load(path)
    assert saved["gradient"].shape == saved["momentum"].shape == saved["weight"].shape == (128, 256)
    assert saved["after_gradient"].shape == (2, 2, len(one_step.LENGTHS))
    assert f"{saved['after_gradient'][1, 1].min():.3f}" in output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--seeds", "0"), "--seeds 0: must be from 1 to 100."),
        (("--step", "-1"), "--step -1: must be from 0 to 1,000."),
        (("--save", "numbers.txt"), "--save numbers.txt: arrays are saved as .npz; choose such a name."),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments: tuple[str, ...], says: str) -> None:
    assert worlds.finish(WORKER, *arguments) == (2, "", f"error: {says}\n")


# ---- The circle -------------------------------------------------------------------------------------------

QUARTER_TURN = [[0.0, -2.0], [0.5, 0.0]]


def image_of(figure: Figure) -> np.ndarray:
    """Return the outline of the circle's image, in units of the circle behind it: [points, 2]."""
    inputs, image = (
        next(np.asarray(p.get_path().vertices) for p in figure.axes[0].patches if p.get_gid() == name)
        for name in ("inputs", "image")
    )
    return (image - inputs.mean(axis=0)) / (np.ptp(inputs[:, 0]) / 2)


def test_the_circle_is_stretched_turned_made_smaller_and_rounded_again() -> None:
    frames = figure_circle.frames_of_circle(QUARTER_TURN)
    sizes = [np.ptp(image_of(frame.figure), axis=0) / 2 for frame in frames]  # [across, up]
    norm = math.hypot(2, 0.5)
    expected = [(1, 1), (0.5**0.5, 2**0.5), (0.5, 2), (2, 0.5), (2 / norm, 0.5 / norm)]
    assert np.array(sizes[:5]) == pytest.approx(np.array(expected), rel=2e-3)
    assert sizes[-1] == pytest.approx([1, 1], rel=1e-2)
    up = [size[1] for size in sizes[4:]]
    assert up == sorted(up)
    assert len({tuple(frame.figure.get_size_inches()) for frame in frames}) == 1


def test_the_frames_tell_their_numbers() -> None:
    frames = figure_circle.frames_of_circle(QUARTER_TURN)
    assert {"M stretches, then turns", "s₁ = 2.00", "s₂ = 0.50", "s₁u₁"} <= set(texts(frames[3].figure))
    assert "v₂" in texts(frames[0].figure)
    assert "half-axes 2.00 and 0.50" in frames[3].alt
    assert "turns it by 90 degrees" in frames[3].caption
    assert "a circle with half-axes 1.00 and 1.00" in frames[-1].alt
    assert "mirrors it" in figure_circle.frames_of_circle([[2.0, 0.0], [0.0, -0.5]])[3].caption
    assert [frame.caption for frame in frames if "iteration" in frame.alt] == [
        f"Three matrix products later: {alt_lengths(frame.alt)}. The directions stay."
        for frame in frames
        if "iteration" in frame.alt
    ]
    for frame in frames:
        assert_readable(frame.figure)


def alt_lengths(alt: str) -> str:
    return re.search(r"half-axes (\d\.\d\d and \d\.\d\d)", alt)[1]  # type: ignore[index]


def test_a_thin_ellipse_takes_more_iterations_and_no_more_frames_than_fit() -> None:
    assert 9 <= len(figure_circle.frames_of_circle([[1.2, 0.9], [0.1, 0.7]])) <= 10
    assert len(figure_circle.frames_of_circle([[1.0, 0.0], [0.0, 0.02]])) <= 14


@pytest.mark.parametrize(
    "matrix",
    [[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [[1.0, 2.0], [2.0, 4.0]], [[0.0, 0.0]] * 2, [[1.0, 0.0], [0.0, 0.01]]],
)
def test_a_matrix_without_an_ellipse_is_refused(matrix: list[list[float]]) -> None:
    with pytest.raises(ValueError, match=r"2 x 2|singular values"):
        figure_circle.frames_of_circle(matrix)
