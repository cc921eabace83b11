"""The handwritten digits: scikit-learn's, whether its file is read or it is asked."""

import importlib.util

import pytest
import torch
import worlds

from distmuon.models.digits import DIGITS_PIXELS, DIGITS_ROWS, digits, scanned
from distmuon.models.recipe import TRAINING_ROWS
from distmuon.sharding.grid import Grid


@pytest.mark.parametrize("where", ["where it is", "elsewhere"])
def test_the_table_is_what_scikit_learn_returns(monkeypatch, where: str) -> None:
    if where == "elsewhere":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    from sklearn.datasets import load_digits  # here: whoever only looks for tests would take a second for it

    images, labels = load_digits(return_X_y=True)
    table = scanned()
    assert (table.dtype, table.shape) == (torch.float64, (DIGITS_ROWS, DIGITS_PIXELS + 1))
    assert torch.equal(table[:, :-1], torch.from_numpy(images))
    assert torch.equal(table[:, -1].long(), torch.from_numpy(labels))


def test_reading_it_imports_no_scikit_learn() -> None:
    """Its import takes a second, of every command."""
    read = "import sys; from distmuon.models.digits import scanned; scanned(); print('sklearn' in sys.modules)"
    assert worlds.finish("-c", read) == (0, "False\n", "")


def test_a_split_is_normalized_by_its_training_rows_and_shuffled_by_the_seed() -> None:
    from sklearn.datasets import load_digits

    training, held_out = digits(Grid.alone(), seed=0)
    assert (len(training.labels), len(held_out.labels)) == (TRAINING_ROWS, DIGITS_ROWS - TRAINING_ROWS)
    assert float(training.images.mean()) == pytest.approx(0, abs=1e-12)
    assert float(training.images.var()) == pytest.approx(1, abs=1e-12)
    together = torch.cat([training.labels, held_out.labels])
    assert torch.equal(together.bincount(), torch.from_numpy(load_digits().target).bincount())
    assert not torch.equal(digits(Grid.alone(), seed=1)[0].labels, training.labels)
    assert torch.equal(digits(Grid.alone(), seed=0)[0].images, training.images)
