"""The pages of prose: their pictures are those that the code draws today, and the words under them too."""

import json
import math
import re
import statistics
from html import unescape
from pathlib import Path

import pytest
from PIL import Image, ImageChops

from distmuon import launch
from distmuon.models import recipe
from distmuon.sharding.layout import plan
from distmuon.sharding.ledger import ring_bytes
from muonbook.ch04 import sweep, tables
from muonbook.measure import reported, results
from muonbook.planner.planned_worlds import BUCKET_RULES
from tools import draw_pages
from tools.pages import prices, report_counts

ROOT = Path(__file__).resolve().parents[3]
STORED = ROOT / "book" / "figures"
FILM = "nine_moves.svg"
FILES = {"marks.png", "social_card.png", "trace_viewer.png", FILM}  # not drawn


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with the pictures as the code draws them today, and file -> alt text."""
    folder = tmp_path_factory.mktemp("drawn")
    return folder, draw_pages.draw(folder)


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("over_steps.png", "story.md"),
        ("over_time.png", "story.md"),
        ("accounting.png", "accounting.md"),
        ("roofline.png", "roofline.md"),
        ("marks.png", "notation.md"),
    ],
)
def test_a_picture_and_its_words_are_those_of_today(name: str, page: str, drawn: tuple[Path, dict[str, str]]) -> None:
    with Image.open(STORED / name) as stored:
        alt = stored.info["Description"]
        assert f"![{alt}](figures/{name})" in (ROOT / "book" / page).read_text(encoding="utf-8"), f"copy {alt}"
        if name in FILES:
            return
        assert drawn[1][name] == alt
        with Image.open(drawn[0] / name) as fresh:
            assert stored.size == fresh.size
            both = (image.convert("RGBA").convert("RGB") for image in (stored, fresh))
            difference = ImageChops.difference(*both).convert("L")
    assert sum(difference.histogram()[64:]) < 100, f"run `make notebooks`: the stored {name} is another one"


def test_what_is_written_for_a_page_is_that_of_today(drawn: tuple[Path, dict[str, str]]) -> None:
    written = [name for name in drawn[1] if not name.endswith(".png")]
    assert {*drawn[1]} | FILES == {path.name for path in STORED.iterdir()}
    for name in written:
        stored, fresh = ((folder / name).read_text(encoding="utf-8") for folder in (STORED, drawn[0]))
        assert stored == fresh, f"run `make notebooks`: the stored {name} is another one"


def test_the_film_of_the_readme_is_light_and_has_its_words() -> None:
    film = (STORED / FILM).read_text(encoding="utf-8")
    assert len(film.encode()) < 400_000
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (words,) = re.findall(rf"!\[([^\]]*)\]\(book/figures/{re.escape(FILM)}\)", readme)
    assert f'role="img" aria-label="{words}"' in film


def test_the_landing_page_lists_every_chapter_in_order() -> None:
    landing = (ROOT / "book" / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^(\d+)\. \[[^\]]+\]\(\.\./notebooks/(\d\d_\w+)\.ipynb\)", landing, re.MULTILINE)
    chapters = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    assert listed == [(str(int(stem[:2])), stem) for stem in chapters]


def test_the_landing_page_says_how_long_the_chapters_take() -> None:
    minutes = []
    for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        words = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        minutes.append(int(re.search(r"\*\*You need\*\*.*?(\d+) minutes", words, re.DOTALL)[1]))  # type: ignore[index]
    landing = (ROOT / "book" / "index.md").read_text(encoding="utf-8")
    assert (len(minutes), round(sum(minutes) / 60)) == (19, 11)
    assert 120 < sum(minutes[1:5]) < 150
    assert "nineteen chapters take about eleven hours" in landing
    assert "chapters 1 to 4, which take a bit more than two hours" in landing


def test_links_between_pages_and_chapters_name_the_right_numbers() -> None:
    for path in (ROOT / "book").glob("*.md"):
        for number, file in re.findall(r"\[(\d+)\]\(\.\./notebooks/(\d\d)_", path.read_text(encoding="utf-8")):
            assert int(number) == int(file), path.name


# --- Seven ways to cut ---


def test_what_the_cuts_cost_is_what_a_ring_and_the_map_say() -> None:
    """The picture is a file: a shard of a strip of 256 elements of matrices and 32 of norms, and what a ring sends."""
    picture = (STORED / "seven_cuts.html").read_text(encoding="utf-8")
    told = [unescape(alt) for alt in re.findall(r'role="img" aria-label="([^"]+)"', picture)]
    costs = {alt.partition(".")[0]: re.findall(r"M (?:kept|sent) (\d+|nothing)", alt) for alt in told}
    bucket, matrices, ranks = 256 + 32, 256, 4
    sent = {size: str(ring_bytes("all_gather", size, ranks)) for size in (bucket, matrices)}
    assert costs == {name: [str(matrices), "nothing"] for name in ("One rank has it all", "DP", "CP")} | {
        "ZeRO-1": [str(bucket // ranks), sent[bucket]],
        "ZeRO-3, as FSDP2": [str(matrices // ranks), sent[matrices]],
        "TP": [str(matrices // ranks), sent[matrices]],
        "PP": [str(matrices // ranks), "nothing"],
        "EP": [str(matrices - 3 * 4 * 4), "nothing"],
    }


def test_the_bill_is_the_busiest_ranks() -> None:
    """Momentum kept, found without a shortcut: of each of 8 ranks, what it owns of every matrix, by its own map."""
    bill = prices.prices()
    for ranks, tp in ((64, 1), (8, 8)):
        specs, muon = prices.MODEL.specs(tp)
        layout = plan(specs, ranks, BUCKET_RULES["megatron"](ranks))
        mixed = [bucket for bucket in layout.buckets if 0 < len(set(bucket.params) & set(muon)) < len(bucket.params)]
        assert len(mixed) == 1, "the bucket for which the page says that a few ranks own all the momentum"
    views = [layout.view(rank) for rank in range(8)]
    kept = [4 * sum(view[index].local_range.size for index in muon) for view in views]
    assert bill["DP 8 × TP 8"].kept == max(kept) > 1.02 * sum(kept) / 8
    assert f"{bill['DP 64, ZeRO-1 or -2'].kept / 1e6:.0f}" == "977"
    assert f"{bill['DP 8 × TP 8'].kept / 1e6:.0f}" == "992"


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


def test_the_bill_says_of_which_matrices_it_is() -> None:
    page = (ROOT / "book" / "seven_cuts.md").read_text(encoding="utf-8")
    specs, muon = prices.MODEL.specs(1)
    elements = sum(math.prod(specs[index].shape) for index in muon)
    assert f"{elements / 1e9:.0f} billion elements in {len(muon):,} matrices" in page
    assert f"the {sum(specs[index].name.endswith('router') for index in muon)} routers" in page
    assert elements * 4 == prices.prices()["DP 64, momentum not cut"].kept


# ---- Said on several pages ------------------------------------------------------------------------------------


def paragraphs() -> list[str]:
    """Return every paragraph, list item and table row of the pages and of the chapters' Markdown."""
    chapters = [json.loads(path.read_text(encoding="utf-8"))["cells"] for path in (ROOT / "notebooks").glob("*.ipynb")]
    texts = ["".join(cell["source"]) for cells in chapters for cell in cells if cell["cell_type"] == "markdown"]
    texts += [path.read_text(encoding="utf-8") for path in (ROOT / "book").glob("*.md")]
    return [part for text in texts for part in re.split(r"\n\n|\n(?=[-|:] ?)", text)]


