"""What Muon adds to AdamW's bytes in a published model, by baseline, as D grows: planned, to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from muonbook.planner.model_shapes import find_shape
from muonbook.planner.parts import every_rank
from muonbook.planner.planned_baselines import PLANNED_BASELINES

SHOWN = [PLANNED_BASELINES[name] for name in ("muon", "muon_flat", "muon_cut", "muon_owner")]


class Added(NamedTuple):
    """What Muon sends beyond ZeRO-1 AdamW, over what that sends: momentum and padding over DP, momentum over TP."""

    dp: float
    tp: float

    @property
    def ratio(self) -> float:
        """Bytes of Muon / ZeRO-1 AdamW."""
        return 1 + self.dp + self.tp


def growth(model: str, tp: int, ranks: Sequence[int]) -> dict[str, dict[int, Added]]:
    """Return {baseline: {D: what Muon adds}} of a published model, planned on D x `tp` ranks, D of `ranks`.

    All parameters, in the paper's dtypes. Gather all, bucketed has Megatron-LM's buckets, the others have one. Bytes
    are means over ranks, to the byte.
    """
    specs, muon = find_shape(model).specs(tp, "float32")
    found: dict[str, dict[int, Added]] = {baseline.title: {} for baseline in SHOWN}
    for dp in ranks:
        for baseline in SHOWN:
            parts = [each.lay_out(specs, muon, dp, tp) for each in (baseline, baseline.adamw)]
            mine, adamw = (
                {group: float(amounts.mean()) for group, amounts in every_rank.by_group(part.sent()).items()}
                for part in parts
            )
            whole = sum(adamw.values())
            found[baseline.title][dp] = Added(*((mine[group] - adamw[group]) / whole for group in ("dp", "tp")))
    return found
