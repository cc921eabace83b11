"""Chapter 1: its measures mean what they say, its one step is fair, and its worker refuses what it cannot do."""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import stored_pages
import torch
import worlds
from helpers_math import distance, gaussian
from torch import Tensor, nn

from distmuon.models.digits import Split
from distmuon.optim.newton_schulz import polar_factor, singular_values
from muonbook.ch01 import experiments, figures

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
    share, used = experiments.skew(3.0 * orthogonal[:, :k] @ polar_factor(gaussian(k, 10, dtype=torch.float64)))
    assert used == pytest.approx(k, abs=1e-6)
    assert share == pytest.approx(min(1.0, 5 / k))


def test_directions_in_use_are_counted_by_their_shares_of_the_squares() -> None:
    _, used = experiments.skew(torch.diag(torch.tensor([2.0, 1.0], dtype=torch.float64)))
    assert used == pytest.approx(math.exp(-0.8 * math.log(0.8) - 0.2 * math.log(0.2)))


def test_one_step_compares_equal_spectral_norms_and_puts_the_weight_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(9, 7).double()
    before = model.weight.detach().clone()
    data = Split(gaussian(5, 9, dtype=torch.float64), torch.arange(5))
    directions: list[Tensor] = []
    measure = experiments.losses_after

    def spy(model: nn.Module, weight: Tensor, direction: Tensor, parts: tuple[Split, ...]) -> list[list[float]]:
        directions.append(direction)
        return measure(model, weight, direction, parts)

    monkeypatch.setattr(experiments, "losses_after", spy)
    raw, polar = experiments.one_step(model, model.weight, rank_two(), (data, data))
    assert [singular_values(direction)[0].item() for direction in directions] == pytest.approx([1.0, 1.0])
    assert torch.equal(model.weight, before)
    for losses in (raw, polar):
        assert len(losses[0]) == len(experiments.LENGTHS)
        assert losses[0] == losses[1]

    with torch.no_grad():
        model.weight -= experiments.LENGTHS[4] * directions[1]
    assert polar[0][4] == nn.functional.cross_entropy(model(data.images), data.labels).item()


def test_the_gradients_are_those_of_the_step_that_follows() -> None:
    run = experiments.run_seed(0, 1, (0, 1))
    assert list(run["skew"]) == [0, 1]
    first = experiments.run_seed(0, 0, (0,))["matrices"]
    assert torch.equal(first["momentum"], first["gradient"]), "there is no past yet"
    momentum = experiments.MOMENTUM * first["gradient"] + run["matrices"]["gradient"]
    assert distance(run["matrices"]["momentum"], momentum) < 1e-14
    assert distance(run["matrices"]["weight"], first["weight"] - experiments.RATE * first["gradient"]) < 1e-14


# ---- The page ---------------------------------------------------------------------------------------------


def cell(beginning: str) -> str:
    """Return the code cell of the page that begins so, or with a comment and then so."""
    return stored_pages.cell_with("01_why_orthogonalize", beginning).source


def prose() -> str:
    """Return the Markdown of the page."""
    return stored_pages.prose("01_why_orthogonalize")


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    """What the page's cells may use: the saved run, and what earlier cells have made of it."""
    start = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    run = experiments.run_seed(0, 20, (0,))
    known: dict[str, Any] = {"torch": torch, "np": np, "polar_factor": polar_factor, "run": run["matrices"]}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(cell("def in_use"), known)
    yield known | {"seed": run}
    torch.set_default_dtype(start)


