"""Hills and towers: on one scale, on their grounds, the number at Muon's peak; and those of two published models."""

from collections.abc import Mapping
from typing import Any

import pytest
from figure_helpers import assert_readable, texts
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from muonbook.ch13.figure_hills import Peaks, frames_of_hills
from muonbook.ch13.memory_tables import (
    PLANNED,
    HillAndTower,
    PeakOfRank,
    beyond_adamw,
    hills_and_towers,
    hills_of_batches,
    weigh_updates,
)
from muonbook.figures import style
from muonbook.measure import results
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import WorldPlan, WorldSetting

GB = 1e9
LLAMAS = {"8B": (MODELS["llama3_8b"], Degrees(8)), "70B": (MODELS["llama3_70b"], Degrees(128, 8))}


def step(ground: float, hill: float, tower: float) -> HillAndTower:
    return HillAndTower(*(PeakOfRank(ground * GB, height * GB) for height in (hill, tower)))


WORLDS = {
    "high": {"AdamW": step(60, 8, 1), "owner": step(56, 8, 2), "flat": step(56, 8, 14)},
    "low": {"AdamW": step(50, 3, 1), "owner": step(49, 3, 3.7), "flat": step(49, 3, 4)},
}
SHOWN: Any = {"title": "High or not", "note": "Torn."}


def laid(worlds: Mapping[str, Peaks], layout: str = "owner") -> list[tuple[str, Peaks, str]]:
    """Return every world with one layout, as `frames_of_hills` takes them."""
    return [(name, peaks, layout) for name, peaks in worlds.items()]


def extent(figure: Figure, gid: str) -> Bbox:
    """Return where a silhouette is on the card, in points, y downwards."""
    (patch,) = (patch for patch in figure.axes[0].patches if patch.get_gid() == gid)
    return patch.get_path().transformed(patch.get_patch_transform()).get_extents()


def level(figure: Figure, world: str) -> float:
    """Return the height of the dashes at AdamW's peak, in points from the card's top."""
    (dashes,) = (line for line in figure.findobj(LineCollection) if line.get_gid() == f"level-{world}")
    return float(dashes.get_segments()[0][0][1])


def numbers(figure: Figure) -> list[Text]:
    return [text for text in figure.axes[0].texts if text.get_text()[0] in "+−0"]


# ---- Drawn ------------------------------------------------------------------------------------------------


def drawn(layout: str = "owner") -> dict[str, Figure]:
    return dict(zip(WORLDS, (frame.figure for frame in frames_of_hills(laid(WORLDS, layout), **SHOWN)), strict=True))


def test_all_worlds_have_one_scale_and_one_size_and_everything_stands_on_its_ground() -> None:
    figures = drawn()
    assert len({tuple(figure.get_size_inches()) for figure in figures.values()}) == 1
    gigabyte = extent(figures["high"], "hill-high-AdamW").height / 8
    floors = []
    for world, peaks in WORLDS.items():
        figure, muon, adamw = figures[world], peaks["owner"], peaks["AdamW"]
        grounds = {who: extent(figure, f"ground-{world}-{who}") for who in ("AdamW", "Muon")}
        saved = adamw.hill.ground - muon.hill.ground
        assert grounds["Muon"].y0 - grounds["AdamW"].y0 == pytest.approx(saved / GB * gigabyte)
        assert grounds["Muon"].y1 == pytest.approx(grounds["AdamW"].y1)
        floors.append(grounds["Muon"].y1)
        shapes = {f"hill-{world}-{who}": (who, peaks["AdamW"].hill) for who in grounds}
        shapes[f"tower-{world}"] = "Muon", muon.tower
        for gid, (who, peak) in shapes.items():
            shape = extent(figure, gid)
            assert shape.height == pytest.approx(peak.height / GB * gigabyte)
            assert shape.y1 == pytest.approx(grounds[who].y0)
            assert grounds[who].x0 < shape.x0 < shape.x1 < grounds[who].x1
        assert level(figure, world) == pytest.approx(extent(figure, f"hill-{world}-AdamW").y0)
        assert extent(figure, f"hill-{world}-Muon").x1 < extent(figure, f"tower-{world}").x0
    assert floors[0] == pytest.approx(floors[1])


