"""owner: every matrix is orthogonalized by one rank of the grid, and DP sends nothing for it.

The map cuts no matrix (`sharding.ownership`), so ZeRO-1's reduce-scatter has already put each TP-local matrix whole on
one row of the grid. Within that row one TP rank owns it: the others send their blocks, and get theirs
of the update back, in two packed all-to-alls per bucket. What TP cuts between matrices (heads, experts) stays where it
is: every TP rank orthogonalizes its own.

    dp_gather       this rank's pieces, which are whole          ->  TP-local matrices          nothing sent
    tp_gather       TP-local matrices, blocks to their owners    ->  the matrices I own         all-to-all
    newton_schulz   the matrices I own                           ->  their updates              once in the whole grid
    tp_shard        their updates, blocks to their ranks         ->  TP-local updates           all-to-all
    dp_shard        TP-local updates                             ->  this rank's pieces         nothing sent

Sources: whole matrices per rank: Keller Jordan's distributed Muon (2024); blocks to one owner and back: dion (Ahn et
al. 2025); Emerging-Optimizers and torchtitan balance owners by cost, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from distmuon.optim.strategies.costs import PlannedRank, StrategyCosts, Task, WholeMatrices, work
from distmuon.optim.strategies.strategy import (
    BucketGroup,
    Strategy,
    StrategyContext,
    Tensors,
    momentum_label,
    updates_label,
)
from distmuon.sharding.hooks import hooked
from distmuon.sharding.layout import Layout, ParamSpec
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.ownership import Owner, owners_of, plan_owned
from distmuon.sharding.tensor_lists import cast

Blocks = dict[tuple[int, int], Tensor]  # (matrix, TP rank that it comes from) -> its block


class OneOwner(Strategy):
    """The five moves, with each matrix at one rank."""

    OWN_BUCKETS: ClassVar = True
    STARTS_UNREAD: ClassVar = True
    RETURNS_UNREAD: ClassVar = True

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self.coming: dict[BucketGroup, Blocks] = {}  # sent in `start`, to be joined in tp_gather
        self.brought: dict[BucketGroup, dict[int, None]] = {}  # to tp_gather by this row, which tp_shard gives back

    @cached_property
    def tp_owner(self) -> dict[int, int | None]:
        """The TP rank, of its row, that orthogonalizes each matrix; None where each has matrices of its own."""
        owner_of = assign_owners(self.context.layout, self.context.groups, self.context.grid.tp.size)
        return {index: owner.tp for index, owner in owner_of.items()}

    @staticmethod
    def plan(specs: Sequence[ParamSpec], muon: Collection[int], dp: int, tp: int, bucket_size: int) -> Layout:
        """Return a map whose shards cut no matrix, balanced by the work of Newton–Schulz."""
        return plan_owned(specs, costs(specs, muon, tp), dp, tp, bucket_size)

    def works_on(self, index: int) -> bool:
        """Say whether this rank owns that parameter's matrices, or its TP block of several."""
        return self.tp_owner[index] in (None, self.context.grid.tp.rank)

    def owns_full(self, index: int) -> bool:
        """Say whether an owner takes that matrix whole in this step; if not, every rank takes its block for one."""
        return True

    def start(
        self,
        buckets: BucketGroup,
        momentum: Tensors,  # M[I_tp J]
    ) -> dict[int, Tensor]:  # M[I_tp, J]
        """Let the blocks set out for their owners, too."""
        blocks = self.dp_gather(buckets, momentum)
        self.coming[buckets] = self._send(buckets, blocks)
        return blocks

    @hooked
    def dp_gather(
        self,
        buckets: BucketGroup,
        momentum: Tensors,  # M[I_tp J]: whole, but flat
    ) -> dict[int, Tensor]:  # M[I_tp, J]
        """Whole pieces -> TP-local matrices, in the dtype of the wire; nothing is sent."""
        dtype, metas = self.context.wire_dtype(buckets), self.context.metas
        pieces = zip(momentum, cast(list(momentum.values()), dtype), strict=True)
        return {i: piece.view(metas[i].shape) for i, piece in pieces}

    @hooked
    def tp_gather(
        self,
        buckets: BucketGroup,
        blocks: Tensors,  # M[I_tp, J] or M[I, J_tp]
    ) -> dict[int, Tensor]:  # M[I, J]
        """Blocks -> their owners, who put them together; returned are the matrices that this rank works on."""
        received = self.coming.pop(buckets) if buckets in self.coming else self._send(buckets, blocks)
        row = self.brought[buckets] = self._travelling(blocks)
        matrices, tp = dict[int, Tensor](), self.context.grid.tp
        for index, block in blocks.items():
            if index not in row:
                matrices[index] = block
            elif self.tp_owner[index] == tp.rank:
                dim = self.context.layout.specs[index].tp_gather_dim
                if dim is None:
                    matrices[index] = block
                else:
                    matrices[index] = torch.cat([received[index, rank] for rank in range(tp.size)], dim)
        return matrices

    @hooked
    def tp_shard(
        self,
        buckets: BucketGroup,
        updates: Tensors,  # O[I, J]
    ) -> dict[int, Tensor]:  # O[I_tp, J] or O[I, J_tp]
        """Updates -> blocks of them to all TP ranks; returned are this rank's blocks, also of what others own."""
        tp, row = self.context.grid.tp, self.brought.pop(buckets)
        staying = {index: update for index, update in updates.items() if index not in row}
        if not row:
            return staying
        cut: dict[int, Sequence[Tensor]] = {}  # [tp] each
        for index in updates.keys() & row:
            dim = self.context.layout.specs[index].tp_gather_dim
            cut[index] = [updates[index]] * tp.size if dim is None else updates[index].chunk(tp.size, dim)
        owned_by = [[i for i in row if self.tp_owner[i] == rank] for rank in range(tp.size)]
        parcels = [[cut[i][rank] for i in owned_by[tp.rank]] for rank in range(tp.size)]
        received = self._exchange(parcels, owned_by, buckets, updates_label(buckets[0]))
        return staying | {index: block for (index, _), block in received.items()}

    @hooked
    def dp_shard(
        self,
        buckets: BucketGroup,
        blocks: Tensors,  # O[I_tp, J]
    ) -> dict[int, Tensor]:  # O[I_tp J]
        """TP-local updates -> the same, flat; nothing is sent."""
        return {index: block.reshape(-1) for index, block in blocks.items()}

    def _travelling(self, blocks: Tensors) -> dict[int, None]:
        """Return the matrices that go to an owner in this row, and come back, in the order of the map."""
        tp = self.context.grid.tp
        return {i: None for i in blocks if tp.size > 1 and self.owns_full(i) and self.tp_owner[i] is not None}

    def _send(self, buckets: BucketGroup, blocks: Tensors) -> Blocks:
        """Send blocks to their owners; what is not cut is there already."""
        tp, specs = self.context.grid.tp, self.context.layout.specs
        cut = [index for index in self._travelling(blocks) if specs[index].tp_gather_dim is not None]
        if not cut:
            return {}
        owned_by = [[index for index in cut if self.tp_owner[index] == rank] for rank in range(tp.size)]
        parcels = [[blocks[index] for index in indices] for indices in owned_by]
        return self._exchange(parcels, [owned_by[tp.rank]] * tp.size, buckets, momentum_label(buckets[0]))

    def _exchange(
        self,
        parcels: Sequence[Sequence[Tensor]],  # [tp] -> blocks for that rank
        coming: Sequence[Sequence[int]],  # [tp] -> the matrices of which a TP-local block comes from that rank
        buckets: BucketGroup,
        label: str,
    ) -> Blocks:
        grid, specs = self.context.grid, self.context.layout.specs
        nothing = torch.empty(0, dtype=self.context.wire_dtype(buckets), device=grid.device)
        shapes = [[specs[index].shape for index in indices] for indices in coming]
        received = grid.tp.exchange(parcels, shapes, label, nothing)
        return {
            (index, rank): block
            for rank, (indices, blocks) in enumerate(zip(coming, received.tensors, strict=True))
            for index, block in zip(indices, blocks, strict=True)
        }


