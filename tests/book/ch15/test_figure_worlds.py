"""The planned worlds in frames: every ratio a bar on one scale, and captions that say who takes twice as long."""

from typing import Any

import pytest
from figure_helpers import assert_readable, boxes, texts

from muonbook.ch15.worlds.figure_worlds import NAMES, TWICE, frames_of_worlds
from muonbook.ch15.worlds.world_tables import rows
from muonbook.figures import player
from muonbook.measure import results

FABRIC, TOKENS = "nvlink_infiniband", 1 << 22
SHOWN = [("llama3_70b", 64), ("llama3_70b", 1024), ("gpt2", 4096)]


@pytest.fixture(scope="module")
def worlds() -> dict[str, Any]:
    return results.load("worlds")


def here(worlds: dict[str, Any], model: str, ranks: int) -> dict[str, dict[str, Any]]:
    cells = rows(worlds["cells"], fabric=FABRIC, tokens=TOKENS, model=model, ranks=ranks)
    return {NAMES[cell["algorithm"]]: cell for cell in cells if cell["algorithm"] in NAMES}


def test_every_ratio_is_a_bar_on_one_scale_and_told(worlds: dict[str, Any]) -> None:
    scales = set()
    for (model, ranks), frame in zip(SHOWN, frames_of_worlds(worlds, FABRIC, TOKENS, SHOWN), strict=True):
        title = f"{worlds['models'][model]['title']} on {ranks:,} ranks"
        assert title in texts(frame.figure)
        assert frame.alt.startswith(title)
        for name, cell in here(worlds, model, ranks).items():
            (bar,) = boxes(frame.figure, f"bar-{name}-")
            scales.add(round(bar.get_width() / cell["over_adamw"], 6))
            assert f"{name}: {cell['over_adamw']:.3g} ×" in frame.alt
        assert_readable(frame.figure)
    assert len(scales) == 1


def test_captions_name_who_takes_twice_as_long_and_who_has_no_room(worlds: dict[str, Any]) -> None:
    captions = [frame.caption for frame in frames_of_worlds(worlds, FABRIC, TOKENS, SHOWN)]
    assert captions[1:] == ["Twice as long or longer: bucketed.", "Twice as long or longer: owner."]
    tight = [name for name, cell in here(worlds, *SHOWN[0]).items() if not cell["has_room"]]
    assert captions[0] == f"Twice as long or longer: none. Too full for 80 GB while it updates: {', '.join(tight)}."
    assert tight
    for (model, ranks), caption in zip(SHOWN, captions, strict=True):
        long = {name for name, cell in here(worlds, model, ranks).items() if cell["over_adamw"] >= TWICE}
        assert all((name in caption.split(".")[0].removeprefix("Twice as long or longer: ")) for name in long)


def test_every_fabric_and_batch_can_be_played(worlds: dict[str, Any]) -> None:
    others = {(cell["fabric"], cell["tokens"]) for cell in worlds["cells"]}
    for fabric, tokens in sorted(others):
        fitting = rows(worlds["cells"], fabric=fabric, tokens=tokens, algorithm="bucketed")
        shown = [(cell["model"], cell["ranks"]) for cell in fitting if cell["tp"]][:3]
        assert player.html("worlds", frames_of_worlds(worlds, fabric, tokens, shown))


def test_what_was_not_surveyed_or_does_not_fit_is_refused(worlds: dict[str, Any]) -> None:
    for words, fabric, tokens, shown in (
        ("tokens is 5; the survey has 1048576, 4194304, 16777216", FABRIC, 5, SHOWN),
        ("fabric is 'string'; the survey has nvlink_ethernet, ", "string", TOKENS, SHOWN),
        ("model is 'gpt5'; the survey has gpt2, ", FABRIC, TOKENS, [("gpt5", 16)]),
        ("ranks is 17; the survey has 16, 32, ", FABRIC, TOKENS, [("gpt2", 17)]),
        ("Llama 3 70B on 16 ranks: no room.", FABRIC, TOKENS, [("llama3_70b", 16)]),
    ):
        with pytest.raises(ValueError, match=words):
            frames_of_worlds(worlds, fabric, tokens, shown)
