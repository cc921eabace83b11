"""A group whose all-gather first looks whether all ranks hand over equally much, and says who does not.

gloo takes unequal pieces without a word, returns the wrong numbers, or ends the process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from distmuon.sharding.collectives import Group
from muonbook.puzzles import require


class EqualPieces(Group):
    """What a trial hands to the reader's function instead of a group; made by `of`."""

    @classmethod
    def of(cls, group: Group) -> EqualPieces:
        """Return the same group, with the same ledger, that looks first."""
        return cls(**vars(group))

    def all_gather(self, shard: Tensor, label: str, *more: Any, **out: Any) -> Tensor:
        """As in Group; stops the trial, on every rank, where the ranks' shards differ in length."""
        with _disable_current_modes():  # the puzzle's own question is not on the reader's bill
            own = torch.tensor([shard.numel()], device=shard.device)
            asked = [torch.empty_like(own) for _ in range(self.size)]
            dist.all_gather(asked, own, group=self.process_group)
        lengths = [int(length) for length in asked]
        told = f"{', '.join(map(str, lengths[:-1]))} and {lengths[-1]}"
        require(
            min(lengths) == max(lengths),
            f"unequal pieces: ranks 0 to {self.size - 1} hand over {told} elements, and an all-gather wants as many "
            f"from each. Send the longest length, {max(lengths)}, from every rank, with zeros behind a shorter piece",
        )
        return super().all_gather(shard, label, *more, **out)