def costs(specs: Sequence[ParamSpec], muon: Collection[int], tp: int) -> dict[int, float]:
    """Return what orthogonalizing all matrices of each whole parameter of Muon's costs, in FLOPs: {index: cost}."""
    alike: dict[tuple[Any, ...], float] = {}  # by all but the name: a model repeats its layers
    for spec in (specs[index] for index in muon):
        if spec[1:] not in alike:
            alike[spec[1:]] = float(work(spec.whole_parts(tp)))
    return {index: alike[specs[index][1:]] for index in muon}


def assign_owners(layout: Layout, muon: Collection[int], tp: int) -> dict[int, Owner]:
    """Return who orthogonalizes each parameter of Muon's in a layout of this strategy: {index: owner}."""
    return owners_of(layout, costs(layout.specs, muon, tp), tp)


# ---- What it costs ----------------------------------------------------------------------------------------


def sends(ledger: Ledger, at: PlannedRank) -> None:
    """Add what one step sends: nothing over DP; over TP, blocks to their owners and blocks of the updates back."""
    if at.tp == 1:
        return
    owner_of, specs = _owners_of(at.layout, at.muon, at.tp), at.layout.specs
    for bucket in at.layout.buckets:
        row = [i for i in at.owned(bucket) if owner_of[i].tp is not None and (at.whole is None or i in at.whole)]
        cut = [index for index in row if specs[index].tp_gather_dim is not None]
        _, size = at.momentum_bytes(bucket)
        if cut:
            sent = size * sum(specs[i].numel for i in cut if owner_of[i].tp != at.tp_rank)
            ledger.record("all_to_all", "tp", at.tp, sent, momentum_label(bucket), sent_bytes=sent)
        if row:
            sent = size * (at.tp - 1) * sum(specs[i].numel for i in row if owner_of[i].tp == at.tp_rank)
            ledger.record("all_to_all", "tp", at.tp, sent, updates_label(bucket), sent_bytes=sent)