def test_megatrons_default_is_told_with_its_date() -> None:
    """`blockwise` until August 2026, then `duplicated`: what another project does by default can change any day."""
    told = [part for part in paragraphs() if "blockwise" in part and "default" in part and "Megatron" in part]
    assert len(told) >= 4
    assert all("2026" in part for part in told), told


def test_what_is_not_tried_is_said_where_trials_are_promised() -> None:
    landing, claims = ((ROOT / "book" / name).read_text(encoding="utf-8") for name in ("index.md", "claims.md"))
    untried = re.search(r"^## Not tried yet$(.*?)^## ", claims, re.MULTILINE | re.DOTALL)
    count = len(re.findall(r"^- ", untried[1], re.MULTILINE)) if untried else 0
    assert ("not tried yet" in " ".join(landing.split())) == bool(count)
    assert count == 0 or "Three claims of Jen Wei's reproduction report are" in " ".join(landing.split())


def test_the_landing_page_says_where_half_the_steps_was_seen() -> None:
    first = (ROOT / "book" / "index.md").read_text(encoding="utf-8").split("\n\n")[1]
    assert "In two of our three small races in [chapter 4]" in first
    assert "less than half of the steps" in first
    races = results.load("learning")["races"]
    assert all(races[name]["to_adamw"]["steps"] < 0.5 for name in ("language", "fashion"))
    assert "no difference can be claimed" in (ROOT / "book" / "claims.md").read_text(encoding="utf-8")  # on digits


