"""The optimizer around the shards: buffers, gradients, groups, and the one `step` of them all.

A step is ZeRO-1's two outer moves, and between them what a subclass does with its shards (Rajbhandari et al. 2020):

    reduce_scatter   G[I_tp, J]{U_dp}  ->  G[N_dp]     the mean gradient of my shard
    update                                             AdamW as `step_adamw` does it, Muon as in `distributed_muon`
    all_gather       W[N_dp]           ->  W[I_tp, J]
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distmuon.optim.adamw import adamw_, begin
from distmuon.optim.options import ADAMW_DEFAULTS, complete_group, options_on_host
from distmuon.optim.param_groups import Watch, list_params, refuse_model
from distmuon.optim.sharded_state import ShardedState, check_max_norm, refuse_inference_mode, refuse_nonfinite_norm
from distmuon.sharding import gradients
from distmuon.sharding.arriving import Arrival
from distmuon.sharding.backward_overlap import BackwardOverlap
from distmuon.sharding.buffers import ShardedBuffers, refuse_elsewhere, refuse_shared_memory
from distmuon.sharding.collectives import numbers_on
from distmuon.sharding.consistency import RankMismatchError, check_same, raise_together
from distmuon.sharding.grid import Grid
from distmuon.sharding.hooks import hooked
from distmuon.sharding.layout import Bucket, Layout, ParamSpec, plan

ALGORITHMS = {"adamw": ADAMW_DEFAULTS}


class ShardedOptimizer(ShardedState):
    """What every optimizer on flat shards is made of. All ranks construct it, and call `step`, together.

    Gradients are reduced in `step`: until then `.grad` is this rank's own, a view of the flat buffer, float32 or wider.
    `backward` called several times adds micro-batches up; what was dropped (`zero_grad`, `p.grad = None`) does not
    count, what was set counts as it is. `step` uses gradients up: `.grad` is None afterwards. Clip with `max_norm` or
    `clip_grad_norm_`: torch's function would see one rank's gradients only. Under `overlap_backward`, gradients are
    sent while the last backward pass goes on.

    params: parameters, (name, parameter) pairs, or groups of them, TP-local; tensor-parallel layers have marked theirs
        with `tp_split_dim`. Names appear in tables, ledgers and errors. `split_parameters` makes such groups.
    grid: a `Grid`, or what `Grid.of` makes one of: a DeviceMesh with dimensions "dp" and "tp", a process group.
    bucket_size: elements per bucket, before padding.
    max_norm: clip the global gradient norm to this; None never clips.
    on_nonfinite: "raise" NonFiniteGradient on every rank, or "skip" the step and count it in `skipped_steps` (which is
        not saved), as under a GradScaler always. Parameters and state stay as they were, the gradients are dropped.
    broadcast: begin with rank 0's values everywhere, as DDP does. Otherwise ranks that do not hold the same values
        raise RankMismatchError together, as they do for other shapes, names, orders or options, then or at any step.
    overlap_forward: let `step` return while new parameters are under way. Whoever uses one waits for its bucket, so
        they arrive under the next forward pass. A traced or scripted module waits for its own when called.
        What else reads parameters without torch's Python functions (a compiled module, `forward` or another method of
        a scripted one, a scripted function, a C++ extension, `torch.utils.dlpack.to_dlpack` or `dist.broadcast` of a
        parameter) needs `wait_for_parameters` first.
    check_every: compare the parameters of all ranks before every so many steps; 0 does where one was seen to be written
        to, `.data` apart. The model's buffers (running means) are nobody's business here: DDP would broadcast them.
    options: defaults of the groups; a subclass names them in its signature.

    state: of every parameter of which this rank owns a piece, n elements: AdamW's step, exp_avg [n], exp_avg_sq [n],
        and master_weight [n] in float32 where the parameter is narrower.
    """

    DEFAULTS = ALGORITHMS  # per algorithm; a group that names none gets the first
    _watch = functools.cached_property(Watch)
    _step_supports_amp_scaling = True  # GradScaler then hands its scale to `step`, where all ranks decide together

    statistics: gradients.GradientStatistics  # of the latest step
    # what `collect` finds, for `check_and_clip`, which lets all ranks hear of it first:
    _refusal: Exception | None
    _present: set[int]  # which parameters have a gradient here
    _touched: bool  # whether one was written to since the last step

    def __init__(
        self,
        params: Any,
        grid: Any,
        options: Mapping[str, Any],
        *,
        bucket_size: int,
        max_norm: float | None,
        on_nonfinite: str,
        broadcast: bool,
        check_every: int,
        overlap_forward: bool,
    ) -> None:
        self.grid, self.max_norm, self.on_nonfinite = Grid.of(grid), max_norm, on_nonfinite
        self.overlap_forward, self._arrivals = overlap_forward, list[Arrival]()
        self.steps, self.skipped_steps, self.check_every = 0, 0, check_every
        self._options, self._laid_out = dict(options), False
        with raise_together(self.grid, "the optimizer", "make the same one on every rank"):
            self._check_arguments(bucket_size, broadcast)
            model_as = "split_parameters(model)" if "muon" in self.DEFAULTS else "model.named_parameters()"
            refuse_model(params, type(self).__name__, model_as)
            super().__init__(params, {})
            self._algorithms = [group["algorithm"] for group in self.param_groups]
            refuse_shared_memory(self._named())
            refuse_elsewhere(self._named(), self.grid.device)
        first = next(iter(self.DEFAULTS.values()))
        self.defaults = first | {name: self._options[name] for name in first.keys() & self._options.keys()}
        with options_on_host(self.param_groups):
            self._agree_at_start(bucket_size, broadcast)
        self.buffers, self._laid_out = ShardedBuffers(self._named(), self.grid, bucket_size, self.plan), True
        self.gradient_views = gradients.GradientViews(self.buffers)
        self._backward = BackwardOverlap(self.buffers, self.gradient_views, lambda bucket: self.reduce_scatter(bucket))
        self.list_masters()
        self._ready: bool | None = None  # whether to update; None: the gradients are not reduced yet
        self._reduced: gradients.Versions = {}  # the gradients when they were

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with its algorithm's defaults; only the constructor may, because the map is laid out once."""
        if self._laid_out:
            raise RuntimeError(
                "the virtual map is laid out once; pass all parameter groups to the constructor, and layers that will "
                "be unfrozen later with them: split_parameters(model, frozen=True)."
            )
        list_params(param_group, type(self).__name__)
        self._watch.take(param_group)
        complete_group(param_group, self.DEFAULTS, self._options, type(self).__name__)
        self._check_options(param_group)
        self._name_parameters(param_group)
        super().add_param_group(param_group)

    @torch._disable_dynamo  # torch.compile(optimizer.step) runs it as it is
    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update the parameters on all ranks; return the closure's loss, if one is given."""
        loss = None
        if not self.state and self._would_overwrite():  # for a state to save: `state_dict` refuses that next
            return loss
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            with options_on_host(self.param_groups):
                if self.reduce(self.max_norm):  # .grad -> G[N_dp]
                    self.update()  # W[N_dp] -> W[I_tp, J]
                    self.buffers.record_versions()
                    self.steps += 1
                else:
                    self._skip()
        except BaseException:
            for name in ("grad_scale", "found_inf"):  # a GradScaler resets them after a step
                self.__dict__.pop(name, None)
            raise
        finally:
            self.zero_grad()
        return loss

    def update(self) -> None:
        """Turn reduced gradients into new parameters, on every rank. This is what subclasses differ in."""
        raise NotImplementedError

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Reduce the gradients and clip their global norm, as torch's function would; return the norm from before.

        To be called on every rank, after the last backward (and a scaler's `unscale_`); `step` then reduces no more. A
        gradient that is not finite gives such a norm, and `step` refuses it or skips. Raises ValueError for a negative
        max_norm and a norm_type other than 2, RuntimeError if called twice before a step and, with error_if_nonfinite,
        for a norm that is not finite.
        """
        max_norm = check_max_norm(max_norm, norm_type)
        self.grid.refuse_one_stage("clip_grad_norm_")
        if self._ready is not None:
            raise RuntimeError("the gradients of this step are clipped already; call step() or zero_grad() next.")
        if self.max_norm is not None:
            max_norm = min(max_norm, check_max_norm(self.max_norm))
        with options_on_host(self.param_groups):
            self.reduce(max_norm)
        if error_if_nonfinite:
            refuse_nonfinite_norm(self.statistics.norm)
        return numbers_on(self.grid.device, [self.statistics.norm], torch.get_default_dtype())[0]

    @contextlib.contextmanager
    def overlap_backward(self) -> Iterator[None]:
        """Send gradients while the backward pass in this block goes on: the last one before `step`.

            with optimizer.overlap_backward():
                loss.backward()
            optimizer.step()

        A bucket sets out when all of its parameters have their gradients; the bits are those of a step without it.
        A parameter that the pass does not use holds its bucket, and those behind it, back until the block ends. On
        gloo, every bucket that is under way takes its memory once more. Gradients that are added, changed, set or
        dropped after they were sent are refused, by RuntimeError: clip with `max_norm` or `clip_grad_norm_`, and let a
        GradScaler unscale in `step`. To skip a batch, leave the block and call `zero_grad`. All ranks enter the block,
        or none: RankMismatchError.
        """
        if self._ready is not None:
            raise RuntimeError("the gradients of this step are clipped already; call step() or zero_grad() next.")
        with self._backward.overlapping():
            yield

    @property
    def waiting_buckets(self) -> list[Bucket]:
        """The buckets whose gradients have not been sent, in the order in which they will be."""
        return self._backward.waiting

    @property
    def arriving_buckets(self) -> list[Bucket]:
        """The buckets whose parameters may still be under way."""
        return [arrival.bucket for arrival in self._arrivals if arrival.pending]

    def wait_for_parameters(self) -> None:
        """Return when all parameters of the latest step are there; see overlap_forward."""
        while self._arrivals:
            self._arrivals[0].wait()
            del self._arrivals[0]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, reduced or not; or set them to zero, as torch does."""
        self._ready, self._reduced = None, {}
        self._backward.forget()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def scale_rows_(self, factors: Mapping[Tensor, Tensor]) -> None:
        """Multiply parameters row by row, between two steps, and master weights with them: a write of the optimizer's.

        factors: {parameter: of each of its rows, [I_tp]}; alike on all DP ranks.

        Where masters are others than the parameters, the buckets concerned are gathered anew.
        """
        self.wait_for_parameters()
        for bucket in self.buffers.scale_rows_(factors):
            self.all_gather(bucket)
        self.buffers.record_versions()

    # ---- What a step is made of ---------------------------------------------------------------------------

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self.buffers.buckets

    @property
    def group_of(self) -> list[dict[str, Any]]:
        """The group of each parameter, by index in the map: as the groups are now, since a load brings new ones."""
        return [group for group in self.param_groups for _ in group["params"]]

    def plan(self, specs: Sequence[ParamSpec], dp: int, bucket_size: int) -> Layout:
        """Return the map of the parameters."""
        return plan(specs, dp, bucket_size)

    def reduce(self, max_norm: float | None) -> bool:
        """Reduce, measure and clip the gradients, once in a step; return whether all of them are finite."""
        if self._scale is not None:
            self.grid.refuse_scaler()
        if self._ready is None:
            self._refusal = self.collect()  # .grad -> G[I_tp, J]{U_dp}
            for bucket in self.waiting_buckets:
                self.reduce_scatter(bucket)  # G[I_tp, J]{U_dp} -> G[N_dp]
            self._ready = self.check_and_clip(max_norm)
            self._backward.learn()
            self._reduced = self.gradient_views.versions(range(len(self.buffers.parameters)))
        elif self.gradient_views.changed(self._reduced):
            raise RuntimeError(
                "gradients were changed after clip_grad_norm_ had reduced them; call backward, clip_grad_norm_ "
                "and step in this order. They are dropped now, and nothing else has changed."
            )
        elif self._scale is not None:
            raise RuntimeError(
                "gradients were clipped before they were unscaled; call scaler.unscale_(optimizer) before "
                "clip_grad_norm_. They are dropped now, and nothing else has changed."
            )
        return self._ready

    def collect(self) -> Exception | None:
        """Bring gradients and parameters home; return why they cannot be trained on, for all ranks to hear of it."""
        self.wait_for_parameters()
        self._backward.finish()
        try:
            refuse_inference_mode()
            self._check_groups()
            self._backward.refuse_changed(unscaled=hasattr(self, "found_inf") and self._scale is None)
            self._touched = self.buffers.rebind_if_moved()
        except (RuntimeError, TypeError, ValueError) as error:
            self._touched, self._present = False, set()
            return error
        self.buffers.refresh_masters()
        self._warn_of_local_clipping()
        self.gradient_views.watch_all()
        waiting = [index for bucket in self.waiting_buckets for index in bucket.params]
        self._present = self._backward.present | self.gradient_views.collect(sorted(waiting))
        if self._scale is not None:
            self.gradient_views.unscale(self._scale)
        return None

    @hooked
    def reduce_scatter(self, bucket: Bucket) -> None:
        """Replace this rank's shard of the bucket's gradients by their mean over DP."""
        whole, shard = self.buffers.gradients_of(bucket)  # [padded], [shard_size]
        self.grid.dp.reduce_scatter(whole, shard, f"gradients, {bucket.label}")  # the sum
        if self.grid.dp.size > 1:
            self.grid.dp.when_there(lambda: shard.div_(self.grid.dp.size))

    @hooked
    def all_gather(self, bucket: Bucket) -> None:
        """Fill the bucket's parameters, in the model's dtype, from all DP ranks' masters."""
        whole, shard = self.buffers.parameters_of(bucket)  # [padded], [shard_size]
        if self.buffers.masters[bucket].dtype != shard.dtype:
            shard.copy_(self.buffers.masters[bucket])
        with self._arriving(bucket):  # at once, or with overlap_forward under the next forward pass
            self.grid.dp.all_gather(shard, f"parameters, {bucket.label}", whole)

    @hooked
    def check_and_clip(self, max_norm: float | None) -> bool:
        """Let all ranks agree on the step, measure the reduced gradients and clip them; False if one is not finite."""
        options = [*self._options_now(max_norm), ("what is trained", str(self._refusal or "fine"))]
        options.append(("overlap_backward", str(self._backward.used)))
        statistics = gradients.statistics(self.buffers, self._present, options, self._touched)
        refusal = self._refusal
        if statistics.agreed and refusal is None:
            refusal = self._unlike_values(statistics.touched)
        self.statistics = gradients.gather_summaries(
            statistics, self.grid, self._step_now(max_norm), refusal is not None
        )
        if not self.statistics.agreed:
            check_same(self.grid, "options", options, "set, load and keep them alike on every rank")
        if refusal:
            raise refusal
        if not self.statistics.stages_agree:
            raise RankMismatchError(
                "the stages of the pipeline do not make the same step: max_norm, on_nonfinite or the number of steps "
                "differ, or one of them has refused its own; set and load them alike on every stage."
            )
        self._watch.look(bool(self.statistics.present))
        if not self.statistics.finite:
            return False
        if max_norm is not None:
            gradients.clip_(self.buffers, self.statistics.norm, max_norm)
        return True

    def _unlike_values(self, touched: bool) -> RankMismatchError | None:
        """Return why this step cannot be made if replicas have come to differ, where they are to be compared.

        Not raised at once: the stages of a pipeline that are well have to hear of it first, or they would wait.
        """
        due = self.check_every and self.steps % self.check_every == 0
        if due or touched:
            try:
                self._check_values("change parameters alike on every rank, or go back to a checkpoint")
            except RankMismatchError as error:
                return error
        return None

    @hooked
    def step_adamw(self) -> None:
        """Run torch's AdamW on the pieces of its groups that have a gradient on some rank."""
        moving = [p for pieces in self.buffers.pieces.values() for p in pieces if p.index in self.statistics.present]
        group_of = self.group_of
        for group in self.param_groups:
            pieces = [piece for piece in moving if group_of[piece.index] is group]
            if group["algorithm"] != "adamw" or not pieces:
                continue
            states = [self.state[self.buffers.parameters[piece.index]] for piece in pieces]
            for piece, state in zip(pieces, states, strict=True):
                begin(state, piece.weight)
            adamw_(group, [piece.weight for piece in pieces], [piece.gradient for piece in pieces], states)

    @contextlib.contextmanager
    def _arriving(self, bucket: Bucket) -> Iterator[None]:
        if not self.overlap_forward:
            yield
            return
        with self.grid.dp.async_collectives() as pending:
            yield
        if pending:
            parameters = [self.buffers.parameters[index] for index in bucket.params]
            self._arrivals.append(Arrival(bucket, pending, parameters))

    def _skip(self) -> None:
        """Count a step in which a gradient is not finite; raise NonFiniteGradient where that is wanted."""
        if self.on_nonfinite == "raise" and not hasattr(self, "found_inf"):  # with it, a GradScaler expects a skip
            gradients.require_finite(self.statistics, self.buffers.names)
        self.skipped_steps += 1

    @property
    def _scale(self) -> Tensor | None:
        """By what a GradScaler, for the length of a step, has scaled this rank's loss."""
        return getattr(self, "grad_scale", None)
