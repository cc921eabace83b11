"""Newton–Schulz, bytes, memory and seconds of one training step, in a few formulas: what the roofline page computes.

The page's own script (book/_static/roofline.js) has the same formulas in the same order, and a test in a browser holds
the two equal. They are meant for the back of an envelope: every term is the largest of its kind, nothing overlaps, no
message costs more than its bytes, and a pipeline has no bubble. `muonbook.planner` lays out real maps instead. Pure
Python: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from typing import NamedTuple

from distmuon.sharding.ownership import balance

STEPS, FORWARD_BACKWARD = 5, 6  # of Newton–Schulz; FLOPs for one token and one weight
GRADIENT, PARAMETER, MOMENTUM = 4, 2, 2  # bytes of an element on the wire: float32, bf16, bf16
LAYOUTS = ("gather_all", "owner", "muonw")  # the first two on ZeRO-1 (one flat buffer, one owner), the last on FSDP2


class Matrices(NamedTuple):
    """`number` matrices [a, b], a <= b. share: how many of all tokens each of them sees."""

    a: int
    b: int
    number: int
    share: float

    @property
    def elements(self) -> int:
        """Of all of them."""
        return self.number * self.a * self.b

    @property
    def flops(self) -> int:
        """Of Newton–Schulz, for one of them: 5 (4 a^2 b + 2 a^3)."""
        return STEPS * (4 * self.a * self.a * self.b + 2 * self.a**3)


class Part(NamedTuple):
    """Parameters that are cut alike. local: into how many pieces without copies. dp: how many ranks share a piece."""

    matrices: list[Matrices]
    tables: int  # elements that are AdamW's
    local: int
    dp: int

    @property
    def hidden(self) -> int:
        return sum(m.elements for m in self.matrices)

    @property
    def newton_schulz_flops(self) -> int:
        """Of orthogonalizing every matrix once."""
        return sum(m.number * m.flops for m in self.matrices)

    @property
    def owners(self) -> float:
        """On how many DP ranks a matrix lies, if the ends of shards fall anywhere: 1 + its length over a shard's."""
        squares = sum(m.elements * m.a * m.b for m in self.matrices)
        return min(self.dp, 1 + squares / self.hidden / (self.hidden / self.dp))


@cache
def deal(matrices: tuple[Matrices, ...], ranks: int) -> tuple[int, int]:
    """Return the most elements and the most FLOPs of an owner, if the engine deals these matrices out in one bucket."""
    each = [one for one in matrices for _ in range(one.number)]
    held, work = [0] * ranks, [0] * ranks
    for index, rank in balance({index: one.flops for index, one in enumerate(each)}, ranks).items():
        held[rank] += each[index].a * each[index].b
        work[rank] += each[index].flops
    return max(held), max(work)