def test_where_the_rank_of_the_tower_keeps_less_the_tower_stands_lower() -> None:
    muon = step(56, 8, 2)._replace(tower=PeakOfRank(54 * GB, 2 * GB))
    (frame,) = frames_of_hills([("high", WORLDS["high"] | {"owner": muon}, "owner")], **SHOWN)
    hill, tower = (extent(frame.figure, gid) for gid in ("hill-high-Muon", "tower-high"))
    assert tower.y1 - hill.y1 == pytest.approx(2 * hill.height / 8)


@pytest.mark.parametrize(("layout", "signed"), [("owner", ["−4.0 GB", "−0.3 GB"]), ("flat", ["+2.0 GB", "0.0 GB"])])
def test_the_number_stands_at_muons_peak_and_never_across_the_dashes(layout: str, signed: list[str]) -> None:
    colours = {}
    for (world, figure), words in zip(drawn(layout).items(), signed, strict=True):
        (number,), muon = numbers(figure), WORLDS[world][layout]
        assert number.get_text() == words
        x, head = number.get_position()
        peak = extent(figure, f"hill-{world}-Muon" if muon.highest is muon.hill else f"tower-{world}")
        assert peak.x0 < x < peak.x1
        foot, dashes = head + float(number.get_fontsize()), level(figure, world)
        if words == "−4.0 GB":  # there is room between
            assert dashes < head < foot < peak.y0
        else:
            assert foot < min(dashes, peak.y0)
        colours[words[0]] = number.get_color()
    assert colours.pop("+", None) not in colours.values()


def test_every_silhouette_has_its_size_and_the_dashes_theirs() -> None:
    told = [text for figure in drawn().values() for text in texts(figure)]
    sizes = [text for text in told if text.endswith("0 GB") and text[0] in "2378"]
    assert sizes == ["8.00 GB", "8.00 GB", "2.00 GB", "3.00 GB", "3.00 GB", "3.70 GB"]
    assert [text for text in told if "ground" in text and "less" not in text] == ["ground: 60 GB", "ground: 50 GB"]
    assert [text for text in told if "less" in text] == ["ground: 4.00 GB less", "ground: 1.00 GB less"]
    assert [text for text in told if "peak" in text] == ["AdamW's peak, 68 GB", "AdamW's peak, 53 GB"]
    assert told.count("Muon, owner") == 2


def test_a_hill_too_low_for_its_size_has_none() -> None:
    low = {"AdamW": step(50, 0.5, 0.1), "owner": step(49, 0.5, 0.7)}
    _, frame = frames_of_hills(laid(WORLDS | {"low": low}), **SHOWN)
    assert "0.50 GB" not in texts(frame.figure)
    assert "a hill of 0.50 GB" in frame.alt


def test_caption_and_alt_text_have_every_number_and_its_side() -> None:
    high, low = frames_of_hills(laid(WORLDS), **SHOWN)
    assert high.caption == "high: Muon's peak is its hill, 4.0 GB below AdamW's."
    assert high.alt == (
        "High or not. high: AdamW keeps 60 GB, and its hill of 8.00 GB makes a peak of 68 GB. Muon, owner, keeps "
        "4.00 GB less; on that stand a hill of 8.00 GB and a tower of 2.00 GB, the higher of them 4.0 GB below "
        "AdamW's peak."
    )
    assert low.alt.endswith("a hill of 3.00 GB and a tower of 3.70 GB, the higher of them 0.3 GB below AdamW's peak.")
    high, low = frames_of_hills(laid(WORLDS, "flat"))
    assert "the higher of them 2.0 GB above AdamW's peak" in high.alt
    assert "the higher of them as high as AdamW's peak" in low.alt
    assert low.caption == "low: Muon's peak is its tower, as high as AdamW's."


