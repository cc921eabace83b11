"""One attention layer as QK-Clip sees it: which rows of which parameters make which head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

SCALED = ("weight", "bias")  # what a projection may consist of: its output is linear in both, row by row


class AttentionHeads(NamedTuple):
    """The projections of one attention layer.

    query, key: modules with a weight [rows, inputs] and perhaps a bias [rows], of d rows for each head, one head after
        the other. The same module twice is a fused one, with the rows of query, key and value in this order. Where TP
        cuts a fused one, a rank holds its part of each.
    heads: of the query, in the whole layer.
    key_heads: of the key, where several query heads share one; None: as many.
    """

    query: nn.Module
    key: nn.Module
    heads: int
    key_heads: int | None = None

    @property
    def keys(self) -> int:
        """How many key heads there are."""
        return self.heads if self.key_heads is None else self.key_heads

    @property
    def fused(self) -> bool:
        return self.query is self.key

    @property
    def projections(self) -> dict[str, tuple[nn.Module, int]]:
        """The modules by their parts in the layer, and how many heads the rows of each make."""
        if self.fused:
            return {"fused projection": (self.query, self.heads + 2 * self.keys)}
        return {"query": (self.query, self.heads), "key": (self.key, self.keys)}

    def factors(
        self,
        gammas: Sequence[float],  # of each head
        alpha: float,
    ) -> list[list[list[float]]]:  # for each projection its parts, one factor per head
        """Return by what the heads' rows are multiplied: gamma^alpha in the query, gamma^(1 - alpha) in the key.

        A key head that several query heads share stays: each of them takes its whole gamma, and none moves another's
        logits. Source: Kimi K2, section 2.1, which treats the key part that all heads share (k^R) so.
        """
        shared = self.keys < self.heads
        query = [gamma if shared else gamma**alpha for gamma in gammas]
        key = [1.0] * self.keys if shared else [gamma ** (1 - alpha) for gamma in gammas]
        return [[query, key, [1.0] * self.keys]] if self.fused else [[query], [key]]

    def check(self, name: str) -> None:
        """Raise ValueError, naming the layer and the remedy, unless its heads are rows of its parameters."""
        if not _is_count(self.heads) or not _is_count(self.keys):
            raise ValueError(f"{name!r} has heads={self.heads!r}, key_heads={self.key_heads!r}; give numbers from 1.")
        if self.heads % self.keys:
            raise ValueError(
                f"{name!r} has {self.heads} heads and {self.keys} key heads; give a number that divides {self.heads}."
            )
        for which, (module, _) in self.projections.items():
            found = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
            if "weight" not in found or found.keys() - set(SCALED) or found["weight"].ndim != 2:
                shapes = ", ".join(f"{leaf} {list(p.shape)}" for leaf, p in found.items()) or "no parameters"
                raise ValueError(
                    f"the {which} of {name!r} has {shapes}; the clip scales rows of a weight [rows, inputs] and of a "
                    "bias. Give such a module, or bound these logits by a norm on queries and keys."
                )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
