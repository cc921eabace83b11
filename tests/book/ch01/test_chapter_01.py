"""Chapter 1: its measures mean what they say, its one step is fair, and its worker refuses what it cannot do."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import worlds
from helpers_math import distance, gaussian
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


def test_the_circle_is_described_by_its_numbers() -> None:
    told = figure_circle.describe_circle([[0.0, -2.0], [0.5, 0.0]], "A quarter turn")
    assert told.startswith("A quarter turn. Three panels")
    assert "half-axes 2.00 and 0.50" in told
    assert told.endswith("turned by 90 degrees.")
    assert figure_circle.describe_circle([[2.0, 0.0], [0.0, -0.5]]).endswith("mirrored.")


def test_the_circle_is_drawn_to_scale() -> None:
    figure = figure_circle.draw_circle([[0.0, -2.0], [0.5, 0.0]], "A quarter turn", "A note.")
    written = [text.get_text() for text in figure.axes[0].texts]
    assert {"A quarter turn", "A note.", "2.00 and 0.50 long", "s₁u₁", "v₂"} <= set(written)
    outlines = [np.asarray(patch.get_path().vertices) for patch in figure.axes[0].patches]
    images = [points for points in outlines if len(points) > 150][::2]  # every other one is the dashed circle
    unit = float(np.ptp(images[0][:, 0]))
    assert [float(np.ptp(points[:, 0])) / unit for points in images] == pytest.approx([1, 2, 1], rel=1e-3)
    assert [float(np.ptp(points[:, 1])) / unit for points in images] == pytest.approx([1, 0.5, 1], rel=1e-3)


@pytest.mark.parametrize("matrix", [[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [[1.0, 2.0], [2.0, 4.0]], [[0.0, 0.0]] * 2])
def test_a_matrix_without_an_ellipse_is_refused(matrix: list[list[float]]) -> None:
    for function in (figure_circle.draw_circle, figure_circle.describe_circle):
        with pytest.raises(ValueError, match=r"2 x 2|singular values"):
            function(matrix)
