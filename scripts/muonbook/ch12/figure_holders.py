"""What TP costs, as a share of the grid: the DP ranks that hold a piece of one matrix, on more and more of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from muonbook.figures.player import Frame
from muonbook.figures.plots import head
from muonbook.figures.rank_grid import rank_grid
from muonbook.figures.style import card
from muonbook.planner.choices.repeats import repeats

SHOWN = ("bucketed", "flat_cut")


def frames_of_holders(
    model: str, matrix: str, tp: int, over_adamw: Mapping[str, tuple[Sequence[int], Sequence[float]]], title: str = ""
) -> list[Frame]:
    """Return a frame per D: the grid, in red the ranks that hold a piece of one matrix, and each algorithm's ratio.

    over_adamw: title of an algorithm -> (D, bytes of Muon / ZeRO-1 AdamW, all matrices), as
    `figure_bytes.growth_curves` returns it.
    """
    (ranks, _), frames = next(iter(over_adamw.values())), []
    note = "A column: a DP rank. Red: holds a piece of this matrix, and gathers the rest of it over TP. "
    note += "Numbers: Muon's bytes / AdamW's, all matrices."
    for n, dp in enumerate(ranks):
        found, on = repeats(model, dp, tp, matrix, SHOWN), f"{title}: {dp:,} DP × {tp} TP ranks"
        ratios = {each.title: f"{over_adamw[each.title][1][n]:.2f} ×" for each in found}
        figure = card(on, note, *(rank_grid(each.title, each.busy, ratios[each.title]) for each in found))
        held = ", ".join(f"{each.title} {each.dp_ranks:,}" for each in found)
        caption = f"Red columns of {dp:,}: {held}."
        sent = ", ".join(f"{name} {ratio}" for name, ratio in ratios.items())
        frames.append(Frame(figure, f"{head(on, 'Holders')} {caption} Muon's bytes / AdamW's: {sent}.", caption))
    return frames
