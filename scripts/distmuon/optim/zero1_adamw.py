"""ZeRO-1 AdamW: the baseline of every comparison. Source: Rajbhandari et al. 2020, section 5.1."""

from __future__ import annotations

from typing import ClassVar

from distmuon.optim.sharded_optimizer import ShardedOptimizer


class Zero1AdamW(ShardedOptimizer):
    """`torch.optim.AdamW` on this rank's flat shards; arguments as for `ShardedOptimizer`."""

    MADE_BY: ClassVar = "Zero1AdamW"

    def update(self) -> None:
        self.step_adamw()  # W[N_dp] -> W[N_dp]
        for bucket in self.buckets:
            self.all_gather(bucket)  # W[N_dp] -> W[I_tp, J]
