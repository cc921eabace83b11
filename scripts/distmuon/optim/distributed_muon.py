"""Distributed Muon over DP x TP: ZeRO-1 shards, and nine moves around Newton–Schulz.

    reduce_scatter        G[I_tp, J]{U_dp}  ->  G[N_dp]      the mean gradient of my shard
    momentum              G[N_dp]           ->  M[N_dp]      elementwise
      dp_gather           M[N_dp]           ->  M[I_tp, J]   TP-local matrices
        tp_gather         M[I_tp, J]        ->  M[I, J]      whole matrices
          newton_schulz   M[I, J]           ->  O[I, J]
        tp_shard          O[I, J]           ->  O[I_tp, J]
      dp_shard            O[I_tp, J]        ->  O[N_dp]      my pieces of the update
    apply                 W[N_dp], O[N_dp]  ->  W[N_dp]      elementwise
    all_gather            W[N_dp]           ->  W[I_tp, J]

The signs are those of book/notation.md: _tp, _dp: cut over TP, DP; {U_dp}: not yet reduced over DP; N: a flat bucket.
The outer moves are ZeRO-1's, in `sharded_optimizer`; the inner five belong to a strategy.
Source: Moonlight (Liu et al. 2025), Algorithm 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from distmuon.optim import strategies
from distmuon.optim.coefficients import Coefficients
from distmuon.optim.muon import WeightPart, decay_and_apply_, momentum_of_all_, scale
from distmuon.optim.newton_schulz import ComputeDtype, Form, Norm
from distmuon.optim.normalization import InputNorm, OutputNorm
from distmuon.optim.options import GROUP_NOTES, OPTIONS, MomentumKind, ScaleKind, check_dtype, options_among
from distmuon.optim.param_groups import check_muon_parameter, list_params, specs_in_groups
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.optim.sharded_state import NonFinite
from distmuon.optim.states import kept, kept_rows
from distmuon.optim.strategies.strategy import BucketGroup, StrategyContext, Tensors, updates_label
from distmuon.sharding.buffers import Piece
from distmuon.sharding.consistency import raise_together
from distmuon.sharding.grid import Grid
from distmuon.sharding.hooks import hooked
from distmuon.sharding.layout import DEFAULT_BUCKET_SIZE, Bucket, Layout, ParamSpec, Range
from distmuon.sharding.local_views import Boxes, rows_over_tp
from distmuon.sharding.matrices import Matrices
from distmuon.sharding.ownership import padding_warning
from distmuon.sharding.warning import warn_user


class DistributedMuon(ShardedOptimizer):
    """Muon for the groups with `algorithm="muon"` (the default), AdamW for those with `algorithm="adamw"`.

    params, grid, and from bucket_size on: see `ShardedOptimizer`.
    lr to eps: defaults of the groups. lr and weight_decay are for both algorithms, betas and eps for AdamW, everything
        else is Muon's, see `Muon`.
    adamw_lr: another learning rate for AdamW's groups.
    strategy: a name from `strategies.names()`, or the path of a Python file with a strategy of your own.
    strategy_options: defaults of the options that only this strategy has, such as {"whole_every": 5} of "periodic".
    gather_dtype: in which the momentum travels and Newton–Schulz sees it; None: bf16, as in the paper, and float64
        for float64 parameters.
    publish: what the last move sends: the new "parameters", in the model's dtype, or the "updates" as Newton–Schulz
        left them, in the gather dtype, which every rank then takes by itself: to the bit the same, and half the bytes
        of a float32 model. For strategies that keep Muon's matrices in buckets of their own, and models that are
        their own masters.

    state: as in `ShardedOptimizer`, and for Muon's parameters momentum_buffer [n], in the gradient's dtype; of NorMuon
        row_exp_avg_sq, where a matrix is orthogonalized.
    """

    MADE_BY: ClassVar = "DistributedMuon"

    def __init__(
        self,
        params: Any,
        grid: Any,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        momentum_kind: MomentumKind = "sum",
        weight_decay: float = 0.1,
        cautious_decay: bool = False,
        scale: ScaleKind = "match_rms",
        ns_steps: int = 5,
        ns_coefficients: Coefficients = "muon",
        compute_dtype: ComputeDtype = "auto",
        ns_form: Form = "auto",
        ns_norm: Norm = "safe",
        input_norm: InputNorm | None = None,
        output_norm: OutputNorm | None = None,
        normuon_beta2: float | None = None,
        batched: bool = True,
        matrices: Matrices = "whole",
        adamw_lr: float | Tensor | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        strategy: str = "gather_all",
        strategy_options: Mapping[str, Any] | None = None,
        gather_dtype: torch.dtype | None = None,
        publish: str = "parameters",
        bucket_size: int = DEFAULT_BUCKET_SIZE,
        max_norm: float | None = None,
        on_nonfinite: NonFinite = "raise",
        broadcast: bool = False,
        check_every: int = 0,
        overlap_forward: bool = False,
    ) -> None:
        options = options_among(locals(), OPTIONS)
        grid = Grid.of(grid)
        with raise_together(grid, "the strategy", "give every rank the same"):
            chosen = strategies.load(strategy)
            own = chosen.options({})
            check_dtype("gather_dtype", gather_dtype, None)
            if strategy_options is not None and not isinstance(strategy_options, Mapping):
                raise TypeError(
                    f"strategy_options is {strategy_options!r}; give names with values, such as "
                    '{"whole_every": 5} for "periodic".'
                )
            if publish not in strategies.PUBLISHED:
                raise ValueError(f"publish is {publish!r}; choose one of {', '.join(strategies.PUBLISHED)}.")
        self._choices = (("strategy", chosen.__name__), ("gather_dtype", repr(gather_dtype)), ("publish", publish))
        self._chosen, self.published = chosen, publish
        self.DEFAULTS = OPTIONS | {"muon": OPTIONS["muon"] | own}
        super().__init__(
            params,
            grid,
            options | dict(strategy_options or {}),
            bucket_size=bucket_size,
            max_norm=max_norm,
            on_nonfinite=on_nonfinite,
            broadcast=broadcast,
            check_every=check_every,
            overlap_forward=overlap_forward,
        )
        self.muon: dict[int, dict[str, Any]] = {}  # the Muon parameters' groups, by index in the map
        self._look_at_groups()
        layout, metas = self.buffers.layout, self.buffers.metas
        if self.grid.world.rank == 0 and (words := padding_warning(layout)):
            warn_user(words)
        self.strategy = chosen(
            StrategyContext(
                layout, metas, self.grid, self.muon, gather_dtype, lambda: self.steps, row_moments=self._row_moments
            )
        )
        if publish == "updates":
            with raise_together(self.grid, "what is published", 'pass publish="parameters"'):
                self._check_updates_will_do()

    def plan(self, specs: Sequence[ParamSpec], dp: int, bucket_size: int) -> Layout:
        """Return the strategy's map of the parameters."""
        specs, muon = specs_in_groups(specs, self.param_groups, self.grid.tp.size)
        return self._chosen.plan(specs, muon, dp, self.grid.tp.size, bucket_size)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, refusing parameters and options that Muon cannot take; see `ShardedOptimizer`."""
        list_params(param_group, "DistributedMuon")
        self._refuse_others_options(param_group)
        super().add_param_group(param_group)
        if param_group["algorithm"] == "muon":
            for name, parameter in zip(param_group["param_names"], param_group["params"], strict=True):
                check_muon_parameter(name, parameter, param_group["matrices"], self.grid.tp.size)

    def update(self) -> None:
        """Run AdamW on its pieces; then move one bucket group after the other."""
        self.step_adamw()
        for buckets in self.strategy.bucket_groups():
            self.move(buckets)

    def move(self, buckets: BucketGroup) -> None:
        """Take a bucket group from reduced gradients to new parameters, wave by wave."""
        waves = self.strategy.waves(buckets, [piece.index for piece in self._moving(buckets)])
        if self.published == "updates":
            update_pieces: dict[int, Tensor] = {}
            for wave in waves:
                pieces = self.orthogonalize(buckets, wave)  # G[N_dp] -> O[N_dp]
                # views of whole matrices, which must not outlive their wave where others follow
                update_pieces |= {i: o.clone() for i, o in pieces.items()} if len(waves) > 1 else pieces
            self.apply_everywhere(self.gather_updates(buckets, update_pieces))  # -> O, W[I_tp, J]
            return
        for wave in waves:
            self.apply(buckets, self.orthogonalize(buckets, wave))  # G -> O, W[N_dp]
        for bucket in buckets:
            self.all_gather(bucket)  # -> W[I_tp, J]

    def orthogonalize(
        self,
        buckets: BucketGroup,
        wave: Collection[int],
    ) -> dict[int, Tensor]:  # O[N_dp]
        """Take a wave from reduced gradients to updates, by way of whole matrices."""
        momentum = self.momentum(buckets, wave)  # G[N_dp] -> M[N_dp]
        blocks = self.strategy.dp_gather(buckets, momentum)  # -> M[I_tp, J]
        matrices = self.strategy.tp_gather(buckets, blocks)  # -> M[I, J]
        updates = self.strategy.newton_schulz(matrices)  # -> O[I, J]
        update_blocks = self.strategy.tp_shard(buckets, updates)  # -> O[I_tp, J]
        del blocks  # and with them the gathered bucket
        return self.strategy.dp_shard(buckets, update_blocks)  # -> O[N_dp]

    @hooked
    def momentum(
        self,
        buckets: BucketGroup,
        wave: Collection[int] | None = None,
    ) -> dict[int, Tensor]:  # M[N_dp]
        """Update the momentum of this rank's pieces, of a wave or all; return Newton–Schulz's input."""
        pieces = self._moving(buckets, wave)
        fed = momentum_of_all_(
            [self._momentum_buffer(piece) for piece in pieces],
            [piece.gradient for piece in pieces],
            [self.muon[piece.index] for piece in pieces],
        )
        return {piece.index: u for piece, u in zip(pieces, fed, strict=True)}

    @hooked
    def apply(
        self,
        buckets: BucketGroup,
        updates: Tensors,  # O[N_dp]
    ) -> None:
        """Decay and move this rank's master weights; the scale is that of whole matrices."""
        pieces = self._moving(buckets, updates)
        flat = [(p.index, p.weight, updates[p.index], p.meta.range_in_param) for p in pieces]
        self._decay_and_apply(flat)

    @hooked
    def gather_updates(
        self,
        buckets: BucketGroup,
        updates: Tensors,  # O[N_dp]
    ) -> dict[Bucket, Tensor]:  # flat, [padded] each
        """Gather the updates over DP, and the parameters of buckets that are AdamW's."""
        gathered = {}
        for bucket in buckets:
            if self.muon.keys() & set(bucket.params):
                gathered[bucket] = self._gathered_updates(bucket, updates)
            else:
                self.all_gather(bucket)  # W[N_dp] -> W[I_tp, J]
        return gathered

    @hooked
    def apply_everywhere(
        self,
        gathered: Mapping[Bucket, Tensor],  # flat, [padded] each
    ) -> None:
        """Decay and move all parameters of these buckets; every rank does it by itself."""
        homes, metas = self.buffers.parameter_homes, self.buffers.metas
        flat = []
        for bucket, whole in gathered.items():
            for index in sorted(self.statistics.present & set(bucket.params)):
                weight = homes[index].view(-1)  # W[I_tp J]
                place = metas[index].global_range.relative_to(bucket.offset)
                flat.append((index, weight, whole[place.as_slice], Range(0, weight.numel())))
        self._decay_and_apply(flat)

    def _decay_and_apply(self, flat: Sequence[tuple[int, Tensor, Tensor, Range]]) -> None:
        """Decay and move runs of parameters. flat: (parameter, W and O of a run of it, flat, and where that run is)."""
        parts = [
            [WeightPart(weight[run], update[run], lr, factor) for run, lr, factor in self._lr_spans(index, where)]
            for index, weight, update, where in flat
        ]
        decay_and_apply_([weight for _, weight, _, _ in flat], [self.muon[index] for index, *_ in flat], parts)

    def _lr_spans(self, index: int, where: Range) -> Iterator[tuple[slice, float, float]]:
        """Yield (run of elements, counted from where; learning rate; scale) of the matrices there."""
        group = self.muon[index]
        for run, block, whole in self.buffers.layout.specs[index].runs(self.grid.tp.size):
            place = run.intersect(where).relative_to(where.start)
            ratio = self.strategy.lr_ratio(index, block, whole)
            lr = group["lr"] if ratio == 1 else group["lr"] * ratio  # a rate that is a tensor stays one for all
            yield place.as_slice, lr, scale(whole, group["scale"])

    def _gathered_updates(self, bucket: Bucket, updates: Tensors) -> Tensor:  # [padded]
        origin = bucket.shard(self.grid.dp.rank).start
        dtype = self.strategy.context.wire_dtype((bucket,))
        shard = torch.zeros(bucket.shard_size, dtype=dtype, device=self.grid.device)
        for index in updates.keys() & set(bucket.params):
            place = self.buffers.metas[index].local_range.relative_to(origin)
            shard[place.as_slice] = updates[index]
        whole = torch.empty(bucket.padded, dtype=dtype, device=self.grid.device)
        return self.grid.dp.all_gather(shard, updates_label(bucket), whole)

    def _ns_dtype(self, index: int) -> torch.dtype | None:
        if index not in self.muon:
            return None
        buckets = self.buffers.buckets
        return self.strategy.context.wire_dtype(tuple(bucket for bucket in buckets if index in bucket.params))

    def _look_at_groups(self) -> None:
        """Take the groups as they are now, since a load brings new ones; the strategy looks at the same dict."""
        self.muon |= {i: group for i, group in enumerate(self.group_of) if group["algorithm"] == "muon"}

    def _check_options(self, group: Mapping[str, Any]) -> None:
        super()._check_options(group)
        if group["algorithm"] == "muon":
            self._chosen.options(group)

    def _check_groups(self) -> None:
        """Do as any sharded optimizer does, and refuse matrices that the map does not know."""
        super()._check_groups()
        self._look_at_groups()
        specs = self.buffers.layout.specs
        with contextlib.suppress(ValueError):  # it does not fit at all
            if specs_in_groups(specs, self.param_groups, self.grid.tp.size)[0] == list(specs):
                return
        raise RuntimeError(
            "the option matrices was changed, and the map is laid out once; set it back, or make a new optimizer."
        )

    def _check_arguments(self, bucket_size: int, broadcast: bool) -> None:
        self._refuse_others_options(self._options)
        super()._check_arguments(bucket_size, broadcast)

    def _refuse_others_options(self, given: Mapping[str, Any]) -> None:
        """Raise ValueError for an option that only another strategy would heed."""
        known = {name for defaults in self.DEFAULTS.values() for name in defaults}
        for name in sorted(given.keys() - known - {*GROUP_NOTES, "algorithm"}):
            if others := strategies.having(name):
                raise ValueError(
                    f"{name} is {given[name]!r}, which goes with strategy={others[0]!r}; take that, or leave it out."
                )

    def _check_updates_will_do(self) -> None:
        """Raise ValueError where not every rank could take the updates by itself."""
        layout = self.buffers.layout
        for bucket in layout.buckets:
            muon = self.muon.keys() & set(bucket.params)
            buffer = layout.buffers[bucket.buffer_idx]
            if muon and len(muon) < len(bucket.params):
                raise ValueError(
                    'publish="updates" needs Muon\'s matrices in buckets of their own; the strategy "owner" makes such.'
                )
            if muon and buffer.param_dtype != buffer.grad_dtype:
                raise ValueError(
                    f'publish="updates" needs parameters that are their own masters; these are {buffer.param_dtype}.'
                )

    def _moving(self, buckets: BucketGroup, wave: Collection[int] | None = None) -> list[Piece]:
        """Return this rank's Muon pieces that have a gradient on some rank: of a wave, or all."""
        moving = self.statistics.present & self.muon.keys()
        if wave is not None:
            moving &= set(wave)
        return [piece for bucket in buckets for piece in self.buffers.pieces[bucket] if piece.index in moving]

    def _row_moments(self, index: int) -> Tensor | None:  # V, [rows]
        """Return what NorMuon keeps of the matrices that are orthogonalized here; None where it is off."""
        if not (rows := self._rows_kept(index, self.muon[index])):
            return None
        dtype = self._ns_dtype(index)
        assert dtype is not None
        return kept_rows(self.state[self.buffers.parameters[index]], rows, dtype, self.grid.device)

    def _rows_seen(self, index: int) -> Boxes:
        if index not in self.muon or not self.strategy.works_on(index):
            return ()
        return rows_over_tp(self.buffers.layout.specs[index], self.grid.tp.size, self.grid.tp.rank)

    def _momentum_buffer(self, piece: Piece) -> Tensor:  # [n]
        return kept(self.state[self.buffers.parameters[piece.index]], "momentum_buffer", piece.gradient)
