"""Draw the pictures of the book's pages into book/figures: `make notebooks` calls it after the chapters have run.

A chapter draws its own pictures; pages of prose cannot. Their alt text stands on the page, that of the social card in
_config.yml; a test holds both equal.

python scripts/tools draw_pages
"""

from __future__ import annotations

from pathlib import Path

from distmuon import launch
from distmuon.models.recipe import Recipe
from distmuon.verify.training import plan_run
from muonbook.figures import nine_moves, player, style
from tools.pages import marks, moving, prices, social

ROOT = Path(__file__).resolve().parents[2]


def draw(target: Path) -> dict[str, str]:
    """Draw every picture into the folder `target`; return file -> its alt text, or how often it moves."""
    still = {
        "cut_prices.png": (prices.draw_prices(), prices.describe_prices()),
        "marks.png": (marks.draw_marks(), marks.describe_marks()),
        "social_card.png": (social.draw_card(), social.describe_card()),
    }
    layout, _, _ = plan_run(Recipe(), dp=4, tp=2)  # of `make demo`
    moves = {
        "seven-cuts": moving.moving_cuts(),
        "nine-moves": nine_moves.frames_of_step(layout, "layers.1.weight", tp=2),
    }
    described = {name: alt for name, (_, alt) in still.items()}
    for name, (figure, alt) in still.items():
        style.save(figure, target / name, alt)
    for name, frames in moves.items():
        file = f"{name.replace('-', '_')}.html"
        (target / file).write_text(player.html(name, frames), encoding="utf-8")
        described[file] = f"{len(frames)} frames, each with its own alt text"
    return described


def main() -> None:
    """Draw every picture and print where it lies, with its alt text."""
    launch.parser(__doc__).parse_args()
    target = ROOT / "book" / "figures"
    target.mkdir(exist_ok=True)
    for name, alt in draw(target).items():
        print(f"{target.relative_to(ROOT) / name}: {alt}")
