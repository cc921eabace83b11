"""Draw the pictures of the book's pages into book/figures: `make notebooks` calls it after the chapters have run.

Two lists that pages include are written there as well: all puzzles, and the cheat sheet.

A chapter draws its own pictures; pages of prose cannot. Their alt text stands on the page, that of the social card in
_config.yml; a test holds both equal.

python scripts/tools draw_pages
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from distmuon import launch
from distmuon.models.recipe import Recipe
from distmuon.verify.training import plan_run
from muonbook.figures import nine_moves, player, style
from tools.pages import cheat_sheet, journey, marks, moving, prices, puzzle_list, social

ROOT = Path(__file__).resolve().parents[2]
SHEETS = ("cheat_sheet.png", "cheat_sheet.pdf")


def chapter_titles(notebooks: Path) -> dict[int, str]:
    """Return chapter number -> title, from the first heading of every notebook, `# 7. Map every element …`."""
    titles = {}
    for path in sorted(notebooks.glob("[0-9][0-9]_*.ipynb")):
        first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        match = re.match(r"# (\d+)\. (.+)", first)
        if match is None:
            raise ValueError(f"{path.name} does not begin with a heading like `# 7. Map every element to its owner`.")
        titles[int(match[1])] = match[2].strip()
    return titles


def draw(target: Path) -> dict[str, str]:
    """Draw every picture into the folder `target`; return file -> its alt text, or how long it is."""
    titles = chapter_titles(ROOT / "notebooks")
    still = {
        "journey.png": (journey.draw_journey(titles), journey.describe_journey(titles)),
        "cut_prices.png": (prices.draw_prices(), prices.describe_prices()),
        "marks.png": (marks.draw_marks(), marks.describe_marks()),
        "social_card.png": (social.draw_card(), social.describe_card()),
        **dict.fromkeys(SHEETS, (cheat_sheet.draw_sheet(), cheat_sheet.describe_sheet())),
    }
    layout, _, _ = plan_run(Recipe(), dp=4, tp=2)  # of `make demo`
    moves = {
        "seven-cuts": moving.moving_cuts(),
        "nine-moves": nine_moves.frames_of_step(layout, "layers.1.weight", tp=2),
    }
    written = {"puzzles.md": puzzle_list.page_part(ROOT), "cheat_sheet.md": cheat_sheet.markdown()}
    described = {name: alt for name, (_, alt) in still.items()}
    for name, text in written.items():
        (target / name).write_text(text, encoding="utf-8")
        described[name] = f"{len(text.splitlines())} lines"
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
