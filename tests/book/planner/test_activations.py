"""The planner's estimate of activations, against what autograd really keeps of a layer's forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from distmuon.verify.memory_tracker import StorageTracker
from muonbook.planner.model_shapes import MODELS, Experts, Latent, Shape
from muonbook.planner.parts.activations import LOGIT_BYTES, StageActivations
from muonbook.planner.stages import Degrees, stages

PAGE = (Path(__file__).resolve().parents[3] / "book" / "planner.md").read_text(encoding="utf-8")
TOKENS = 64
LLAMA = Shape(
    "Llama's kind", "", layers=1, width=256, heads=4, key_heads=2, mlp=896, vocabulary=512, context=TOKENS
)  # fmt: skip
GPT = replace(LLAMA, title="GPT's kind", key_heads=4, mlp=1024, gated=False, classic=True)
MOONLIGHT = replace(
    LLAMA, title="Moonlight's kind", key_heads=4, experts=Experts(8, 3, 160, 320, 0), latent=Latent(64, 8)
)
KINDS = pytest.mark.parametrize("shape", [LLAMA, GPT, MOONLIGHT], ids=lambda shape: shape.title)


class FusedNorm(torch.autograd.Function):
    """RMSNorm as one kernel, as it is on a GPU: it keeps what it was fed, in bf16, and one number for every token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = x.float().pow(2).mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).to(x.dtype) * weight


class FusedGate(torch.autograd.Function):
    """SwiGLU as one kernel, with an expert's share if there is one: it keeps both its inputs, and no silu."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, share)
        return F.silu(gate) * up * share


class FusedAttention(torch.autograd.Function):
    """Attention whose heads of keys are wider than those of values, as one kernel: it keeps no scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).contiguous().transpose(1, 2)  # as the kernel lays it out, token by token
        ctx.save_for_backward(query, key, value, mixed)
        return mixed


class Layer:
    """One transformer layer of a shape's kind, in bf16, as plain functions of its weights."""

    def __init__(self, shape: Shape, fused: bool) -> None:
        self.shape, self.fused = shape, fused
        torch.manual_seed(0)
        self.weights = {
            w.name.removeprefix("blocks.0."): (0.05 * torch.randn(w.shape)).bfloat16().requires_grad_()
            for w in shape.weights()
        }

    def __call__(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x, "norm1"))
        y = self.norm(x, "norm2")
        return x + (self.mixture(y) if self.shape.experts else self.mlp(y, ""))

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        if self.shape.classic:
            return F.layer_norm(x, weight.shape, weight, self.weights[f"{name}.bias"])
        return FusedNorm.apply(x, weight) if self.fused else F.rms_norm(x, weight.shape, weight)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[name], self.weights.get(f"{name}.bias"))

    def attention(self, y: Tensor) -> Tensor:
        def heads(t: Tensor, each: int) -> Tensor:
            return t.view(1, TOKENS, -1, each)

        each = self.shape.width // self.shape.heads
        if self.shape.latent:
            rank, rotary = self.shape.latent
            query = heads(self.linear(y, "query"), each + rotary)
            compressed, position = self.linear(y, "compress").split([rank, rotary], -1)
            expanded = heads(self.linear(self.norm(compressed, "norm3"), "expand"), 2 * each)
            key, value = expanded.split(each, -1)
            key = torch.cat([key, position.unsqueeze(2).expand(1, TOKENS, self.shape.heads, rotary)], -1)
        else:
            query, key, value = (heads(self.linear(y, name), each) for name in ("query", "key", "value"))
        if not self.shape.classic:  # a rotation keeps none of its inputs
            query, key = (torch.cat([t[..., 1::2], t[..., ::2]], -1) for t in (query, key))
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        if self.shape.latent:
            mixed = FusedAttention.apply(query, key, value)
        else:
            grouped = self.shape.key_heads < self.shape.heads
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return self.linear(mixed.transpose(1, 2).reshape(TOKENS, -1), "out").view_as(y)

    def mlp(self, y: Tensor, prefix: str, share: Tensor | None = None) -> Tensor:
        up = self.linear(y, f"{prefix}up")
        if not self.shape.gated:
            return self.linear(F.gelu(up), f"{prefix}down")
        gate = self.linear(y, f"{prefix}gate")
        share = torch.ones(1, dtype=up.dtype) if share is None else share
        inner = FusedGate.apply(gate, up, share) if self.fused else F.silu(gate) * up * share
        return self.linear(inner, f"{prefix}down")

    def mixture(self, y: Tensor) -> Tensor:
        """Every expert is fed a copy of its tokens."""
        assert self.shape.experts
        shares, chosen = self.linear(y, "router").float().softmax(-1).topk(self.shape.experts.active)
        found = self.mlp(y, "shared.").view(TOKENS, -1)
        for expert in range(self.shape.experts.routed):
            token, which = (chosen.view(TOKENS, -1) == expert).nonzero(as_tuple=True)
            share = shares.view(TOKENS, -1)[token, which].unsqueeze(1).bfloat16()
            outputs = self.mlp(y.view(TOKENS, -1)[token], f"experts.{expert}.", share)
            found = found.scatter_add(0, token.unsqueeze(1).expand_as(outputs), outputs)
        return found.view_as(y)


