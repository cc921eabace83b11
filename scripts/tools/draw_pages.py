"""Draw the pictures of the book's pages into book/figures: `make notebooks` calls it after the chapters have run.

What pages include is written there as well: all puzzles, the cheat sheet, what some pages work out or tabulate.

A chapter draws its own pictures; pages of prose and the README cannot. Their alt text stands on the page; a test holds
both equal. The card beside a link to the book and the picture of the notation depend on no code, and are files.

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
    cheat_sheet,
    envelope_parts,
    moving,
    plain_moves,
    plans,
    prices,
    published,
    puzzle_list,
    report_counts,
    roofline_picture,
    variants,
)

ROOT = Path(__file__).resolve().parents[2]
FILM = "nine_moves.svg"  # what the README shows


def draw(target: Path) -> dict[str, str]:
    """Draw every picture into the folder `target`; return file -> its alt text, or how long it is."""
    still = {
        **before_and_after.pictures(),
        "accounting.png": accounting.draw(),
        "roofline.png": roofline_picture.draw(),
    }
    moves = {
        "seven-cuts": (moving.moving_cuts(), None),
        "nine-moves": (plain_moves.frames(), plain_moves.STILL),
        "plans": (plans.frames_of_sizes(results.load("divisions")["sizes"]), None),
    }
    written = {
        "puzzles.md": puzzle_list.page_part(ROOT),
        "cheat_sheet.md": cheat_sheet.markdown(),
        "cut_prices.md": prices.markdown(),
        "report_counts.md": report_counts.markdown(results.load("report_traces")),
        "schedules.md": variants.schedules(),
        "race_variants.md": variants.race(),
        "gram_on_a_gpu.md": variants.on_a_gpu(),
        "variant_costs.md": variants.costs(),
        "roofline_links.md": envelope_parts.links(),
        "envelope_models.md": envelope_parts.models(),
        "planner_assumed.md": plans.assumed(),
        "planner_published.md": published.markdown(),
        "envelope_calculator.md": envelope_parts.calculator(),
        **plans.printed(ROOT),
    }
    described = {name: alt for name, (_, alt) in still.items()}
    for name, text in written.items():
        (target / name).write_text(text, encoding="utf-8")
        described[name] = f"{len(text.splitlines())} lines"
    for name, (figure, alt) in still.items():
        style.save(figure, target / name, alt)
    for name, (frames, still_frame) in moves.items():
        file = f"{name.replace('-', '_')}.html"
        (target / file).write_text(player.html(name, frames, still_frame), encoding="utf-8")
        described[file] = f"{len(frames)} frames, each with its own alt text"
    described[FILM], captioned = plain_moves.describe_film(), plain_moves.frames(captioned=True)
    film = player.film("film", captioned, described[FILM], plain_moves.STILL)
    (target / FILM).write_text(film, encoding="utf-8")
    return described


def main() -> None:
    """Draw every picture and print where it lies, with its alt text."""
    launch.parser(__doc__).parse_args()
    target = ROOT / "book" / "figures"
    target.mkdir(exist_ok=True)
    for name, alt in draw(target).items():
        print(f"{target.relative_to(ROOT) / name}: {alt}")