def printed(source: str, names: dict[str, Any]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(source, names)
    return out.getvalue()


def test_the_page_counts_directions_as_the_worker_does(names: dict[str, Any]) -> None:
    for matrix in (*names["run"].values(), rank_two()):
        assert names["in_use"](matrix) == pytest.approx(experiments.skew(matrix)[1], rel=1e-6)


def test_the_prose_says_what_the_run_shows(names: dict[str, Any]) -> None:
    table = stored_pages.printed(
        "01_why_orthogonalize", "python ../scripts/01_why_orthogonalize.py --save out/one_step.npz"
    )
    row = re.search(r"^ +20 .*$", table, re.MULTILINE)[0].replace("%", "").split()  # type: ignore[index]
    gradient, used, momentum, _, _, weight = map(float, row[2:])
    assert (gradient > 90, used < 4, momentum > 50) == (True,) * 3
    trained = (
        f"learning rate is {experiments.RATE}, its momentum {experiments.MOMENTUM}, and it sees {experiments.BATCH}"
    )
    assert trained in prose()
    random = names["in_use"](gaussian(128, 256, dtype=torch.float64))
    assert weight == pytest.approx(random, rel=0.02), "about as many as a matrix of random numbers"
    assert "lower in 12 of 12 comparisons" in table
    raw, polar = np.array(names["seed"]["after"]["gradient"])[:, 1, : figures.SHOWN]
    assert (polar < raw).all()
    assert int((names["run"]["gradient"] == 0).all(dim=1).sum()) == 9
    s = singular_values(polar_factor(names["run"]["gradient"]))
    assert torch.allclose(s, s.round())
    assert set(s.round().tolist()) == {0, 1}


def test_the_noise_is_as_weak_as_the_page_says(names: dict[str, Any]) -> None:
    known: dict[str, Any] = names | {"normalize": torch.nn.functional.normalize}
    printed(cell("noisy = torch.outer"), known)
    noise = known["noisy"] - torch.outer(known["u"], known["v"])
    assert 1 / float(singular_values(noise)[0]) == pytest.approx(50_000, rel=0.1)
    assert "whose spectral norm is about fifty thousand times smaller" in prose()


def test_a_gradient_is_as_uneven_as_its_images_are_alike(names: dict[str, Any]) -> None:
    used = [
        float(re.search(r"([\d.]+) of 6", printed(cell("alike = 1.0").replace("1.0  #", f"{alike}  #"), names))[1])  # type: ignore[index]
        for alike in (0.0, 1.0, 2.0)
    ]
    assert used == sorted(used, reverse=True)
    assert used[0] > 3
    assert used[1] < 1.5


@pytest.mark.parametrize(("spread", "polar_wins"), [(2.0, True), (1.0, False)])
def test_the_polar_factor_wins_where_features_differ_in_size(
    spread: float, polar_wins: bool, names: dict[str, Any]
) -> None:
    out = printed(cell("spread = 2.0").replace("2.0  #", f"{spread}  #"), names)
    start, raw, polar = (float(x) for x in re.findall(r": ([\d.]+)", out))
    assert (polar < raw < start) == polar_wins
    assert max(raw, polar) < start


def test_only_the_spectral_norm_is_what_moves_an_answer(names: dict[str, Any]) -> None:
    out = printed(cell('steps = {"one direction"'), names)
    one, six = ([float(x) for x in re.findall(r"\d\.\d\d", line)] for line in out.splitlines()[1:])
    assert one[0] == six[0] == 1
    assert one[2:] == pytest.approx([1, 1], abs=0.03)
    assert six[2:] == pytest.approx([6**-0.5] * 2, abs=0.01)
    assert one[3] > 2 * six[3]


def test_no_other_step_earns_more_and_none_without_a_stretch_is_nearer(names: dict[str, Any]) -> None:
    assert printed(cell("Its rows have length 1"), names).count("True") == 2
    others = torch.linalg.qr(torch.randn(1_000, 6, 4)).Q.mT  # semi-orthogonal
    assert (names["O"] - names["G"]).norm() < (others - names["G"]).norm(dim=(1, 2)).min()
    printed(cell("spread = 2.0"), names)
    earned = [float(x) for x in re.findall(r"-?\d\.\d{3}", printed(cell("best of 10,000"), names))]
    assert earned[0] == earned[1]
    assert earned[3] == earned[4] < earned[2] < 0
    names |= {"G": names["run"]["gradient"], "O": polar_factor(names["run"]["gradient"])}
    shares = [line.split()[-3:] for line in printed(cell("rulers = {\n"), names).splitlines()[1:]]
    assert [row.index("1.00") for row in shares] == [0, 1, 2], "each wins by its own ruler"


@pytest.mark.parametrize("noise", [0.01, 0.1, 1.0])
def test_averaging_first_keeps_the_weak_directions(noise: float, names: dict[str, Any]) -> None:
    lines = printed(cell("noise = 0.1").replace("0.1  #", f"{noise}  #"), names).splitlines()
    first, last = (np.array([float(x) for x in re.findall(r"-?\d\.\d\d", line)]) for line in lines)
    assert first[4:].mean() > last[4:].mean()
    if noise <= 0.1:
        assert first.min() > 0.6
    if noise == 0.01:
        assert f"keeps {first.min():.2f} of its strength if we average first, and {last.min():.2f}" in prose()
    if noise == 1.0:
        assert "neither order gives an even step" in prose()
        assert max(first.min(), last.min()) < 0.3 * min(first.max(), last.max())


# ---- The worker -------------------------------------------------------------------------------------------


def test_a_name_that_is_not_of_arrays_is_refused() -> None:
    says = "error: --save numbers.txt: arrays are saved as .npz; choose such a name.\n"
    assert worlds.answer(WORKER, "--save", "numbers.txt") == (2, "", says)


# ---- The circle -------------------------------------------------------------------------------------------


def test_a_thin_ellipse_takes_more_iterations_and_no_more_frames_than_fit() -> None:
    assert 9 <= len(figures.frames_of_circle([[1.2, 0.9], [0.1, 0.7]])) <= 10
    assert len(figures.frames_of_circle([[1.0, 0.0], [0.0, 0.02]])) <= 14


@pytest.mark.parametrize(
    "matrix",
    [[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [[1.0, 2.0], [2.0, 4.0]], [[1.0, 0.0], [0.0, 0.01]]],
)
def test_a_matrix_without_an_ellipse_is_refused(matrix: list[list[float]]) -> None:
    with pytest.raises(ValueError, match=r"2 x 2|singular values"):
        figures.frames_of_circle(matrix)
