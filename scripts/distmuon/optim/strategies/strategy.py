"""What a strategy is: a way to let Newton–Schulz see whole matrices.

A strategy owns the five moves between momentum and update, mirror images around the mathematics:

    dp_gather       {index: M[N_dp]}     ->  {index: M[I_tp, J]}     this rank's pieces   ->  TP-local matrices
    tp_gather       {index: M[I_tp, J]}  ->  {index: M[I, J]}        TP-local matrices    ->  whole matrices
    newton_schulz   {index: M[I, J]}     ->  {index: O[I, J]}        (or what holds several matrices, all of them whole)
    tp_shard        {index: O[I, J]}     ->  {index: O[I_tp, J]}     whole updates        ->  TP-local updates
    dp_shard        {index: O[I_tp, J]}  ->  {index: O[N_dp]}        TP-local updates     ->  this rank's pieces

`index` is the parameter's place in the map, which the strategy lays out itself (`plan`): where shards may end decides
what has to travel. What travels together is a *bucket group*: the buckets of one round. A rank may take the matrices of
one in several *waves*, one after the other, each through all five moves, so that fewer of them are whole at a time.
A strategy also says which options of a group are its own (`options`), and by what a matrix's learning rate is
multiplied in this step (`lr_ratio`), which is 1 for every form of Muon.
A file with a strategy ends in `STRATEGY = TheClass` and says what the moves send, hold and work on, in `COSTS` (see
`costs`): one file, and nothing else, has to be written for another one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from distmuon.optim.batches import batches
from distmuon.optim.muon import orthogonalize
from distmuon.sharding.grid import Grid
from distmuon.sharding.hooks import hooked
from distmuon.sharding.layout import Bucket, DistMeta, Layout, ParamSpec
from distmuon.sharding.precision import default_gather_dtype

BucketGroup = tuple[Bucket, ...]
Shape = tuple[int, int]
Tensors = Mapping[int, Tensor]  # by the parameter's place in the map
Move = Callable[[BucketGroup, Tensors], dict[int, Tensor]]


@dataclass(frozen=True)
class StrategyContext:
    """What every strategy is given.

    layout, metas: the map, and this rank's view of it. grid: for the collectives.
    groups: the Muon parameters: index -> parameter group.
    gather_dtype: in which the momentum travels and Newton–Schulz sees it; None: bf16, float64 for float64 models.
    steps: says how many updates were made before this one, skipped steps apart: the same on all ranks, and saved.
    row_moments: returns what NorMuon keeps of a parameter, by its index: of the rows of all matrices that this rank
        orthogonalizes of it; None where it is off.
    """

    layout: Layout
    metas: Sequence[DistMeta]
    grid: Grid
    groups: Mapping[int, dict[str, Any]]
    gather_dtype: torch.dtype | None
    steps: Callable[[], int] = lambda: 0
    row_moments: Callable[[int], Tensor | None] = lambda index: None

    def wire_dtype(self, buckets: BucketGroup) -> torch.dtype:
        """Return the dtype in which the momentum of these buckets travels."""
        grad_dtype = self.layout.buffers[buckets[0].buffer_idx].grad_dtype
        return self.gather_dtype or default_gather_dtype(getattr(torch, grad_dtype))

    def orthogonalize(self, matrices: Tensors) -> dict[int, Tensor]:
        """Run Newton–Schulz on whole matrices; the same for every strategy that holds them whole.

        A parameter that holds several comes TP-local or put together from TP blocks, and falls into them here.
        """
        indices, specs, updates = list(matrices), self.layout.specs, {}
        groups = [self.groups[index] for index in indices]
        divisions = [specs[index].division(matrix.shape, self.grid.tp.size) for index, matrix in matrices.items()]
        for batch in batches(list(matrices.values()), groups, divisions):
            inputs = [matrices[indices[i]] for i in batch]
            rows = [v for i in batch if (v := self.row_moments(indices[i])) is not None]
            results = orthogonalize(inputs, groups[batch[0]], [divisions[i] for i in batch], rows)
            updates.update({indices[i]: update for i, update in zip(batch, results, strict=True)})
        return updates


class Strategy:
    """The map, the five moves, and the rounds in which they are made: bucket by bucket, unless a strategy says other.

    OWN_BUCKETS: the map keeps Muon's matrices in buckets of their own, without which no updates can be published.
    Two facts for `overlap`, which starts collectives and waits for them later:
    STARTS_UNREAD: `start` makes views of what it gathers and reads none of it, so that this need only be under way.
    RETURNS_UNREAD: tp_shard and dp_shard make views of what tp_shard receives, and read none of it.
    """

    OWN_BUCKETS: ClassVar = False
    STARTS_UNREAD: ClassVar = False
    RETURNS_UNREAD: ClassVar = False

    plan: Callable[[Sequence[ParamSpec], Collection[int], int, int, int], Layout]  # of specs, muon, D, T, bucket size
    dp_gather: Move
    tp_gather: Move
    tp_shard: Move
    dp_shard: Move

    def __init__(self, context: StrategyContext) -> None:
        self.context = context

    @staticmethod
    def options(given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the strategy's own options of a group of Muon's, as given or by default; ValueError for nonsense."""
        return {}

    def bucket_groups(self) -> Sequence[BucketGroup]:
        """Return one group per bucket: while one is gathered, no other takes up memory."""
        return [(bucket,) for bucket in self.context.layout.buckets]

    def waves(self, buckets: BucketGroup, indices: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return the matrices `indices`, of which this rank owns pieces, in waves. Ranks that meet in a collective of a
        wave must all have it, also one that has nothing to add."""
        return [indices]

    def start(
        self,
        buckets: BucketGroup,
        momentum: Tensors,  # M[N_dp]
    ) -> dict[int, Tensor]:  # M[I_tp, J]
        """Make the first moves, as far as they can be made ahead of time; tp_gather goes on from there."""
        return self.dp_gather(buckets, momentum)

    @hooked
    def newton_schulz(
        self,
        matrices: Tensors,  # M[I, J]
    ) -> dict[int, Tensor]:  # O[I, J]
        """Whole matrices -> their orthogonalized updates."""
        return self.context.orthogonalize(matrices)

    def works_on(self, index: int) -> bool:
        """Say whether this rank orthogonalizes the matrices of a parameter of which it owns a piece; who does, keeps
        what NorMuon needs of their rows."""
        return True

    def lr_ratio(self, index: int, block: Shape, whole: Shape) -> float:
        """Return by what the learning rate of a matrix is multiplied in this step, not its decay.

        index: the parameter's. block, whole: shape of the matrix in it as this rank holds it, and of all of it.
        """
        return 1.0


def refuse_row_moments(given: Mapping[str, Any], strategy: str) -> None:
    """Raise ValueError for NorMuon in a strategy that orthogonalizes blocks: a row of a block is no row of a matrix."""
    if (beta2 := given.get("normuon_beta2")) is not None:
        raise ValueError(
            f"normuon_beta2 is {beta2!r}, and strategy={strategy!r} orthogonalizes blocks, which may have parts of "
            "rows; take another strategy, or None."
        )


def momentum_label(bucket: Bucket) -> str:
    """Return what the ledger calls the way of this bucket's momentum to those who orthogonalize it, over DP or TP."""
    return f"momentum, {bucket.label}"


def updates_label(bucket: Bucket) -> str:
    """Return what the ledger calls the way back of this bucket's updates, over TP or DP."""
    return f"updates, {bucket.label}"
