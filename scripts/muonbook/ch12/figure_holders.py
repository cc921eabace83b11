"""What TP costs, as a share of the grid: the DP ranks that hold a piece of one matrix, on more and more of them."""

from __future__ import annotations

from collections.abc import Mapping

from muonbook.ch12.planned_bytes import Added
from muonbook.figures.player import Frame
from muonbook.figures.plots import head
from muonbook.figures.rank_grid import rank_grid
from muonbook.figures.style import card
from muonbook.planner.choices.repeats import repeats

SHOWN = ("bucketed", "flat_cut")


def frames_of_holders(
    model: str, matrix: str, tp: int, added: Mapping[str, Mapping[int, Added]], title: str = ""
) -> list[Frame]:
    """Return a frame per D: the grid, in red the ranks that hold a piece of one matrix, and what momentum adds.

    added: title of an algorithm -> D -> what it sends beyond AdamW, of all matrices, as `planned_bytes.growth` has it.
    """
    frames = []
    note = "A column: a DP rank. Red: holds a piece of this matrix, and gathers the rest of it over TP. "
    note += "Numbers, of the whole model: what momentum adds to what AdamW sends, 1."
    for dp in next(iter(added.values())):
        found, on = repeats(model, dp, tp, matrix, SHOWN), f"{title}: {dp:,} DP × {tp} TP ranks"
        of = {each.title: added[each.title][dp] for each in found}
        adds = {name: f"DP +{more.dp:.2f}   TP +{more.tp:.2f}" for name, more in of.items()}
        figure = card(on, note, *(rank_grid(each.title, each.busy, adds[each.title]) for each in found))
        held = ", ".join(f"{each.title} {each.dp_ranks:,}" for each in found)
        caption = f"Red columns of {dp:,}: {held}."
        sent = "; ".join(f"{name} {adds[name]}, together {more.ratio:.2f} times" for name, more in of.items())
        frames.append(Frame(figure, f"{head(on, 'Holders')} {caption} Beyond AdamW's bytes: {sent}.", caption))
    return frames
