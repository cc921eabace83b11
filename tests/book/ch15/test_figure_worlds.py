"""The map of worlds shows every cell with its number, says why a cell is empty, and can be read on a phone."""

from typing import Any

import pytest
from figure_helpers import assert_readable, boxes, texts
from matplotlib.colors import to_hex

from muonbook.ch15.figure_worlds import describe_worlds, draw_worlds
from muonbook.ch15.worlds_survey import survey


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return survey(quick=True)


def with_cell(found: dict[str, Any], number: int, **changed: Any) -> dict[str, Any]:
    cells = [cell | changed if n == number else cell for n, cell in enumerate(found["cells"])]
    return found | {"cells": cells}


def test_every_cell_is_drawn_with_its_t_and_its_ratio(found: dict[str, Any]) -> None:
    figure = draw_worlds(found, title="Which T?", note="Planned.")
    assert len(boxes(figure, "cell-")) == len(found["cells"])
    written = texts(figure)
    for cell in found["cells"]:
        assert str(cell["tp"]) in written
        assert f"{cell['over_adamw']:.2f}×" in written
    assert any(text.startswith("Planned. In a cell: the T of the shortest step") for text in written)
    assert {"Which T?", "GPT-2", "Llama 3 8B", "NVLink", "for all", "1,024"} <= set(written)
    assert_readable(figure)


def test_a_dearer_cell_is_darker_and_the_scale_ends(found: dict[str, Any]) -> None:
    shades = []
    for ratio in (1.0, 1.2, 2.0, 3.0, 30.0):
        figure = draw_worlds(with_cell(found, 0, over_adamw=ratio))
        shades.append(to_hex(boxes(figure, "cell-")[0].get_facecolor()))
    assert sorted(shades, reverse=True) == shades
    assert shades[3] == shades[4] == "#a8173a"


def test_a_cell_without_a_grid_says_why(found: dict[str, Any]) -> None:
    for why, words in (("no room", "no room"), ("no batch", "no batch")):
        empty = with_cell(found, 3, tp=None, why=why)
        figure = draw_worlds(empty)
        assert words in texts(figure)
        assert ("less than one sequence" in " ".join(texts(figure))) == (why == "no batch")
        assert words in describe_worlds(empty)
        assert_readable(figure)


def test_alt_text_tells_every_cell(found: dict[str, Any]) -> None:
    told = describe_worlds(found, title="Which T?")
    assert told.startswith("Which T?.")
    for cell in found["cells"]:
        assert f"T {cell['tp']}, {cell['over_adamw']:.2f}×" in told


def test_a_batch_that_was_not_surveyed_is_refused(found: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tokens is 5; the survey has 4194304"):
        draw_worlds(found, tokens=5)
