"""The planned worlds in frames: every ratio where it belongs, one scale, and a band that says how far to trust it."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from figure_helpers import assert_readable, texts
from matplotlib.lines import Line2D

from muonbook.ch15.worlds.figure_worlds import NAMES, TWICE, frames_of_worlds
from muonbook.figures import player
from muonbook.figures.player import Frame
from muonbook.figures.style import LOOKS
from muonbook.measure import results
from muonbook.planner.model_shapes import SURVEYED

FABRIC, TOKENS = "nvlink_infiniband", 1 << 22
ERROR = 0.2  # 2.72 may be 2.27


@pytest.fixture(scope="module")
def worlds() -> dict[str, Any]:
    return results.load("worlds")


@pytest.fixture(scope="module")
def frames(worlds: dict[str, Any]) -> dict[str, Frame]:
    return dict(zip(SURVEYED, frames_of_worlds(worlds, FABRIC, TOKENS, SURVEYED, ERROR), strict=True))


def here(worlds: dict[str, Any], model: str, name: str) -> list[dict[str, Any]]:
    cells = (cell for cell in worlds["cells"] if (cell["fabric"], cell["tokens"]) == (FABRIC, TOKENS))
    return [cell for cell in cells if (cell["model"], cell["algorithm"]) == (model, name)]


def drawn(frame: Frame, start: str) -> dict[str, Line2D]:
    lines = frame.figure.axes[1].lines
    return {gid.removeprefix(start): line for line in lines if (gid := str(line.get_gid())).startswith(start)}


def points(line: Line2D) -> list[tuple[float, float]]:
    return list(zip(np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist(), strict=True))


def bands(frame: Frame) -> dict[str, np.ndarray]:
    found = ((str(area.get_gid()), area) for area in frame.figure.axes[1].collections)
    return {gid.removeprefix("band-"): np.asarray(area.get_paths()[0].vertices) for gid, area in found}


def test_every_ratio_is_a_point_of_its_algorithms_line_and_is_told(
    worlds: dict[str, Any], frames: dict[str, Frame]
) -> None:
    for (model, frame), (name, title) in product(frames.items(), NAMES.items()):
        cells, line = here(worlds, model, name), drawn(frame, "curve-")[title]
        fitting = [cell for cell in cells if cell["tp"]]
        assert points(line) == [(cell["ranks"], cell["over_adamw"]) for cell in fitting]
        assert line.get_color() == LOOKS[title]["color"]
        _, told = frame.alt.split(f"{title} on ", 1)
        for cell, words in zip(cells, told.split("; ")[0].split("on "), strict=True):
            assert words.startswith(f"{cell['ranks']:,}: {cell['why'] if not cell['tp'] else ''}")
            assert cell["tp"] is None or f": {cell['over_adamw']:.2f}×" in words
        most = max(cell["over_adamw"] for cell in fitting)
        assert f"{title} {most:.2f}×" in frame.caption
        assert len(frame.caption.split()) <= 14


def test_what_has_no_room_for_its_buffers_is_hollow(worlds: dict[str, Any], frames: dict[str, Frame]) -> None:
    for (model, frame), (name, title) in product(frames.items(), NAMES.items()):
        without = [cell for cell in here(worlds, model, name) if cell["tp"] and not cell["has_room"]]
        rings = drawn(frame, "hollow-")[title]
        assert points(rings) == [(cell["ranks"], cell["over_adamw"]) for cell in without]
        _, told = frame.alt.split(f"{title} on ", 1)
        assert told.split("; ")[0].count("without room") == len(without)
    assert any(len(points(rings)) for frame in frames.values() for rings in drawn(frame, "hollow-").values())


def test_a_band_reaches_as_far_to_either_side_as_a_plan_may_be_off(frames: dict[str, Frame]) -> None:
    for frame in frames.values():
        long = {title for title, line in drawn(frame, "curve-").items() if np.max(line.get_ydata()) >= TWICE}
        assert set(bands(frame)) == {"bucketed"} | long
        for title, corners in bands(frame).items():
            planned = points(drawn(frame, "curve-")[title])
            ends = [(ratio / (1 + ERROR), ratio / (1 - ERROR)) for _, ratio in planned]
            for (ranks, _), between in zip(planned, ends, strict=True):
                assert all(np.isclose(corners, (ranks, end)).all(axis=1).any() for end in between)
            assert ", ".join(f"{low:.2f}× to {high:.2f}×" for low, high in ends) in frame.alt


def test_the_title_names_who_takes_twice_as_long_and_whether_however_the_plan_errs(
    worlds: dict[str, Any], frames: dict[str, Frame]
) -> None:
    (unsure,) = frames_of_worlds(worlds, FABRIC, TOKENS, ("llama3_70b",), 0.4)
    assert "Llama 3 70B: bucketed may reach 2×" in texts(unsure.figure)
    assert "Llama 3 70B: bucketed passes 2×" in texts(frames["llama3_70b"].figure)
    assert "Llama 3 8B: no algorithm reaches 2×" in texts(frames["llama3_8b"].figure)
    assert "GPT-2: owner passes 2×" in texts(frames["gpt2"].figure)
    plot = frames["gpt2"].figure.axes[1]
    (dashes,) = (line for line in plot.lines if points(line) == [(0, TWICE), (1, TWICE)])
    assert dashes.get_linestyle() == "--"
    assert "twice: no gain left" in [text.get_text() for text in plot.texts]


def test_models_come_in_the_order_asked_for_on_one_scale(worlds: dict[str, Any]) -> None:
    models = ("llama3_70b", "gpt2", "moonlight")
    frames = frames_of_worlds(worlds, FABRIC, TOKENS, models, ERROR)
    assert [frame.alt.split(":")[0] for frame in frames] == ["Llama 3 70B", "GPT-2", "Moonlight"]
    views = [(frame.figure.axes[1].get_xlim(), frame.figure.axes[1].get_ylim()) for frame in frames]
    assert views == [views[0]] * 3
    (left, right), (low, high) = views[0]
    assert left < 16 < 4096 < right
    assert low < 1 < 2.72 / (1 - ERROR) < high


def test_every_fabric_and_batch_can_be_played_and_read(worlds: dict[str, Any]) -> None:
    others = {(FABRIC, cell["tokens"]) for cell in worlds["cells"]}
    for fabric, tokens in sorted(others | {(fabric, TOKENS) for fabric in worlds["assumptions"]["fabrics"]}):
        played = frames_of_worlds(worlds, fabric, tokens, SURVEYED, ERROR)
        assert player.html("worlds", played)
        for frame in played:
            assert_readable(frame.figure)


def test_what_was_not_surveyed_is_refused(worlds: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tokens is 5; the survey has 1048576, 4194304, 16777216"):
        frames_of_worlds(worlds, FABRIC, 5, SURVEYED, ERROR)
    with pytest.raises(ValueError, match="fabric is 'string'; the survey has nvlink_ethernet, "):
        frames_of_worlds(worlds, "string", TOKENS, SURVEYED, ERROR)
    with pytest.raises(ValueError, match="model is 'gpt5'; the survey has gpt2, "):
        frames_of_worlds(worlds, FABRIC, TOKENS, ("gpt2", "gpt5"), ERROR)
