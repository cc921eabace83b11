"""The planned worlds in frames: every ratio is written, bars are as long as it says, and a phone can read them."""

from typing import Any

import pytest
from figure_helpers import assert_readable, boxes, texts
from matplotlib.colors import to_hex

from muonbook.ch15.figure_worlds import NAMES, frames_of_worlds
from muonbook.figures import player
from muonbook.measure import results
from muonbook.planner.model_shapes import SURVEYED

FABRIC, TOKENS = "nvlink_infiniband", 1 << 22


@pytest.fixture(scope="module")
def worlds() -> dict[str, Any]:
    return results.load("worlds")


def here(worlds: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    cells = (cell for cell in worlds["cells"] if (cell["fabric"], cell["tokens"]) == (FABRIC, TOKENS))
    return [cell for cell in cells if cell["ranks"] == ranks and cell["algorithm"] in NAMES]


def test_every_number_of_ranks_is_a_frame_with_every_ratio_in_it_and_in_its_words(worlds: dict[str, Any]) -> None:
    frames, sizes = frames_of_worlds(worlds, FABRIC, TOKENS, SURVEYED), sorted({c["ranks"] for c in worlds["cells"]})
    assert player.html("worlds", frames)
    for ranks, frame in zip(sizes, frames, strict=True):
        assert f"On {ranks:,} ranks" in frame.alt
        for cell in here(worlds, ranks):
            ratio = f"{cell['over_adamw']:.2f}×" if cell["tp"] else cell["why"]
            assert ratio in texts(frame.figure)
            assert ratio in frame.alt
        assert_readable(frame.figure)


def test_only_the_models_that_were_asked_for_are_drawn_from_the_fewest_ranks_on(worlds: dict[str, Any]) -> None:
    frames = frames_of_worlds(worlds, FABRIC, TOKENS, ("moonlight", "gpt2"), fewest=512)
    assert [frame.alt.split(" ranks")[0] for frame in frames] == ["On 512", "On 1,024", "On 4,096"]
    for frame in frames:
        assert frame.alt.index("Moonlight") < frame.alt.index("GPT-2")
        assert "Llama" not in frame.alt + " ".join(texts(frame.figure))


def test_a_longer_step_has_a_longer_bar_and_one_without_room_is_hollow(worlds: dict[str, Any]) -> None:
    frame = frames_of_worlds(worlds, FABRIC, TOKENS, SURVEYED)[-2]
    cells = {(cell["algorithm"], cell["model"]): cell for cell in here(worlds, 1024)}
    bars = {gid: bar for name in NAMES for bar in boxes(frame.figure, f"{name}-") if (gid := bar.get_gid())}
    drawn = {place: bars["-".join(place)] for place in cells}
    by_ratio = sorted(drawn, key=lambda place: cells[place]["over_adamw"])
    widths = [drawn[place].get_width() for place in by_ratio]
    assert widths == sorted(widths)
    for place, bar in drawn.items():
        filled = to_hex(bar.get_facecolor()) == to_hex(bar.get_edgecolor())
        assert filled == cells[place]["has_room"]
    assert "without room" in frame.alt


def test_what_was_not_surveyed_is_refused(worlds: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tokens is 5; the survey has 1048576, 4194304, 16777216"):
        frames_of_worlds(worlds, FABRIC, 5, SURVEYED)
    with pytest.raises(ValueError, match="fabric is 'string'; the survey has nvlink_ethernet, "):
        frames_of_worlds(worlds, "string", TOKENS, SURVEYED)
