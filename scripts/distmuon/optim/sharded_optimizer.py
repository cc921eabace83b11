"""The optimizer around the shards: buffers, gradients, groups, checkpoints, and the one `step` of them all.

A step is ZeRO-1's two outer moves, and between them what a subclass does with its shards (Rajbhandari et al. 2020):

    reduce_scatter   G[I_tp, J]{U_dp}  ->  G[N_dp]     the mean gradient of my shard
    update                                             AdamW in `zero1_adamw`, Muon in `distributed_muon`
    all_gather       W[N_dp]           ->  W[I_tp, J]
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from distmuon.sharding import gradients
from distmuon.sharding.buffers import ShardedBuffers
from distmuon.sharding.grid import Grid
from distmuon.sharding.hooks import hooked
from distmuon.sharding.layout import DEFAULT_BUCKET_SIZE, Bucket

ADAMW_DEFAULTS: dict[str, Any] = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
NON_FINITE_CHOICES = ("raise", "skip")


class ShardedOptimizer(torch.optim.Optimizer):
    """What every optimizer on flat shards is made of. All ranks construct it, and call `step`, together.

    params: parameters, (name, parameter) pairs, or groups of them, TP-local; tensor-parallel layers have marked theirs
        with `tp_split_dim`. Names appear in tables, ledgers and errors.
    grid: the DP x TP grid. bucket_size: elements per bucket, before padding.
    max_norm: clip the global gradient norm to this; None never clips.
    on_nonfinite: "raise" NonFiniteGradient on every rank, or "skip" the step and count it in `skipped_steps` (which is
        not saved). Either way parameters and state stay as they were, and the gradients are dropped.
    options: defaults of the groups: lr, betas, eps, weight_decay.

    `backward` moves gradients out of `.grad` into the flat buffers (see `gradients.Accumulator`): calling it several
    times before `step` accumulates micro-batches in float32. `step` consumes them.
    """

    DEFAULTS: ClassVar = {"adamw": ADAMW_DEFAULTS}  # per algorithm; a group that names none gets the first

    buffers: ShardedBuffers
    statistics: gradients.GradientStatistics  # of the latest step

    def __init__(
        self,
        params: Any,
        grid: Grid,
        *,
        bucket_size: int = DEFAULT_BUCKET_SIZE,
        max_norm: float | None = None,
        on_nonfinite: str = "raise",
        **options: Any,
    ) -> None:
        if on_nonfinite not in NON_FINITE_CHOICES:
            raise ValueError(f"on_nonfinite is {on_nonfinite!r}; choose one of {', '.join(NON_FINITE_CHOICES)}.")
        known = {name for defaults in self.DEFAULTS.values() for name in defaults}
        if unknown := set(options) - known:
            raise TypeError(
                f"unknown option(s) {sorted(unknown)}; {type(self).__name__} has {', '.join(sorted(known))}."
            )
        self.grid, self.max_norm, self.on_nonfinite = grid, max_norm, on_nonfinite
        self.skipped_steps = 0
        self._options, self._laid_out = options, False
        super().__init__(params, {})
        groups = self.param_groups
        named = [pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)]
        self.buffers, self._laid_out = ShardedBuffers(named, grid, bucket_size), True
        self.accumulator = gradients.Accumulator(self.buffers)
        of_parameter = {id(p): group for group in self.param_groups for p in group["params"]}
        self.group_of = [of_parameter[id(p)] for p in self.buffers.parameters]  # by index in the map
        self._adamw_groups = [group for group in self.param_groups if group["algorithm"] == "adamw"]
        self.adamw = self._make_adamw() if self._adamw_groups else None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with its algorithm's defaults; only the constructor may, because the map is laid out once."""
        if self._laid_out:
            raise RuntimeError("the virtual map is laid out once; pass all parameter groups to the constructor.")
        algorithm = param_group.setdefault("algorithm", next(iter(self.DEFAULTS)))
        if algorithm not in self.DEFAULTS:
            raise ValueError(f"algorithm is {algorithm!r}; choose one of {', '.join(self.DEFAULTS)}.")
        defaults = self.DEFAULTS[algorithm]
        for name, value in defaults.items():
            param_group.setdefault(name, self._options.get(name, value))
        if algorithm == "adamw":
            try:  # let torch say what is wrong with a learning rate or beta
                torch.optim.AdamW([torch.zeros(1)], **{name: param_group[name] for name in ADAMW_DEFAULTS})
            except ValueError as error:
                raise ValueError(f"AdamW refuses its group: {error}.") from None
        self._name_parameters(param_group)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters on all ranks; return the closure's loss, if one is given."""
        loss = self._evaluate(closure)
        for bucket in self.buckets:
            self.reduce_scatter(bucket)  # G[I_tp, J]{U_dp} -> G[N_dp]
        if self.check_and_clip():
            self.update()  # W[N_dp] -> W[I_tp, J]
        self.zero_grad()
        return loss

    def update(self) -> None:
        """Turn reduced gradients into new parameters, on every rank: what a subclass is."""
        raise NotImplementedError

    # ---- What a step is made of ---------------------------------------------------------------------------

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self.buffers.buckets

    @hooked
    def reduce_scatter(self, bucket: Bucket) -> None:
        """Replace this rank's shard of the bucket's gradients by their mean over the DP group."""
        whole, shard = self.buffers.gradients_of(bucket)  # [padded], [shard_size]
        self.grid.dp.reduce_scatter(whole, shard, f"gradients, {bucket.label}")
        if self.grid.dp.size > 1:
            shard.div_(self.grid.dp.size)

    @hooked
    def all_gather(self, bucket: Bucket) -> None:
        """Fill the bucket's parameters, in the model's dtype, with every DP rank's master weights."""
        whole, shard = self.buffers.parameters_of(bucket)  # [padded], [shard_size]
        if self.buffers.masters[bucket].dtype != shard.dtype:
            shard.copy_(self.buffers.masters[bucket])
        self.grid.dp.all_gather(shard, f"parameters, {bucket.label}", out=whole)

    @hooked
    def check_and_clip(self) -> bool:
        """Measure the reduced gradients over the grid and clip them; False if all ranks are to skip this step."""
        self.statistics = gradients.statistics(self.buffers, self.accumulator.present)
        if self.statistics.non_finite:
            if self.on_nonfinite == "raise":
                self.zero_grad()
                gradients.require_finite(self.statistics, self.buffers.names)
            self.skipped_steps += 1
            return False
        if self.max_norm is not None:
            gradients.clip_(self.buffers, self.statistics.norm, self.max_norm)
        return True

    @hooked
    def step_adamw(self) -> None:
        """Run AdamW on the pieces of its groups, with the groups' present learning rates."""
        if self.adamw is None:
            return
        for theirs, group in zip(self.adamw.param_groups, self._adamw_groups, strict=True):
            theirs.update({name: group[name] for name in ADAMW_DEFAULTS})
        for piece, weight in self._adamw_pieces:
            weight.grad = piece.gradient if piece.index in self.statistics.present else None
        self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, accumulated or not."""
        self.accumulator.clear()

    def close(self) -> None:
        """Let the parameters go: they stay where they are, and another optimizer may take them."""
        self.accumulator.close()

    def _evaluate(self, closure: Callable[[], float] | None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.accumulator.collect_all()
        return loss

    def _make_adamw(self) -> torch.optim.AdamW:
        pieces = [piece for pieces in self.buffers.pieces.values() for piece in pieces]
        self._adamw_pieces = [
            (piece, nn.Parameter(piece.weight))
            for piece in pieces
            if self.group_of[piece.index]["algorithm"] == "adamw"
        ]
        return torch.optim.AdamW(
            [
                {"params": [weight for piece, weight in self._adamw_pieces if self.group_of[piece.index] is group]}
                for group in self._adamw_groups
            ]
        )

    def _name_parameters(self, group: dict[str, Any]) -> None:
        """Make (name, parameter) pairs of the group's parameters; refuse one that is in use already.

        torch wants names from all groups or from none. What is wrong with the group otherwise, torch will say.
        """
        if isinstance(group["params"], set):
            return
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        names = group.pop("param_names", None) or [f"group{len(self.param_groups)}.{i}" for i in range(len(params))]
        if not any(isinstance(p, tuple) for p in params):
            params = list(zip(names, params, strict=True))
        group |= {"params": params, "param_names": []}
        first = {id(p): name for g in self.param_groups for name, p in zip(g["param_names"], g["params"], strict=True)}
        for name, p in [pair for pair in params if isinstance(pair, tuple)]:
            if id(p) in first:
                raise ValueError(f"parameter {name!r} is given twice (also as {first[id(p)]!r}); give it once.")
            first[id(p)] = name
            gradients.refuse_claimed(name, p)
            if self.grid.tp.size > 1 and not hasattr(p, "tp_split_dim"):
                raise ValueError(
                    f"parameter {name!r} does not say how it is cut over TP, and a wrong guess would go unnoticed; "
                    "mark it (tensor_parallel.mark or mark_replicated). copy.deepcopy and to_empty lose marks."
                )

    # ---- Saving and loading -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard of the state, plus where it belongs. No collective: any rank may call it alone.

        The model's own `state_dict` holds the parameters; master weights are in here where their dtype differs.
        """
        masters = {
            bucket.label: master
            for bucket, master in self.buffers.masters.items()
            if master.dtype != self.buffers.flat_parameters[bucket.buffer_idx].dtype
        }
        adamw = self.adamw.state_dict() if self.adamw else None
        return super().state_dict() | {
            "place": self._place(),
            "adamw": adamw,
            "masters": masters,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned on the same rank of the same grid, with the same map.

        Raises ValueError, saying what differs, for anything else: a shard of another map is not this rank's state.
        """
        saved, mine = state_dict.get("place", {}), self._place()
        if saved != mine:
            key = next(key for key in mine if saved.get(key) != mine[key])
            short = f": {saved.get(key)} instead of {mine[key]}" if key in ("grid", "rank") else ""
            raise ValueError(
                f"this state belongs elsewhere, it has another {key}{short}; load it where it was saved, "
                "on the same rank of the same grid, with the same parameters and bucket size."
            )
        state_dict = copy.deepcopy(state_dict)
        for group, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in theirs.items() if name != "params"})
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.state.clear()  # not super().load_state_dict: it would round float32 momentum to a bf16 parameter's dtype
        self.state.update({parameters[index]: state for index, state in state_dict["state"].items()})
        if self.adamw:
            self.adamw.load_state_dict(state_dict["adamw"])
        self.buffers.refresh_masters()
        for bucket in self.buckets:
            if bucket.label in state_dict["masters"]:
                self.buffers.masters[bucket].copy_(state_dict["masters"][bucket.label])

    def _place(self) -> dict[str, Any]:
        layout, grid = self.buffers.layout, self.grid
        return {
            "grid": (grid.dp.size, grid.tp.size),
            "rank": (grid.dp.rank, grid.tp.rank),
            "set of parameters": [tuple(spec) for spec in layout.specs],
            "division into groups": [(group["algorithm"], len(group["params"])) for group in self.param_groups],
            "global buffer size": layout.global_buffer_size,
        }