def kept_numbers(run: Callable[[], Tensor], weights: list[Tensor]) -> float:
    """Return how many numbers of 2 bytes autograd keeps for every token when `run` has run, weights not counted.

    What several operations keep is counted once, and a part of a tensor as all of it, for all of it stays.
    """
    own = {weight.untyped_storage().data_ptr() for weight in weights}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (where := tensor.untyped_storage().data_ptr()) not in own:
            kept[where] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / 2 / TOKENS


def estimate(shape: Shape, recompute: bool = False) -> float:
    """Return what the planner says of one micro-batch, in numbers of 2 bytes for every token, without the logits."""
    (stage,) = stages(shape, 1, 1)
    found = StageActivations(shape, stage, Degrees(1), recompute, sequence_parallel=False).held_bytes(1)
    return (found / TOKENS - LOGIT_BYTES * shape.vocabulary) / 2


def kept_by(shape: Shape, fused: bool, recompute: bool = False) -> float:
    layer, x = Layer(shape, fused), torch.randn(1, TOKENS, shape.width).bfloat16().requires_grad_()
    run = partial(checkpoint, layer, x, use_reentrant=False) if recompute else partial(layer, x)
    return kept_numbers(run, list(layer.weights.values()))


@KINDS
def test_a_layer_of_fused_kernels_keeps_what_the_planner_says(shape: Shape) -> None:
    """The rest are statistics, a few numbers for every token, and which expert it went to."""
    assert estimate(shape) < kept_by(shape, fused=True) < 1.01 * estimate(shape)


def test_torchs_own_functions_keep_more_by_what_the_page_says() -> None:
    """On a CPU, RMSNorm works in float32 step by step, and keeps its input and output so; silu's output is kept."""
    fused, eager = kept_by(LLAMA, fused=True), kept_by(LLAMA, fused=False)
    assert eager - fused == pytest.approx(6 * LLAMA.width + LLAMA.mlp, abs=TOKENS)
    seventy = MODELS["llama3_70b"]
    (stage,) = stages(replace(seventy, layers=1), 1, 1)
    of_70b = StageActivations(seventy, stage, Degrees(1), recompute=False, sequence_parallel=False)._by_layer()
    assert f"keeps {seventy.mlp / of_70b['blocks.0.']:.0%} more" in " ".join(PAGE.replace(" %", "%").split())


def test_a_recomputed_layer_keeps_its_input() -> None:
    found = kept_by(LLAMA, fused=True, recompute=True)
    assert found + kept_by(LLAMA, fused=True) == pytest.approx(estimate(LLAMA, recompute=True), rel=0.01)


def test_the_loss_takes_three_times_what_the_planner_says_if_it_is_not_fused() -> None:
    """It plans logits once, in float32."""
    vocabulary, wide = 20_000, 8
    x, head = (torch.randn(rows, wide).bfloat16().requires_grad_() for rows in (TOKENS, vocabulary))
    with StorageTracker() as tracker:
        F.cross_entropy((x @ head.T).float(), torch.randint(vocabulary, (TOKENS,))).backward()
    bytes_each = tracker.peak / TOKENS / vocabulary
    assert bytes_each == pytest.approx(3 * LOGIT_BYTES, rel=0.02)
    assert f"{bytes_each:.0f} bytes for each logit, and the planner counts {LOGIT_BYTES}" in " ".join(PAGE.split())