# ---- What three pages say of our own counts and races ------------------------------------------------------------


def test_six_ways_of_counting_lead_from_the_reports_number_to_that_of_whole_steps_on_one_grid() -> None:
    counted = report_counts.ways(results.load("report_traces"))
    assert [way.written for way in counted] == ["0.57", "0.594", "0.45", "0.24", "0.585", "1.71"]
    events, kernels, ranks, calls, step, one_grid = counted
    for name in ("muon", "adamw"):  # the first change takes away what had been counted again, and nothing else
        assert getattr(events, name)["counted once"] == sum(getattr(kernels, name).values())
    # what the calls leave out is what AdamW itself sends
    assert step.muon["the rest"] == sum(step.muon.values()) - sum(calls.muon.values()) == sum(one_grid.adamw.values())
    assert ranks.muon["waiting"] > 0.3 * sum(ranks.muon.values())
    # time and bytes are of the same five steps, so one over the other is the rate that the page names
    rate = sum(calls.adamw.values()) / (ranks.adamw["sending"] / 1000)
    assert rate / 1e9 == pytest.approx(results.load("claims")["projection"]["gigabytes_per_second"])


def test_which_rank_one_asks_decides_the_ratio_of_one_and_the_same_run() -> None:
    ratios = report_counts.by_rank(results.load("report_traces"))
    single = [ratio for who, ratio in ratios.items() if who.startswith("rank ")]
    assert len(single) == 4
    assert min(single) < ratios["all four"] < max(single) < 0.6
    assert ratios["all four, less waiting"] < min(single)


def test_a_whole_step_of_the_reports_model_is_never_cheaper_than_adamws() -> None:
    for dp, tp in (report_counts.ADAMWS_GRID, report_counts.GRID):
        flat, cut, owner = (reported.over_adamw(dp, tp, name) for name in ("gather_all", "gather_cut", "owner"))
        assert flat > cut >= 0.999
        assert owner >= 0.999


def test_only_normuon_keeps_or_sends_more_and_only_in_muonw_it_sends() -> None:
    for way, by_name in results.load("variant_costs")["counted"].items():
        muon = by_name.pop("muon")
        normuon = by_name.pop("normuon")
        assert all(found == muon for found in by_name.values()), way
        assert normuon["state_elements"] > muon["state_elements"]
        assert (normuon["sent_bytes"] > muon["sent_bytes"]) == (way == "muonw")


def test_both_muons_of_the_two_races_end_with_the_same_median() -> None:
    medians = [statistics.median(tables.gaps(results.load(race), "muon")) for race in ("race_variants", "race_normuon")]
    assert f"{medians[0]:.3f}" == f"{medians[1]:.3f}"


def test_the_commands_of_the_last_page_are_taken() -> None:
    page = (ROOT / "book" / "what_next.md").read_text(encoding="utf-8")
    assert (ROOT / "scripts" / "examples" / "certify_run.py").is_file()
    (command,) = re.findall(r"^torchrun .* scripts/10_dp_tp\.py (.*)$", page, re.MULTILINE)
    parser = launch.parser("")
    launch.add_arguments(parser, dp=1, tp=1)
    arguments = parser.parse_args(command.split())
    assert f"--nproc-per-node {arguments.dp * arguments.tp} " in page
    recipe.Recipe().check(arguments.dp, arguments.tp)


def test_what_the_last_page_says_of_our_races_and_counts_is_stored() -> None:
    assert results.load("learning")["races"]["language"]["to_adamw"]["steps"] < 0.5
    apart = []
    for race in (results.load("race_variants"), results.load("race_normuon")):
        muon = tables.gaps(race, "muon")
        wins = {name: sweep.verdict(tables.gaps(race, name), muon).wins for name in race["racers"].keys() - {"muon"}}
        apart += [(name, count) for name, count in wins.items() if count in (0, len(race["seeds"]))]
    assert apart == [("cans", 0)]
