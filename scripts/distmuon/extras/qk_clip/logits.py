"""The largest logit of every head, which fused attention does not return: queries and keys multiplied once more."""

from __future__ import annotations

import torch
from torch import Tensor

from distmuon.sharding.precision import widest

CHUNK_NUMEL = 2**24  # logits that exist at a time: 32 MB in bf16


@torch.no_grad()
def largest_logits(
    query: Tensor,  # [batch, heads, length, d]
    key: Tensor,  # [batch, key heads, key length, d]
    is_causal: bool = False,
    scale: float | None = None,
    chunk_numel: int = CHUNK_NUMEL,
) -> Tensor:  # [heads], in the widest dtype of the device
    """Return scale * max q_i . k_j of each head, over the batch and over the pairs (i, j) that attention uses.

    is_causal, scale: what `scaled_dot_product_attention` was given: only keys j <= i count; 1 / sqrt(d) by default.
    Fewer key heads are shared, as with its enable_gqa. A NaN makes its head's result NaN; -inf where there is no pair.
    Source: Kimi K2 (Kimi Team 2025, arXiv 2507.20534), section 2.1, S_max^h.

    Products are taken in the tensors' dtype, a chunk of queries at a time. It costs what attention's first product
    costs: one matrix product beside attention's own two forward and five backward, half of it where causal.
    """
    batch, heads, length, width = query.shape
    key_heads, keys = key.shape[1], key.shape[2]
    found = query.new_full((key_heads, heads // key_heads), -torch.inf)  # [K, G]
    if query.numel() and key.numel():
        grouped, shared = query.unflatten(1, found.shape), key.unsqueeze(2).mT  # [B, K, G, L, d], [B, K, 1, d, S]
        rows = max(1, chunk_numel // (batch * heads * keys))
        for start in range(0, length, rows):
            some, end = grouped[:, :, :, start : start + rows], min(start + rows, length)
            logits = some @ (shared[..., :end] if is_causal else shared)  # [B, K, G, rows, S]
            if is_causal:
                later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(start + 1)
                logits = logits.masked_fill(later, -torch.inf)
            found = torch.maximum(found, logits.amax((0, 3, 4)))
    return found.flatten().to(widest(found.device)) * (width**-0.5 if scale is None else scale)