def test_a_world_may_stand_twice_each_time_with_another_layout() -> None:
    first, second = frames_of_hills([("high", WORLDS["high"], layout) for layout in ("flat", "owner")])
    for frame, layout in ((first, "flat"), (second, "owner")):
        assert "high: AdamW keeps" in frame.alt
        assert f"Muon, {layout}, keeps" in frame.alt
    assert "Muon, owner" in texts(second.figure)


def test_without_a_world_there_is_no_picture() -> None:
    with pytest.raises(ValueError, match="here is none"):
        frames_of_hills([], **SHOWN)


# ---- Planned ----------------------------------------------------------------------------------------------


def beyond(model: str, degrees: Degrees) -> dict[str, float]:
    """Return {column of PLANNED: bytes by which Muon's peak is higher than AdamW's}."""
    found = hills_and_towers(MODELS[model], degrees)
    return {column: found[column].highest.top - found["AdamW"].highest.top for column in PLANNED}


def test_more_ranks_save_less_until_a_buckets_tower_passes_adamws_peak() -> None:
    worlds = {f"{dp} x 8": hills_and_towers(MODELS["llama3_70b"], Degrees(dp, 8)) for dp in (16, 64, 128)}
    for layout, signed, of_64 in (
        ("bucketed", ["−1.9 GB", "+0.3 GB", "+0.5 GB"], "0.54 GB less"),  # on the tower's rank, which is the fullest
        ("matrix by matrix", ["−2.1 GB", "−0.5 GB", "−0.2 GB"], "0.53 GB less"),
    ):
        frames = frames_of_hills(laid({"8B": hills_and_towers(*LLAMAS["8B"]), **worlds}, layout), **SHOWN)
        for frame in frames:
            style.require_readable(frame.figure, frame.alt)
            assert_readable(frame.figure)
        found = [words for frame in frames for words in texts(frame.figure) if words[0] in "+−"]
        assert found == ["−3.5 GB", *signed]
        told = ("3.49 GB less", "2.14 GB less", of_64, "0.27 GB less")
        assert all(less in frame.alt for less, frame in zip(told, frames, strict=True))
    assert all("a hill of 2.15 GB and a tower of 2.21 GB" in frame.alt for frame in frames[1:])  # matrix by matrix


def test_where_the_tower_is_the_peak_both_stand_on_its_rank_s_ground() -> None:
    found = hills_and_towers(*LLAMAS["8B"])
    assert found["flat"].highest is found["flat"].tower
    assert found["flat"].hill.ground == found["flat"].tower.ground < found["AdamW"].hill.ground - 4 * GB
    assert found["flat + cut"].highest is found["flat + cut"].hill
    assert found["flat + cut"].hill.ground > found["flat + cut"].tower.ground  # it holds embeddings, which stay AdamW's


def test_as_dp_grows_every_layout_but_one_passes_adamw_s_peak_sooner_or_later() -> None:
    worlds = {dp: hills_and_towers(MODELS["llama3_70b"], Degrees(dp, 8)) for dp in (8, 16, 32, 64, 128)}
    curves = beyond_adamw(worlds, list(PLANNED))
    assert all(ranks == list(worlds) for ranks, _ in curves.values())
    above = {layout: [dp for dp, size in zip(*curve, strict=True) if size > 0] for layout, curve in curves.items()}
    assert above == {
        "matrix by matrix": [], "bucketed": [64, 128], "flat": list(worlds), "flat + cut": [64, 128],
        "owner": [32, 64, 128],  # padding, of weights and gradients, is more than a moment saves
    }  # fmt: skip
    of = worlds[64]
    assert curves["bucketed"][1][3] == (of["bucketed"].highest.top - of["AdamW"].highest.top) / GB


