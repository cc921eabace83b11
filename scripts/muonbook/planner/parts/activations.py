"""Activations of one pipeline stage: what a micro-batch, one sequence, leaves in a rank, and what it sends over TP.

Estimates, of a transformer in bf16 whose attention keeps no scores and whose gated feed-forward part (SwiGLU) is one
fused kernel. PyTorch's eager mode keeps the output of silu, too: one more tensor as wide as that part, a fifth of what
a layer of Llama 3 70B keeps. Without sequence parallelism every TP rank holds
all of what no matrix cuts; with it a T-th of the sequence (Korthikanti et al. 2022, sections 4.1 and 4.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from distmuon.sharding.layout import ITEM_BYTES
from distmuon.sharding.ledger import Ledger
from muonbook.planner.model_shapes import Shape, Weight
from muonbook.planner.parts.every_rank import Messages, messages_of
from muonbook.planner.stages import BLOCK, Degrees, StageWeights

ACTIVATION_BYTES = ITEM_BYTES["bfloat16"]
LOGIT_BYTES = ITEM_BYTES["float32"]


@dataclass(frozen=True)
class StageActivations:
    """A stage, or several that hold the same, and how it keeps activations: see `WorldSetting`."""

    shape: Shape
    weights: StageWeights
    degrees: Degrees
    recompute: bool
    sequence_parallel: bool

    @property
    def is_first(self) -> bool:
        return 0 in self.weights.numbers

    @property
    def is_last(self) -> bool:
        return self.degrees.pp - 1 in self.weights.numbers

    def held_bytes(self, micro_batches: float) -> float:
        """Return what forward passes leave for backward passes, at the most, under 1F1B.

        2 bytes, for every token of a micro-batch, times what its layers keep; the logits once, in float32, over T. With
        `recompute` only h per layer, and all of the largest layer once. What a layer gathers for a moment is left out.
        Stage s holds min(M, P - s) micro-batches.
        """
        by_layer = self._by_layer()
        kept, once = sum(by_layer.values()), 0.0
        if self.recompute:
            kept, once = len(by_layer) * self._uncut(self.shape.width), max(by_layer.values(), default=0.0)
        under_way = max(1.0, min(micro_batches, self.degrees.pp - self.weights.numbers[0]))
        logits = LOGIT_BYTES * self.shape.vocabulary / self.degrees.tp if self.is_last else 0.0
        return self.shape.context * (ACTIVATION_BYTES * (under_way * kept + once) + logits)

    def _by_layer(self) -> dict[str, float]:
        """Return how many numbers of a token every layer keeps.

        4 h (norms and what they are fed), each matrix's output, and of row-parallel ones the input. Latent attention
        also keeps its inner norm, and keys once more, with their rotary part. A token's experts each keep a copy of it.
        """
        shape, tp = self.shape, self.degrees.tp
        each = self._uncut(4 * shape.width)
        if latent := shape.latent:
            each += self._uncut(latent.rank) + (shape.width + shape.heads * latent.rotary) / tp
        found: dict[str, float] = {}
        for layer, weight in ((_layer(weight), weight) for weight in self.weights.dense if weight.muon):
            found[layer] = found.get(layer, each) + self._of(weight)
        if (experts := shape.experts) and self.weights.mixtures:
            matrices = 3 if shape.gated else 2
            routed = experts.active * (self._uncut(shape.width) + matrices * experts.width / tp)
            mixtures = self.weights.mixture_layers
            found = {name: size + routed * (name in mixtures) for name, size in found.items()}
        return found

    def _of(self, weight: Weight) -> float:
        """Return how many numbers of a token a matrix leaves: its outputs, or what it is fed where TP cuts that."""
        if weight.cut == 1:
            return weight.shape[1] / self.degrees.tp
        return weight.shape[0] / self.degrees.tp if weight.cut == 0 else self._uncut(weight.shape[0])

    def _uncut(self, size: float) -> float:
        """Return how many of a token's numbers a rank holds, on average, of so many that no matrix cuts."""
        return size / self.degrees.tp if self.sequence_parallel else size

    def passed_on_bytes(self) -> float:
        """Return what a rank sends to a neighbouring stage's, of one micro-batch and one way."""
        return self.shape.context * self._uncut(self.shape.width) * ACTIVATION_BYTES

    def messages(self) -> Messages:
        """Return what one micro-batch sends over TP, forward and backward.

        An all-reduce behind attention and one behind the feed-forward part, there and back, and in a recomputed forward
        pass; one behind the embedding, and one before the head. Under sequence parallelism each is a reduce-scatter and
        an all-gather, which send as much, and what was kept in T parts is gathered again for the backward pass. Left
        out: once in a step, the gradients of norms.
        """
        once = 2 * self.weights.layers
        all_reduces = (once + self.is_first) + (once + self.is_last) + once * self.recompute
        again = (once + self.is_last) * self.sequence_parallel
        ledger, tp, payload = Ledger(), self.degrees.tp, self.shape.context * self.shape.width * ACTIVATION_BYTES
        ledger.record("all_reduce", "tp", tp, payload, "activations", all_reduces)
        ledger.record("all_gather", "tp", tp, payload, "activations", again)
        return messages_of(ledger, "activations", "tp", {"tp": tp})


def _layer(weight: Weight) -> str:
    block = BLOCK.match(weight.name)
    return block[0] if block else ""
