"""The book as a reader gets it: it builds without a warning or a network, and its pages hold together on their own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import built_book
import pytest
import yaml
from built_book import ROOT, Page, read_pages
from PIL import Image

from tools import set_address


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return read_pages(site)


@pytest.fixture(scope="module")
def chapter(sample: Path) -> str:
    """The text of the small book's one chapter."""
    return (sample / "notebooks" / "07_virtual_map.html").read_text(encoding="utf-8")


def linked(text: str) -> list[tuple[str, str]]:
    """Return (anchor in the glossary, words) of every link with a card, in order."""
    return re.findall(r'<a class="glossary-term[^>]*#term-([^"]*)">(.*?)</a>', text)


def test_the_book_builds_strictly_and_has_every_page_of_its_contents(site: Path) -> None:
    entries = re.findall(r"(?:root|file): (\S+)", (ROOT / "_toc.yml").read_text(encoding="utf-8"))
    assert "book/index" in entries
    for entry in entries:
        assert (site / f"{entry}.html").is_file(), entry
    assert "book/index.html" in (site / "index.html").read_text(encoding="utf-8"), "the bare address leads to page one"


def test_a_page_loads_nothing_from_another_machine(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert [load for load in page.loads if urlsplit(load).netloc] == [], path


def test_everything_a_page_loads_or_links_to_inside_the_book_exists(site: Path, pages: dict[Path, Page]) -> None:
    checked = 0
    for path, page in pages.items():
        for target in page.links + page.loads:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            file = (path.parent / unquote(url.path)).resolve() if url.path else path
            assert file.is_file(), f"{path.relative_to(site)} points at {target}"
            if url.fragment and file in pages:
                assert unquote(url.fragment) in pages[file].ids, f"{path.relative_to(site)} points at {target}"
            checked += 1
    assert checked > 50


def test_every_stored_trace_can_be_downloaded_from_its_chapter(site: Path, pages: dict[Path, Page]) -> None:
    page = site / "notebooks" / "14_traces.html"
    offered = {Path(link).name: (page.parent / link).read_bytes() for link in pages[page].links if "_downloads" in link}
    stored = (ROOT / "book" / "results").glob("*.json.gz")
    assert offered == {path.name: path.read_bytes() for path in stored}


def test_every_image_says_in_words_what_it_shows(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for image in page.images:
            alt = (image.get("alt") or "").strip()
            assert alt, path
            assert not re.search(r"\.(png|svg)$|^<", alt), f"{path}: {alt} is a file or an object, not a description"


def test_every_page_introduces_itself_to_those_who_link_to_it(site: Path, pages: dict[Path, Page]) -> None:
    address = built_book.published()
    entries = re.findall(r"(?:root|file): (\S+)", (ROOT / "_toc.yml").read_text(encoding="utf-8"))
    for entry in entries:
        meta = pages[site / f"{entry}.html"].meta
        assert meta["og:url"] == f"{address}{entry}.html"
        assert meta["og:site_name"] == "Muon at Scale"
        assert 20 < len(meta["og:description"]) <= 240, entry
        assert meta["description"] == meta["og:description"]
        assert "Colab" not in meta["og:description"][:20], "a page opens with a sentence, not with a button"
        assert meta["twitter:card"] == "summary_large_image"
        assert (site / meta["og:image"].removeprefix(address)).is_file(), entry
        assert len(meta["og:image:alt"]) > 20


def test_the_bare_address_leads_to_page_one_and_introduces_the_book(site: Path) -> None:
    address, root = built_book.published(), Page(site / "index.html")
    text = (site / "index.html").read_text(encoding="utf-8")
    assert "<title>Muon at Scale</title>" in text
    assert re.findall(r'http-equiv="refresh" content="0; url=(.*?)"', text) == ["book/index.html"]
    assert root.links == ["book/index.html"], "for those whose browser does not go there by itself"
    first = Page(site / "book" / "index.html").meta
    assert root.meta["description"] == root.meta["og:description"] == first["description"]
    assert (root.meta["og:title"], root.meta["og:url"]) == ("Muon at Scale", address)
    assert root.meta["og:image"] == f"{address}_static/social_card.png"
    card = ROOT / "book" / "figures" / "social_card.png"
    assert (site / "_static" / card.name).read_bytes() == card.read_bytes()
    with Image.open(card) as image:
        assert image.size == (1200, 630), "what those who show a link show whole"
        assert root.meta["og:image:alt"] == image.info["Description"]


def test_a_chapters_buttons_open_what_its_own_link_opens(sample: Path) -> None:
    links = [link for link in Page(sample / "notebooks" / "07_virtual_map.html").links if "colab" in link]
    here = set_address.current(ROOT)
    assert links == (1 + (here.host == set_address.GITHUB)) * [
        here.colab("notebooks/07_virtual_map.ipynb", "published")
    ]


def test_a_page_has_a_button_that_edits_it(sample: Path) -> None:
    here = set_address.current(ROOT)
    links = Page(sample / "book" / "glossary.html").links
    assert (f"{here.url}/edit/main/book/glossary.md" in links) == (here.host == set_address.GITHUB)


@pytest.mark.parametrize(
    ("word", "meant", "elsewhere"),
    [
        ("trace", ("book/claims", "notebooks/14_traces"), ("notebooks/01_why_orthogonalize",)),
        ("gap", ("notebooks/04_does_it_learn",), ("notebooks/06_zero1", "notebooks/15_regimes", "book/claims")),
        ("span", ("notebooks/14_traces",), ("notebooks/15_regimes",)),
        ("waiting", ("notebooks/14_traces",), ("notebooks/15_regimes",)),
        ("buffer", ("notebooks/07_virtual_map",), ("notebooks/03_muon", "notebooks/13_memory", "notebooks/14_traces")),
        ("piece", ("notebooks/08_muon_over_dp",), ("notebooks/09_tensor_parallel", "notebooks/15_regimes")),
    ],
)
def test_a_word_with_another_meaning_elsewhere_is_linked_only_where_it_is_meant(
    word: str, meant: tuple[str, ...], elsewhere: tuple[str, ...], site: Path
) -> None:
    pages = {name: (site / f"{name}.html").read_text(encoding="utf-8") for name in (*meant, *elsewhere)}
    assert [name for name, text in pages.items() if f'#term-{word}"' in text] == list(meant)


def test_no_word_is_linked_in_a_phrase_that_means_something_else(pages: dict[Path, Page]) -> None:
    phrases = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["sphinx"]["config"]["glossary_not_in"]
    seen = set()
    for path in pages:
        text = path.read_text(encoding="utf-8")
        for phrase in phrases:
            words = (rf'(?:<a class="glossary-term[^>]*>)?\b{word}\b(?:</a>)?' for word in phrase.split())
            found = re.findall(r"\s+".join(words), text, re.IGNORECASE)
            assert not any("<a" in one for one in found), (path.name, phrase)
            seen |= {phrase} if found else set()
    assert seen == set(phrases), "a phrase that no page has any more"


# --- What the extensions do, on the small book ---


def test_the_first_use_of_a_word_in_each_section_leads_to_the_glossary(chapter: str) -> None:
    assert linked(chapter) == [
        # above the first section; DP is the same entry as data-parallel, DP group the longer of two that fit
        ("bucket", "bucket"),
        ("shard", "shards"),
        ("rank", "rank"),
        ("data-parallel", "data-parallel"),
        ("DP-group", "DP group"),
        # "A shard and its bucket", with what is below it; not its title, code, formulas and other links
        ("bucket", "Buckets"),
        ("shard", "shard"),
        ("NewtonSchulz", "Newton-Schulz"),
        # "Another section"; a rank is a quiet word, linked once per page
        ("shard", "shard"),
    ]


def test_the_glossary_links_only_what_its_author_marked(sample: Path) -> None:
    glossary = (sample / "book" / "glossary.html").read_text(encoding="utf-8")
    assert [anchor for anchor, _ in linked(glossary)] == ["bucket"]


def test_every_card_has_the_words_of_its_entry(sample: Path) -> None:
    script = (sample / "_static" / "glossary_words.js").read_text(encoding="utf-8")
    cards = json.loads(script.removeprefix("window.GLOSSARY = ").removesuffix(";\n"))
    assert len(cards) == 7
    assert cards["term-DP"]["html"] == cards["term-data-parallel"]["html"] == "<p>Ranks that see different data.</p>"
    assert "&lt;0&gt;" in cards["term-shard"]["html"]
    assert "<a " not in script, "a card cannot be entered, so it has no links"


def test_a_picture_in_an_output_takes_the_text_beside_it_for_its_description(sample: Path) -> None:
    images = Page(sample / "notebooks" / "07_virtual_map.html").images
    alts = [str(image["alt"]) for image in images if "_images/" in str(image["src"])]
    assert alts == [f'{name} picture: a card that says "{name}" & nothing else.' for name in ("First", "Second")]


def test_a_chapter_is_introduced_by_its_first_sentence_and_its_first_figure(sample: Path) -> None:
    meta = Page(sample / "notebooks" / "07_virtual_map.html").meta
    assert meta["og:description"].startswith("Every bucket is cut into shards, and a shard goes to one rank.")
    assert meta["og:description"].endswith("The DP group comes first.")
    assert meta["og:image:alt"].startswith("First picture")
    image = meta["og:image"].removeprefix(built_book.published())
    assert (sample / image).is_file()


def test_a_list_of_puzzles_leads_to_their_cells_and_it_alone_has_the_script_of_boxes(sample: Path) -> None:
    chapter, listed = sample / "notebooks" / "07_virtual_map.html", sample / "book" / "puzzles.html"
    links = [link for link in Page(listed).links if "#puzzle-" in link]
    assert links == [f"../notebooks/{chapter.name}#{one.anchor}" for one in built_book.PUZZLES]
    assert {one.anchor for one in built_book.PUZZLES} <= Page(chapter).ids
    loading = [page.name for page in (chapter, listed) if any("puzzle_boxes" in load for load in Page(page).loads)]
    assert loading == [listed.name]