@dataclass(frozen=True)
class Step:
    """A transformer, and how a step of it is trained.

    layers, width, mlp, vocabulary: attention has four matrices [width, width] in a layer, and each expert three of
    [mlp, width]. experts, active: how many a layer has, and how many a token sees; 1 and 1 for a dense model.
    tokens: of all ranks, in a step. dp, tp, pp: D, T and the stages of a pipeline. ep: over how many of the D ranks
    experts are spread. layout: of `LAYOUTS`.
    tflops: that a rank reaches in products, 10^12 per second. dp_link, tp_link: of one rank, 10^9 bytes per second.
    """

    layers: int
    width: int
    mlp: int
    vocabulary: int
    experts: int = 1
    active: int = 1
    tokens: int = 1 << 22
    dp: int = 8
    tp: int = 1
    pp: int = 1
    ep: int = 1
    layout: str = "owner"
    tflops: float = 400.0
    dp_link: float = 50.0
    tp_link: float = 450.0

    @property
    def parts(self) -> list[Part]:
        """The dense parameters, and experts that are spread over ranks, in groups of their own."""
        attention = Matrices(self.width, self.width, 4 * self.layers, 1.0)
        a, b = sorted((self.width, self.mlp))
        mlp = Matrices(a, b, 3 * self.layers * self.experts, self.active / self.experts)
        tables, local = 2 * self.vocabulary * self.width, self.tp * self.pp
        if self.ep == 1:
            return [Part([attention, mlp], tables, local, self.dp)]
        return [Part([attention], tables, local, self.dp), Part([mlp], 0, local * self.ep, self.dp // self.ep)]

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp

    # ---- Operations ------------------------------------------------------------------------------------------

    @property
    def pass_flops(self) -> float:
        """FLOPs of forward and backward, all ranks together; an embedding multiplies nothing, the head does."""
        seen = sum(part.tables / 2 + sum(m.elements * m.share for m in part.matrices) for part in self.parts)
        return FORWARD_BACKWARD * seen * self.tokens

    @property
    def newton_schulz_flops(self) -> float:
        """FLOPs of Newton–Schulz, all ranks together."""
        return sum(self.repeats(part) * part.newton_schulz_flops for part in self.parts)

    def repeats(self, part: Part) -> float:
        """Return how many times the grid orthogonalizes each matrix."""
        return part.owners * self.tp if self.layout == "gather_all" else 1.0

    # ---- Bytes -----------------------------------------------------------------------------------------------

    @property
    def adamw_bytes(self) -> float:
        """Bytes that a rank sends over DP with AdamW: gradients and parameters, the latter twice under FSDP2."""
        element = GRADIENT + PARAMETER * (2 if self.layout == "muonw" else 1)
        return sum((p.dp - 1) / p.dp * (p.hidden + p.tables) / p.local * element for p in self.parts)

    def stage(self, part: Part) -> tuple[Matrices, ...]:
        """Return the matrices that the ranks of one pipeline stage, and of one group of experts, deal out."""
        return tuple(m._replace(number=ceil(m.number * self.tp / part.local)) for m in part.matrices)

    def padded(self, part: Part) -> float:
        """Return how long the TP-local shards of a part are together, in elements: owners' are all as long as the
        longest."""
        if self.layout != "owner":
            return part.hidden / part.local
        return max(part.hidden / part.local, part.dp * deal(self.stage(part), part.dp)[0] / self.tp)

    @property
    def muon_dp_bytes(self) -> float:
        """Bytes that Muon sends over DP beside these: momentum, and the padding of owners' shards."""
        momentum = sum(MOMENTUM * part.hidden / part.local * self._dp_share(part) for part in self.parts)
        padding = sum((p.dp - 1) / p.dp * (self.padded(p) - p.hidden / p.local) for p in self.parts)
        return momentum + (GRADIENT + PARAMETER) * padding

    def _dp_share(self, part: Part) -> float:
        if self.layout == "muonw":  # there and back, between all ranks that hold a piece
            holders = part.dp * self.tp
            return 2 * self.tp / holders * (holders - 1) / holders
        return (part.dp - 1) / part.dp if self.layout == "gather_all" else 0.0

    @property
    def muon_tp_bytes(self) -> float:
        """Bytes that Muon sends over TP."""
        return sum(MOMENTUM * part.hidden / part.local * self._tp_share(part) for part in self.parts)

    def _tp_share(self, part: Part) -> float:
        if self.layout == "gather_all":
            return (self.tp - 1) * part.owners / part.dp
        return 2 * (self.tp - 1) / (self.tp * part.dp) if self.layout == "owner" else 0.0

    # ---- Memory ----------------------------------------------------------------------------------------------

    @property
    def adamw_kept(self) -> float:
        """Bytes of parameters, gradients and state that a rank keeps with AdamW.

        ZeRO-1: bf16 parameters, float32 gradients and masters, 6 + 12 / D for an element. FSDP2: float32, 16 / D.
        """
        return sum((p.hidden + p.tables) / p.local * self._kept(p.dp, 12) for p in self.parts)

    @property
    def muon_kept(self) -> float:
        """The same with Muon, which keeps 4 bytes less of every hidden element, and owners' padding."""
        hidden = sum(self.padded(p) * self._kept(p.dp, 8) for p in self.parts)
        return hidden + sum(p.tables / p.local * self._kept(p.dp, 12) for p in self.parts)

    def _kept(self, dp: int, sharded: int) -> float:
        return (sharded + 4) / dp if self.layout == "muonw" else 6 + sharded / dp

    # ---- Seconds ---------------------------------------------------------------------------------------------

    @property
    def pass_seconds(self) -> float:
        return self.pass_flops / self.ranks / (self.tflops * 1e12)

    @property
    def newton_schulz_seconds(self) -> float:
        """Of the owner with most to do; with `gather_all`, of an average rank."""
        if self.layout == "gather_all":
            return self.newton_schulz_flops / self.ranks / (self.tflops * 1e12)
        return sum(deal(self.stage(p), p.dp * self.tp)[1] for p in self.parts) / (self.tflops * 1e12)

    @property
    def adamw_seconds(self) -> float:
        """Of a step with AdamW: forward, backward, and what it sends."""
        return self.pass_seconds + self.adamw_bytes / (self.dp_link * 1e9)

    @property
    def muon_seconds(self) -> float:
        """What Muon adds to that."""
        sending = self.muon_dp_bytes / (self.dp_link * 1e9) + self.muon_tp_bytes / (self.tp_link * 1e9)
        return self.newton_schulz_seconds + sending

    @property
    def share(self) -> float:
        """What Muon adds, in parts of a step with AdamW."""
        return self.muon_seconds / self.adamw_seconds


PRESETS: dict[str, tuple[str, Step]] = {  # name -> (title, step)
    "7b": ("7B, dense, 8 GPUs", Step(32, 4096, 11008, 32000, tokens=1 << 22, dp=8, dp_link=450.0)),
    "36b": ("36B, dense, 64 GPUs", Step(64, 5120, 27648, 155136, tokens=1 << 23, dp=16, tp=4)),
    "1t": (
        "1T, 384 experts, 1,024 GPUs",
        Step(61, 7168, 2048, 163840, experts=384, active=8, tokens=1 << 26, dp=64, pp=16, ep=16),
    ),
}


def by_layout(step: Step) -> dict[str, Step]:
    """Return the same step in every layout."""
    return {layout: replace(step, layout=layout) for layout in LAYOUTS}
