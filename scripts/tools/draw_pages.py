"""Draw the pictures of the book's pages into book/figures: `make notebooks` calls it after the chapters have run.

What pages include is written there as well: all puzzles, and what some pages work out or tabulate.

A chapter draws its own pictures; pages of prose and the README cannot. Their alt text stands on the page; a test holds
both equal. Illustrations that depend on no measurement are files: the card beside a link to the book, the picture of
the notation, and the frames of two films, the nine moves in plain words and the seven ways to cut.

python scripts/tools draw_pages
"""

from __future__ import annotations

from pathlib import Path

from distmuon import launch
from muonbook.figures import player, style
from muonbook.measure import results
from tools.pages import (
    accounting,
    before_and_after,
    envelope_parts,
    plans,
    prices,
    published,
    puzzle_list,
    report_counts,
    roofline_picture,
    variants,
)

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "book" / "figures"
FILMS = {"nine_moves.html": 4, "seven_cuts.html": None}  # whose frames are files: name -> still, as in `reshelled`


def draw(target: Path) -> dict[str, str]:
    """Draw every picture into the folder `target`; return file -> its alt text, or how long it is."""
    still = {
        **before_and_after.pictures(),
        "accounting.png": accounting.draw(),
        "roofline.png": roofline_picture.draw(),
    }
    written = {
        "puzzles.md": puzzle_list.page_part(ROOT),
        "cut_prices.md": prices.markdown(),
        "report_counts.md": report_counts.markdown(results.load("report_traces")),
        "ns_coefficients.md": variants.ns_coefficients(),
        "race_variants.md": variants.race(),
        "gram_on_a_gpu.md": variants.on_a_gpu(),
        "variant_costs.md": variants.costs(),
        "roofline_links.md": envelope_parts.links(),
        "envelope_models.md": envelope_parts.models(),
        "planner_assumed.md": plans.assumed(),
        "planner_published.md": published.markdown(),
        "envelope_calculator.md": envelope_parts.calculator(),
        "plans.html": player.html("plans", plans.frames_of_sizes(results.load("divisions")["sizes"])),
        **{film: player.reshelled((FIGURES / film).read_text(encoding="utf-8"), FILMS[film]) for film in FILMS},
        **plans.printed(ROOT),
    }
    described = {name: alt for name, (_, alt) in still.items()}
    for name, text in written.items():
        (target / name).write_text(text, encoding="utf-8")
        described[name] = f"{len(text.splitlines())} lines"
    for name, (figure, alt) in still.items():
        style.save(figure, target / name, alt)
    return described


def main() -> None:
    """Draw every picture and print where it lies, with its alt text."""
    launch.parser(__doc__).parse_args()
    for name, alt in draw(FIGURES).items():
        print(f"{FIGURES.relative_to(ROOT) / name}: {alt}")
