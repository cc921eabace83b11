"""The pages of prose: their pictures are those that the code draws today, and the words under them too."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image, ImageChops
from sphinx.search.en import SearchEnglish

from muonbook.figures import style
from tools import draw_pages
from tools.pages import journey, moving, prices

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


# --- Seven ways to cut ---


def test_pictures_of_pages_are_drawn_as_the_code_draws_them_today(tmp_path: Path) -> None:
    stored, drawn = ROOT / "book" / "figures", draw_pages.draw(tmp_path)
    for name in ("seven_cuts.html", "nine_moves.html"):
        written = [(folder / name).read_text(encoding="utf-8") for folder in (stored, tmp_path)]
        assert written[0] == written[1], f"run `make notebooks`: the stored {name} is another one"
    for name, shown_on in (("cut_prices.png", "seven_cuts.md"), ("marks.png", "notation.md")):
        page = (ROOT / "book" / shown_on).read_text(encoding="utf-8")
        assert f"![{drawn[name]}](figures/{name})" in page, f"copy the alt text of {name} into book/{shown_on}"
        with Image.open(stored / name) as image:
            assert image.info["Description"] == drawn[name]


@pytest.mark.parametrize(
    "cut", [cut for cut in moving.CUTS if cut.name not in ("DP", "CP", "EP")], ids=lambda cut: cut.name
)
def test_a_cut_of_momentum_leaves_every_element_with_one_rank(cut: moving.Cut) -> None:
    held = [
        (piece.part, row, column)
        for rank in moving.EVERYTHING
        for piece in cut.kept[2](rank)
        if piece.part is not moving.NORMS  # which TP replicates
        for row in piece.rows
        for column in piece.columns
    ]
    assert len(held) == len(set(held)) == 256


def test_what_the_cuts_cost_is_what_a_ring_and_the_map_say() -> None:
    costs = {cut.name: max(moving.sent(cut, rank) for rank in moving.EVERYTHING) for cut in moving.CUTS}
    bucket, matrices = 256 + 32, 256  # of 4 ranks, each sends three quarters of what is gathered
    assert costs == dict.fromkeys(costs, 0) | {
        "ZeRO-1": bucket * 3 // 4,
        "ZeRO-2": bucket * 3 // 4,
        "ZeRO-3, as FSDP2": matrices * 3 // 4,
        "TP": matrices * 3 // 4,
    }
    by_stage = next(cut for cut in moving.CUTS if cut.name == "PP")
    assert sum(moving.work(by_stage, rank) for rank in moving.EVERYTHING) == 1


def test_the_bill_says_what_the_page_says_of_it() -> None:
    bill = prices.prices()
    alone, zero1, fsdp2, tp, pp, ep, cp = bill.values()
    assert len(bill) == 7
    assert all(60 < alone.kept / one.kept * (1.25 if one is pp else 1) < 68 for one in (zero1, fsdp2, tp, pp, ep, cp))
    assert max(pp.sent, ep.sent) < zero1.sent / 6
    assert max(pp.flops, ep.flops) < zero1.flops / 2
    assert tp.sent < zero1.sent / 4
    assert tp.flops > zero1.flops
    assert cp == zero1
    assert fsdp2.flops == alone.flops
    blocks = [sum(prices.in_stage(stage, f"blocks.{n}.out") for n in range(27)) for stage in range(8)]
    assert sorted(blocks) == [3, 3, 3, 3, 3, 4, 4, 4]


# --- Names ---

# what a reader of the originals types; each leads to a page, and the names of other code to the page of names
TYPED = """
    dist_group; tp_group; tensor_model_parallel; partition_dim; param_to_bucket; zeropower_via_newtonschulz5;
    _zeropower_via_newtonschulz; all_gather_into_tensor; reduce_scatter_tensor; MuonW; MuonWithAuxAdam; use_muon;
    MoE; mixture of experts; mixture-of-experts; PolarExpress; Polar Express; polar_express; bucket; buffer; shard;
    dist_meta; dist_metas; MuonDistMeta; global buffer; global_buffer_sizes; virtual map; virtual buffer; ns_steps;
    backend_steps; ns_coefficients; matched_adamw_rms; match_rms_adamw; matched adamw rms; adjust_lr_fn;
    normalize_range; enable_distributed_mode; buffer_idx; bucket_idx; muon_buffer; momentum_buffer; coalesced;
    distributed optimizer; fully_shard; FSDP2; reshard_after_forward; DeviceMesh; tp_split_dim; owned;
    LayerWiseDistributedOptimizer; muon_tp_mode; duplicated; blockwise; distributed_mesh; dion; DeepSpeed;
    reduce_bucket_size; expert parallelism; pipeline parallelism; context parallelism; expert_tp; aisles; pallets;
    Turtle Speed; No-BS glossary; MomentUm Orthogonalized by Newton-Schulz; gbuf; pad_batch; HSDP
"""


def test_whatever_a_reader_of_the_originals_types_leads_to_the_page_of_names(site: Path) -> None:
    written = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(written.removeprefix("Search.setIndex(").removesuffix(")"))
    language = SearchEnglish({})

    def pages(query: str) -> set[str]:
        """Return the pages with all words of a query, as Sphinx's search finds them: stemmed, without stopwords."""
        words = [word.lower() for word in re.split(r"\W+", query) if word and word.lower() not in language.stopwords]
        hits = []
        for word in map(language.stem, words):
            listed = [index[kind].get(word, []) for kind in ("terms", "titleterms")]
            hits.append({page for one in listed for page in (one if isinstance(one, list) else [one])})
        return {index["docnames"][page] for page in set.intersection(*hits)}

    queries = " ".join(TYPED.split()).split("; ")
    assert [typed for typed in queries if "book/names" not in pages(typed)] == []
