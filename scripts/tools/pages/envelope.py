"""Newton–Schulz, bytes, memory and seconds of one training step, in a few formulas: what the envelope page computes.

The page's own script (book/_static/envelope.js) has the same formulas in the same order, and a test in a browser holds
the two equal. They are meant for the back of an envelope: every term is the largest of its kind, nothing overlaps, no
message costs more than its bytes, and a pipeline has no bubble. `muonbook.planner` lays out real maps instead. Pure
Python: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from typing import NamedTuple

from distmuon.sharding.ownership import owners

STEPS, FORWARD_BACKWARD = 5, 6  # of Newton–Schulz; FLOPs for one token and one weight
MOMENTUM, FLOAT32 = 2, 4  # bytes of an element: on the wire, and of each moment and master weight
LAYOUTS = ("gather_all", "gather_cut", "owner", "muonw")  # all but the last on ZeRO-1 with one flat buffer; it on FSDP2
REPEATING = LAYOUTS[:2]  # in which every rank that holds a piece of a matrix orthogonalizes it


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
    """Parameters that are cut alike. groups: of ranks, each with matrices of its own (pipeline stages, times the ranks
    that share experts). tp: into how many blocks each matrix is cut. dp: how many ranks share a block."""

    matrices: list[Matrices]
    tables: int  # elements that are AdamW's
    groups: int
    tp: int
    dp: int

    @property
    def local(self) -> int:
        """Into how many pieces the parameters are cut, without copies."""
        return self.groups * self.tp

    @property
    def hidden(self) -> int:
        return sum(m.elements for m in self.matrices)

    @property
    def newton_schulz_flops(self) -> int:
        """Of orthogonalizing every matrix once."""
        return sum(m.number * m.flops for m in self.matrices)

    @property
    def owners(self) -> float:
        """On how many DP ranks a matrix lies: 1, and 1 more for each of the D - 1 ends of shards that falls into it."""
        squares = sum(m.elements * m.a * m.b for m in self.matrices)
        return 1 + (self.dp - 1) * squares / self.hidden / (self.hidden / self.groups)


@cache
def deal(matrices: tuple[Matrices, ...], dp: int, tp: int) -> tuple[int, int]:
    """Return the most elements of a DP rank and the most FLOPs of a rank, if the engine deals these matrices out in one
    bucket."""
    each = [one for one in matrices for _ in range(one.number)]
    held, work = [0] * dp, [0] * (dp * tp)
    for index, owner in owners({index: one.flops for index, one in enumerate(each)}, dp, tp).items():
        held[owner.dp] += each[index].a * each[index].b
        work[owner.dp + dp * (owner.tp or 0)] += each[index].flops
    return max(held), max(work)


@dataclass(frozen=True)
class Step:
    """A transformer, and how a step of it is trained.

    layers, width, mlp, vocabulary: attention has two matrices [width, width] in a layer and two [width * kv_heads /
    heads, width], and each expert has `mlp_matrices` of [mlp, width]: three with a gate, or two. experts, active: how
    many a layer has, and how many a token sees; 1 and 1 for a dense model.
    tokens: of all ranks, in a step. dp, tp, pp: D, T and the stages of a pipeline. ep: over how many of the D ranks
    experts are spread. layout: of `LAYOUTS`. gradient, parameter: bytes of an element. Under ZeRO-1, a parameter of
    less than 4 bytes has a float32 master; FSDP2 keeps float32 shards, and sends parameters and gradients as here.
    tflops: that a rank reaches in products, 10^12 per second. dp_link, tp_link: of one rank, 10^9 bytes per second.
    """

    layers: int
    width: int
    mlp: int
    vocabulary: int
    heads: int = 1
    kv_heads: int = 1
    mlp_matrices: int = 3
    experts: int = 1
    active: int = 1
    tokens: int = 1 << 22
    dp: int = 8
    tp: int = 1
    pp: int = 1
    ep: int = 1
    layout: str = "owner"
    gradient: int = 4
    parameter: int = 2
    tflops: float = 400.0
    dp_link: float = 50.0
    tp_link: float = 450.0

    @property
    def parts(self) -> list[Part]:
        """The dense parameters, and experts that are spread over ranks, in groups of their own."""
        query_out = Matrices(self.width, self.width, 2 * self.layers, 1.0)
        key_value = Matrices(self.width * self.kv_heads // self.heads, self.width, 2 * self.layers, 1.0)
        a, b = sorted((self.width, self.mlp))
        mlp = Matrices(a, b, self.mlp_matrices * self.layers * self.experts, self.active / self.experts)
        dense, tables = [query_out, key_value], 2 * self.vocabulary * self.width
        if self.ep == 1:
            return [Part([*dense, mlp], tables, self.pp, self.tp, self.dp)]
        experts = Part([mlp], 0, self.pp * self.ep, self.tp, self.dp // self.ep)
        return [Part(dense, tables, self.pp, self.tp, self.dp), experts]

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
        return part.owners * self.tp if self.layout in REPEATING else 1.0

    # ---- Bytes -----------------------------------------------------------------------------------------------

    @property
    def adamw_bytes(self) -> float:
        """Bytes that a rank sends over DP with AdamW: gradients and parameters, the latter twice under FSDP2."""
        element = self.gradient + self.parameter * (2 if self.layout == "muonw" else 1)
        return sum((p.dp - 1) / p.dp * (p.hidden + p.tables) / p.local * element for p in self.parts)

    def stage(self, part: Part) -> tuple[Matrices, ...]:
        """Return the matrices that the ranks of one pipeline stage, and of one group of experts, deal out."""
        return tuple(m._replace(number=ceil(m.number / part.groups)) for m in part.matrices)

    def padded(self, part: Part) -> float:
        """Return how long the TP-local shards of a part are together, in elements: owners' are all as long as the
        longest."""
        if self.layout != "owner":
            return part.hidden / part.local
        return max(part.hidden / part.local, part.dp * deal(self.stage(part), part.dp, self.tp)[0] / self.tp)

    @property
    def muon_dp_bytes(self) -> float:
        """Bytes that Muon sends over DP beside these: momentum, and the padding of owners' shards."""
        momentum = sum(self._momentum(part) * self._times_over_dp(part) for part in self.parts)
        padding = sum((p.dp - 1) / p.dp * (self.padded(p) - p.hidden / p.local) for p in self.parts)
        return momentum + (self.gradient + self.parameter) * padding

    @property
    def muon_tp_bytes(self) -> float:
        """Bytes that Muon sends over TP."""
        return sum(self._momentum(part) * self._times_over_tp(part) for part in self.parts)

    def _momentum(self, part: Part) -> float:
        """Return the bytes of momentum that a rank holds of a part."""
        return MOMENTUM * part.hidden / part.local / part.dp

    def _times_over_dp(self, part: Part) -> float:
        """Return how many times a rank sends as much as it holds: with MuonW there and back, among all its holders."""
        holders = part.dp * self.tp
        return {
            "gather_all": part.dp - 1,
            "gather_cut": part.owners - 1,
            "owner": 0.0,
            "muonw": 2 * (holders - 1) / holders,
        }[self.layout]

    def _times_over_tp(self, part: Part) -> float:
        """Return the same over TP: with owners there and back."""
        if self.layout in REPEATING:
            return (self.tp - 1) * part.owners
        return 2 * (self.tp - 1) / self.tp if self.layout == "owner" else 0.0

    # ---- Memory ----------------------------------------------------------------------------------------------

    @property
    def adamw_kept(self) -> float:
        """Bytes of parameters, gradients and state that a rank keeps with AdamW, which has two moments in float32."""
        return sum((p.hidden + p.tables) / p.local * self._kept(p.dp, 2) for p in self.parts)

    @property
    def muon_kept(self) -> float:
        """The same with Muon, which has one moment of every hidden element, and owners' padding."""
        hidden = sum(self.padded(p) * self._kept(p.dp, 1) for p in self.parts)
        return hidden + sum(p.tables / p.local * self._kept(p.dp, 2) for p in self.parts)

    def _kept(self, dp: int, moments: int) -> float:
        """Return bytes per element: FSDP2 shards weights and gradients as well."""
        if self.layout == "muonw":
            return FLOAT32 * (2 + moments) / dp
        masters = 1 if self.parameter < FLOAT32 else 0
        return self.gradient + self.parameter + FLOAT32 * (masters + moments) / dp

    # ---- Seconds ---------------------------------------------------------------------------------------------

    @property
    def pass_seconds(self) -> float:
        return self.pass_flops / self.ranks / (self.tflops * 1e12)

    @property
    def newton_schulz_seconds(self) -> float:
        """Of the owner with most to do; where work is repeated, of an average rank."""
        if self.layout in REPEATING:
            return self.newton_schulz_flops / self.ranks / (self.tflops * 1e12)
        return sum(deal(self.stage(p), p.dp, self.tp)[1] for p in self.parts) / (self.tflops * 1e12)

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
    "1b": ("1B, dense, 8 GPUs of one node", Step(22, 2048, 5632, 32000, 32, 4, tokens=1 << 19, dp=8, dp_link=450.0)),
    "7b": ("7B, dense, 8 GPUs", Step(32, 4096, 11008, 32000, 32, 32, tokens=1 << 22, dp=8, dp_link=450.0)),
    "70b": (
        "70B, dense, 1,024 GPUs, as in chapter 15",
        Step(80, 8192, 28672, 128256, 64, 8, tokens=1 << 22, dp=128, tp=8),
    ),
    "1t": (
        "1T, 384 experts, 1,024 GPUs",
        Step(61, 7168, 2048, 163840, 56, 56, experts=384, active=8, tokens=1 << 26, dp=64, pp=16, ep=16),
    ),
}


def by_layout(step: Step) -> dict[str, Step]:
    """Return the same step in every layout."""
    return {layout: replace(step, layout=layout) for layout in LAYOUTS}