def allocates(at: PlannedRank, blocks_too: bool = False) -> int:
    """Return a bound, in bytes, of what one bucket's moves allocate, for the worst bucket and the busiest TP rank.

    blocks_too: what a rank does not own, it works on, too, as blocks. See `owner_bound`.
    """
    owner_of, specs = _owners_of(at.layout, at.muon, at.tp), at.layout.specs
    worst = 0
    for bucket in at.layout.buckets:
        row = at.owned(bucket)
        wholes = [WholeMatrices()] * at.tp
        for index in row:
            owner = owner_of[index].tp
            for rank in range(at.tp):
                if owner in (rank, None) or blocks_too:
                    more = WholeMatrices.of_one(specs[index], at.tp, blocks=owner not in (rank, None))
                    wholes[rank] = wholes[rank].plus(more)
        own, sizes = sum(specs[index].numel for index in row), at.momentum_bytes(bucket)
        worst = max(worst, *(owner_bound(own, whole, sizes, at.compute_bytes) for whole in set(wholes)))
    return worst


def owner_bound(own: int, whole: WholeMatrices, sizes: tuple[int, int], compute: int) -> int:
    """Return a bound, in bytes, of what one bucket's moves allocate.

    (w + 2 m) b                     the momentum's pieces, in the dtype in which they travel, and packed
    + m F                           blocks that came
    + whole matrices, and Newton–Schulz: see `WholeMatrices`
    + m (F + b)                     updates packed, and blocks of them that came

    with b = `own` elements of Muon's in this rank's shard, F = `whole.total` in the matrices that it owns; `sizes` are
    w and m of `momentum_bytes`, `compute` is c.
    """
    w, m = sizes
    return (w + 3 * m) * own + 2 * m * whole.total + whole.bytes(m, compute)


def by_one_owner(layout: Layout, muon: Collection[int], tp: int) -> Iterator[Task]:
    """Yield all parameters, each at one rank; one whose matrices TP does not cut, at all ranks of a row."""
    for index, owner in assign_owners(layout, muon, tp).items():
        ranks = [(owner.dp, t) for t in (range(tp) if owner.tp is None else [owner.tp])]
        yield Task(index, layout.specs[index].seen_parts(tp), ranks)


_owners_of = lru_cache(maxsize=8)(assign_owners)  # once for all ranks that are asked about


STRATEGY = OneOwner
COSTS = StrategyCosts(sends, allocates, by_one_owner)
