"""ZeRO-1 AdamW: the baseline of every comparison. Source: Rajbhandari et al. 2020, section 5.1."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.optim.sharded_state import NonFinite
from distmuon.sharding.layout import DEFAULT_BUCKET_SIZE


class Zero1AdamW(ShardedOptimizer):
    """`torch.optim.AdamW` on this rank's flat shards.

    lr, betas, eps, weight_decay: as torch's, defaults of the groups; the decay is 0.1 here, and 0.01 in torch.

    Everything else is as for `ShardedOptimizer`.
    """

    MADE_BY: ClassVar = "Zero1AdamW"

    def __init__(
        self,
        params: Any,
        grid: Any,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        bucket_size: int = DEFAULT_BUCKET_SIZE,
        max_norm: float | None = None,
        on_nonfinite: NonFinite = "raise",
        broadcast: bool = False,
        check_every: int = 0,
        overlap_forward: bool = False,
    ) -> None:
        super().__init__(
            params,
            grid,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            bucket_size=bucket_size,
            max_norm=max_norm,
            on_nonfinite=on_nonfinite,
            broadcast=broadcast,
            check_every=check_every,
            overlap_forward=overlap_forward,
        )

    def update(self) -> None:
        self.step_adamw()  # W[N_dp] -> W[N_dp]
        for bucket in self.buckets:
            self.all_gather(bucket)  # W[N_dp] -> W[I_tp, J]