@pytest.mark.parametrize("name", LLAMAS)
def test_peaks_and_savings_are_those_of_the_other_tables(name: str) -> None:
    found = hills_and_towers(*LLAMAS[name])
    saved, borrowed = weigh_updates(*LLAMAS[name])
    assert found["AdamW"].highest is found["AdamW"].hill
    muon = found["matrix by matrix"]
    assert muon.tower.height == pytest.approx(borrowed["matrix by matrix"], rel=1e-6)  # and a few bytes of padding
    assert muon.hill.height == found["AdamW"].hill.height
    assert found["AdamW"].hill.ground - muon.hill.ground == pytest.approx(saved, rel=1e-5)


def test_peaks_are_those_that_the_planner_has() -> None:
    """Where the passes hide both updates; the planner counts AdamW's step counters, too."""
    model, degrees = LLAMAS["8B"]
    adamw, muon = (
        WorldPlan(WorldSetting(model, degrees, optimizer, "gather_all", "megatron", recompute=True))
        for optimizer in ("adamw", "muon")
    )
    assert "while stepping" not in {**adamw.held_at_worst, **muon.held_at_worst}
    assert hills_and_towers(model, degrees)["AdamW"].highest.top == adamw.fullest[2]
    assert beyond("llama3_8b", degrees)["bucketed"] == pytest.approx(muon.fullest[2] - adamw.fullest[2], rel=1e-6)


@pytest.mark.parametrize(("model", "degrees"), [("llama3_8b", Degrees(8)), ("llama3_70b", Degrees(128, 8))])
def test_the_more_an_update_borrows_the_less_is_saved(model: str, degrees: Degrees) -> None:
    """In layouts of which every rank keeps as much; nobody's fullest rank saves more than ranks do on average."""
    saved, updates = weigh_updates(MODELS[model], degrees)
    higher = beyond(model, degrees)
    counters = 4 * len(MODELS[model].specs(degrees.tp)[0])  # AdamW's steps
    assert all(size >= -saved - counters for size in higher.values())
    alike = sorted(("matrix by matrix", "bucketed"), key=updates.__getitem__)
    assert [higher[name] for name in alike] == sorted(higher[name] for name in alike)


def test_a_flat_shard_without_matrices_saves_nothing() -> None:
    """The embeddings and the head of the 8B fill one of eight shards."""
    higher, saved = beyond("llama3_8b", Degrees(8)), weigh_updates(*LLAMAS["8B"])[0]
    assert abs(higher["flat + cut"]) < 0.001 * saved
    assert higher["bucketed"] == pytest.approx(-saved, rel=1e-3)


def test_above_the_passes_peaks_differ_by_what_updates_borrow() -> None:
    (_, updates), higher = weigh_updates(*LLAMAS["70B"]), beyond("llama3_70b", Degrees(128, 8))
    more = higher["bucketed"] - higher["matrix by matrix"]
    assert more == pytest.approx(updates["bucketed"] - updates["matrix by matrix"], rel=0.01)


@pytest.mark.parametrize(
    ("model", "degrees", "words"),
    [("llama3_8b", Degrees(4, pp=2), "not of PP 2, EP 1"), ("gpt2", Degrees(4), "GPT-2: AdamW's update may borrow")],
)
def test_where_the_passes_are_not_one_ranks_peak_there_is_no_answer(model: str, degrees: Degrees, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hills_and_towers(MODELS[model], degrees)


# ---- As tokens grow ---------------------------------------------------------------------------------------


def test_with_more_tokens_the_hill_rises_past_the_tower() -> None:
    batches = hills_of_batches(results.load("memory"))
    frames = frames_of_hills([(f"{tokens} tokens", peaks, "flat") for tokens, peaks in batches.items()])
    captions = [frame.caption for frame in frames]
    assert "its tower, 9.7 MB above" in captions[0]
    assert all("its hill, 3.2 MB below" in caption for caption in captions[1:])
    towers = {peaks["flat"].tower for peaks in batches.values()}
    assert len(towers) == 1  # tokens do not touch it
    hills = [peaks["flat"].hill.height for peaks in batches.values()]
    assert hills == sorted(hills)
    for frame in frames:
        assert_readable(frame.figure)
