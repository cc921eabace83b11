"""The planned worlds, model by model: every ratio a point on one scale, captions say who stays close to AdamW."""

from typing import Any

import pytest
from figure_helpers import assert_readable, curves, texts

from muonbook.ch15.worlds.figure_worlds import LITTLE, NAMES, frames_of_worlds
from muonbook.ch15.worlds.world_tables import rows
from muonbook.figures import player
from muonbook.measure import results

FABRIC, TOKENS = "nvlink_infiniband", 1 << 22
MODELS = ["gpt2", "llama3_70b", "gpt3_175b"]


@pytest.fixture(scope="module")
def worlds() -> dict[str, Any]:
    return results.load("worlds")


def over_adamw(worlds: dict[str, Any], model: str, name: str) -> dict[int, float]:
    cells = rows(worlds["cells"], fabric=FABRIC, tokens=TOKENS, model=model, algorithm=name)
    return {cell["ranks"]: cell["over_adamw"] for cell in cells if cell["tp"]}


def test_every_ratio_is_a_point_on_one_scale_and_the_ends_are_told(worlds: dict[str, Any]) -> None:
    scales = set()
    for model, frame in zip(MODELS, frames_of_worlds(worlds, FABRIC, TOKENS, MODELS), strict=True):
        title = worlds["models"][model]["title"]
        assert title in texts(frame.figure)
        assert frame.alt.startswith(title)
        for name, called in NAMES.items():
            line = curves(frame.figure)[called]
            over = over_adamw(worlds, model, name)
            assert line.get_xydata().tolist() == [[ranks, over[ranks]] for ranks in sorted(over)]  # type: ignore[union-attr]
            scales.add((frame.figure.axes[1].get_xlim(), frame.figure.axes[1].get_ylim()))
        assert_readable(frame.figure)
    assert len(scales) == 1


def test_captions_say_up_to_how_many_ranks_an_algorithm_stays_close(worlds: dict[str, Any]) -> None:
    for model, frame in zip(MODELS, frames_of_worlds(worlds, FABRIC, TOKENS, MODELS), strict=True):
        told = frame.caption.removeprefix("At most a tenth longer, up to so many ranks: ").removesuffix(".")
        said = {name: int(ranks.replace(",", "")) for name, ranks in (one.rsplit(" ", 1) for one in told.split(", "))}
        for name, called in NAMES.items():
            over = over_adamw(worlds, model, name)
            close = [ranks for ranks in over if all(round(over[n], 2) <= LITTLE for n in over if n <= ranks)]
            assert said.get(called, 0) == max(close, default=0)
    assert told == "owner 4,096"


def test_every_fabric_and_batch_can_be_played(worlds: dict[str, Any]) -> None:
    for fabric, tokens in sorted({(cell["fabric"], cell["tokens"]) for cell in worlds["cells"]}):
        assert player.html("worlds", frames_of_worlds(worlds, fabric, tokens, list(worlds["models"])))


def test_what_was_not_surveyed_is_refused(worlds: dict[str, Any]) -> None:
    for words, fabric, tokens, models in (
        ("tokens is 5; the survey has 1048576, 4194304, 16777216", FABRIC, 5, MODELS),
        ("fabric is 'string'; the survey has nvlink_ethernet, ", "string", TOKENS, MODELS),
        ("model is 'gpt5'; the survey has gpt2, ", FABRIC, TOKENS, ["gpt5"]),
    ):
        with pytest.raises(ValueError, match=words):
            frames_of_worlds(worlds, fabric, tokens, models)
