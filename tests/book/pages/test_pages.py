"""The pages of prose: their pictures are those that the code draws today, and the words under them too."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image, ImageChops

from muonbook.figures import style
from tools import draw_pages, journey

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def titles() -> dict[int, str]:
    return draw_pages.chapter_titles(ROOT / "notebooks")


def test_the_journey_is_the_one_that_the_chapters_make_today(titles: dict[int, str], tmp_path: Path) -> None:
    alt = journey.describe_journey(titles)
    index = (ROOT / "book" / "index.md").read_text(encoding="utf-8")
    assert f"![{alt}](figures/journey.png)" in index, (
        "copy the alt text that `make notebooks` prints into book/index.md"
    )
    fresh = style.save(journey.draw_journey(titles), tmp_path / "journey.png", alt)
    with Image.open(ROOT / "book" / "figures" / "journey.png") as stored, Image.open(fresh) as drawn:
        assert stored.info["Description"] == alt
        difference = ImageChops.difference(
            *(image.convert("RGBA").convert("RGB") for image in (stored, drawn))
        ).convert("L")
        assert sum(difference.histogram()[64:]) < 100, "run `make notebooks`: the stored picture is another one"


def test_every_chapter_has_its_stop_and_its_icon(titles: dict[int, str]) -> None:
    stops = [number for questions in journey.STOPS.values() for number in questions]
    assert set(titles) <= set(stops)
    assert set(stops) == set(journey.ICONS)


def test_a_chapter_without_a_number_in_its_heading_is_refused(tmp_path: Path) -> None:
    (tmp_path / "12_bytes.ipynb").write_text(json.dumps({"cells": [{"source": ["# Count the bytes\n"]}]}))
    with pytest.raises(ValueError, match=re.escape("12_bytes.ipynb does not begin with a heading like")):
        draw_pages.chapter_titles(tmp_path)


def test_links_between_pages_and_chapters_name_the_right_numbers() -> None:
    for path in (ROOT / "book").glob("*.md"):
        for number, file in re.findall(r"\[(\d+)\]\(\.\./notebooks/(\d\d)_", path.read_text(encoding="utf-8")):
            assert int(number) == int(file), path.name
