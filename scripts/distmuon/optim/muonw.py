"""MuonW: one optimizer for a whole model, on one device or many.

    fully_shard(model)                        # or not; parallelize_module may come before it
    optimizer = MuonW(model, lr=2e-3)         # hidden matrices to Muon, all else to AdamW

Momentum, decay and the update touch one element at a time and run on what a rank holds. Newton–Schulz does not: pieces
of the momentum travel to the owner of each matrix, who orthogonalizes it once for everybody, and pieces of the update
travel back, in two collectives; `exchange_plan` says who sends what. Matrices of more than `bucket_size` elements on a
rank are taken in waves, with two collectives each, and one wave travels under the work on another.

Sources: two all-to-alls and an owner: dion (Ahn et al. 2025). Muon and AdamW side by side: Moonlight (Liu et al. 2025).
"""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distmuon.optim.adamw import adamw_, begin
from distmuon.optim.batches import batches
from distmuon.optim.coefficients import Coefficients
from distmuon.optim.exchange_plan import Matrix, MatrixShard, Parameter, Plan, Plans
from distmuon.optim.masters import MasterWeights, rounded_once, views_in_place
from distmuon.optim.muon import WeightPart, decay_and_apply_, momentum_of_all_, orthogonalize, scale
from distmuon.optim.newton_schulz import ComputeDtype, Form, Norm
from distmuon.optim.normalization import InputNorm, OutputNorm
from distmuon.optim.options import (
    GROUP_NOTES,
    OPTIONS,
    MomentumKind,
    ScaleKind,
    check_complete,
    check_dtype,
    check_options,
    complete_group,
    options_among,
    options_on_host,
)
from distmuon.optim.param_groups import (
    Watch,
    check_muon_parameters,
    divided,
    list_params,
    name_like_the_others,
    named,
    refuse_model,
    split_parameters,
    withdrawn_if_refused,
)
from distmuon.optim.sharded_state import check_max_norm, refuse_nonfinite_norm
from distmuon.optim.states import check_shapes, kept, kept_rows, rows_kept
from distmuon.sharding.boxes import extent
from distmuon.sharding.collectives import Group, PendingWork, Received, add_up_, numbers_on, waiting_at_the_end
from distmuon.sharding.consistency import RankMismatchError
from distmuon.sharding.grid import UNSCALED_STAGES
from distmuon.sharding.layout import check_bucket_size
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.local_views import LocalView, local
from distmuon.sharding.matrices import Matrices, MatrixLayout
from distmuon.sharding.meshes import refuse_one_of_the_stages, refuse_without_backend, shards
from distmuon.sharding.precision import default_gather_dtype, widest
from distmuon.sharding.tensor_lists import apart, cast, copy_each_, each, runs

WHOLE = MatrixLayout()
TOGETHER = 2**24  # elements of which a few launches take care
HEADER = 4  # elements before a parcel, each a byte of the sender's digest: small integers, exact in any dtype
MOMENTUM_LABEL, UPDATES_LABEL, ROWS_LABEL = "momentum", "updates", "squares of rows"


class Exchange(NamedTuple):
    """What all ranks of a plan send each other, not to be looked at before `pending.wait()`.

    coming: what is in each rank's parcel for this one. received: those parcels.
    """

    plan: Plan
    coming: Sequence[Sequence[MatrixShard]]
    received: Received
    pending: PendingWork

    def pieces(self) -> Iterator[tuple[MatrixShard, Tensor]]:
        """Yield what came, rank by rank."""
        for pieces, tensors in zip(self.coming, self.received.tensors, strict=True):
            yield from zip(pieces, tensors, strict=True)


class MuonW(MasterWeights):
    """Muon for the groups with `algorithm="muon"` (the default), AdamW for those with `algorithm="adamw"`.

    params: a model, which `split_parameters` divides between the two, frozen parameters included and without decay for
        norms and biases; or parameters, (name, parameter) pairs or groups, as for any torch optimizer. Tensors, or
        DTensors of FSDP2, of tensor parallelism or of both, on one mesh or several of the same ranks.
    lr to eps: defaults of the groups. lr and weight_decay are for both algorithms, betas and eps for AdamW, everything
        else is Muon's, see `Muon`. The default lr is AdamW's and does no harm; Muon's best is often a few times that.
    matrices: as of `Muon`; or, with a model, which of its weights are several in one: {"qkv": ("rows", 3)}, see
        `split_parameters`.
    adamw_lr: another learning rate for AdamW's groups.
    gather_dtype: in which momentum and updates travel and Newton–Schulz sees them, on one device as well, so that the
        result does not depend on the number of ranks; None: bf16, and float64 for float64 parameters.
    master_weights: keep a float32 master of every bf16 parameter, 4 bytes for each of its elements, and the rest of its
        state in float32. None: none, and a warning where weight decay is lost to rounding; False: none. Either way a
        bf16 parameter is decayed and moved in float32, and rounded once in a step.
    bucket_size: elements of matrices that a rank is given to orthogonalize at a time, so far as they can be shared out
        evenly; what is more is taken in waves, each with two collectives of its own. None: 25 million, and on a GPU,
        where starting kernels costs more than memory does, 100 million.
    replicas: a group of ranks that hold the same plain tensors and, when `step` is called, the same gradients, as under
        DistributedDataParallel, whose group it is if the model is wrapped already. They share Newton–Schulz.

    A plain tensor is updated by every rank for itself, as torch's optimizers do. A matrix of replicas or of a DTensor
    is orthogonalized by one rank of the group or mesh, for all others. All ranks call `step` together, with gradients
    for the same parameters.

    state: momentum_buffer, or AdamW's step, exp_avg and exp_avg_sq, and perhaps master_weight, placed as the parameter;
        of NorMuon row_exp_avg_sq, plain and whole on every rank, for which a step has one more collective.
    ledger: what this rank has sent.
    skipped_steps: how many, for an infinity under a GradScaler; not saved.

    Raises ValueError for a parameter that it cannot take, naming it and the remedy: at construction, or before anything
    has changed in the first step. Raises RankMismatchError on all ranks where their groups or gradients are not alike.
    """

    DEFAULTS = OPTIONS
    MADE_BY: ClassVar = "MuonW"
    KEPT: ClassVar = (*MasterWeights.KEPT, "_options", "gather_dtype", "bucket_size", "skipped_steps")
    _watch = functools.cached_property(Watch)  # made when first wanted, by copies as well
    _step_supports_amp_scaling = True  # GradScaler then hands its scale to `step`, where all ranks decide together
    _clipped = False  # since the latest step

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
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
        matrices: Matrices | Mapping[str, Matrices] = "whole",
        adamw_lr: float | Tensor | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        gather_dtype: torch.dtype | None = None,
        master_weights: bool | None = None,
        bucket_size: int | None = None,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self._options = options_among(locals(), self.DEFAULTS)
        if several := matrices if isinstance(matrices, Mapping) else None:
            self._options["matrices"] = self.DEFAULTS["muon"]["matrices"]
            if not isinstance(params, nn.Module):
                raise ValueError(
                    f"matrices is {matrices!r}, which names weights of a model; give MuonW the model, or make groups "
                    "with split_parameters(model, matrices=...)."
                )
        self.choose_masters(master_weights)
        check_dtype("gather_dtype", gather_dtype, None)
        if bucket_size is not None:
            check_bucket_size(bucket_size)
        if replicas is not None and not isinstance(replicas, dist.ProcessGroup):
            raise TypeError(
                f"replicas is {replicas!r}; give a process group that this rank is in, such as torch.distributed."
                "group.WORLD, or None."
            )
        self.gather_dtype, self.bucket_size, self.skipped_steps = gather_dtype, bucket_size, 0
        if replicas is None and isinstance(params, DistributedDataParallel):
            replicas = params.process_group
        self._begin(replicas)
        if isinstance(params, nn.Module):
            params = split_parameters(params, frozen=True, decay_vectors=False, matrices=several)
        refuse_model(params, "MuonW", "the model, or groups of its parameters")
        super().__init__(params, {})
        self.defaults = {name: self._options[name] for name in self.DEFAULTS["muon"]}  # what schedulers look at

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with its algorithm's defaults, refusing what it cannot take. A later one is `divided`."""
        list_params(param_group, "MuonW")
        self._watch.take(param_group)
        name_like_the_others(self, param_group)
        with withdrawn_if_refused(self):
            for group in divided(param_group) if self.defaults else [param_group]:
                complete_group(group, self.DEFAULTS, self._options, "MuonW")
                super().add_param_group(group)
                self._check(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a copied, unpickled or loaded state; plans are made anew. A copy shares no work with its replicas."""
        super().__setstate__(state)
        if "_plans" not in self.__dict__:
            self._begin()

    def _begin(self, replicas: dist.ProcessGroup | None = None) -> None:
        self.ledger, self.replicas = Ledger(), replicas
        self._plans = Plans(self.gather_dtype, self.bucket_size, self.ledger, replicas)
        self._compares = replicas is not None

    @torch._disable_dynamo  # torch.compile(optimizer.step) runs it as it is
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the closure's loss, if one is given. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with options_on_host(self.param_groups):
            self._step()
        return loss

    def _step(self) -> None:
        """Make a step under the options of this moment, which are in the host's memory."""
        plans, moves = self._plans_now(), bool(self._moving())
        self._watch.look(moves)
        if not self._unscale():
            self.skipped_steps += 1
            return
        refusal, self._clipped = self._refusal(), False
        if refusal:
            self._refuse(plans, refusal)
        self.warn_of_lost_decay()
        self._step_muon(plans)
        self._step_adamw()
        self._compares = self._compares and not moves

    def _step_muon(self, plans: Sequence[Plan]) -> None:
        """Move wave by wave. Under the work on one, the momentum of the next and the updates of the last travel."""
        if not plans:
            return
        started, returned = list[PendingWork](), deque[Exchange]()
        with waiting_at_the_end(started):
            ahead = self._start_gather(plans[0], self._digest(plans), started)
            ahead.pending.wait()
            _refuse_different(ahead)
            for plan, following in zip(plans, (*plans[1:], None), strict=True):
                gathering = ahead
                gathering.pending.wait()
                if following is not None:
                    ahead = self._start_gather(following, [], started)
                updates = self._orthogonalize(plan, self._matrices(gathering))
                returned.append(self._start_return(plan, updates, started))
                if len(returned) > 1:
                    self._apply(returned.popleft())
            while returned:
                self._apply(returned.popleft())
        self._share_row_moments(plans)

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        stages: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """Clip the gradients' global norm, as torch's function does; return the norm from before, alike on all ranks.

        To be called on every rank, after the last backward (and a scaler's `unscale_`). On one mesh torch's function is
        as good; it takes no gradients of two meshes, where tensor parallelism and experts leave them under FSDP2.

        stages: the ranks that have this rank's place in the other stages of a pipeline, `mesh.get_group("pp")`, of
            which each has an optimizer of its own. All call this together, and clip by the norm of the whole model; a
            parameter that two stages hold a copy of counts in each.
        Raises ValueError for a negative max_norm, a norm_type other than 2, and on a stage that is not given the
        others; with error_if_nonfinite RuntimeError for a norm that is not finite.
        """
        max_norm = check_max_norm(max_norm, norm_type)
        if max_norm < math.inf and stages is None:
            remedy = 'give it the others: clip_grad_norm_(max_norm, stages=mesh.get_group("pp"))'
            refuse_one_of_the_stages(self.param_groups, "clip_grad_norm_", remedy)
        self._plans_now()
        moving = self._moving()
        for name, p, _ in moving:
            _check_gradient(name, p)
        devices = (local(p).device for group in self.param_groups for p in group["params"])
        device = next(devices, torch.device("cpu"))
        squares = torch.zeros(1, dtype=widest(device), device=device)
        if held := [p for _, p, _ in moving if local(p).numel()]:
            norms = torch._foreach_norm([_local_gradient(p, p.dtype) for p in held], dtype=squares.dtype)
            # so many ranks hold the same part
            counted = numbers_on(device, [shards(p) / self._plans.everybody.size for p in held], squares.dtype)
            squares += torch.stack(norms).square_().mul_(counted).sum()
        squares = self._plans.everybody.all_reduce(squares, "norm")
        if stages is not None:  # gathered, since all ranks of a stage must have the sum to the bit
            theirs = Group.of_process_group("pp", stages, self.ledger).all_gather(squares, "norm")
            add_up_(squares, theirs.view(-1, 1))
        norm = squares.sqrt()[0]
        wanted = max_norm / (norm + 1e-6)  # torch's formula
        factor, number = torch.stack([wanted, norm]).tolist()  # on a GPU the only wait
        if error_if_nonfinite:
            refuse_nonfinite_norm(number)
        self._clipped = True
        if not factor >= 1:
            each("mul_", [local(gradient) for _, _, gradient in moving], factor)
        return norm

    def _unscale(self) -> bool:
        """Under a GradScaler, divide the gradients by its scale; False, on all ranks, where any found an infinity."""
        if (found := getattr(self, "found_inf", None)) is None:
            return True
        refuse_one_of_the_stages(self.param_groups, "a GradScaler", UNSCALED_STAGES)
        if self._plans.everybody.all_reduce(found.detach().clone().view(1), "found_inf").item():
            return False
        if (factor := getattr(self, "grad_scale", None)) is not None:
            for _, _, gradient in self._moving():
                local(gradient).mul_(factor.to(widest(factor.device)).reciprocal().to(gradient.dtype))
        return True

    def local_views(self) -> list[LocalView]:
        """Return what this rank holds of every parameter; see `LocalView`. No collective."""

        def feeds(group: Mapping[str, Any], p: Tensor) -> torch.dtype | None:
            return (self.gather_dtype or default_gather_dtype(p.dtype)) if group["algorithm"] == "muon" else None

        return views_in_place(self, feeds)

    # ---- Muon's moves -------------------------------------------------------------------------------------

    def _start_gather(self, plan: Plan, header: Sequence[int], started: list[PendingWork]) -> Exchange:
        """Let pieces of the momentum set out for the owners of their matrices."""
        momenta = self._momenta(plan)
        parcels = [[momenta[piece.matrix[0]][plan.here(piece)] for piece in to] for to in plan.parcels.out]
        return self._exchange(plan, parcels, plan.parcels.coming, MOMENTUM_LABEL, started, header)

    def _matrices(self, gathering: Exchange) -> dict[Matrix, Tensor]:  # M[A, B], or the box of a kernel
        """Put together the matrices that this rank owns."""
        plan, found = gathering.plan, {}
        for matrix in plan.parcels.mine:
            box, _ = plan.parcels.whole(matrix)
            found[matrix] = torch.empty(extent(box), dtype=plan.dtype, device=plan.device)
        copy_each_((found[piece.matrix][plan.inside(piece)], values) for piece, values in gathering.pieces())
        return found

    def _momenta(self, plan: Plan) -> list[Tensor]:  # U, as this rank holds the parameter
        """Update the momentum; return what Newton–Schulz is fed, zeros where there is no gradient."""
        found: dict[int, Tensor] = {}
        for places in self._together(plan):
            buffers, gradients = [], []
            for p in (plan.parameters[place].tensor for place in places):
                buffers.append(local(kept(self.state[p], "momentum_buffer", p, self.kept_dtype(p))))
                gradients.append(_local_gradient(p, self.kept_dtype(p)))
            groups = [self.param_groups[plan.parameters[place].group] for place in places]
            fed = momentum_of_all_(buffers, gradients, groups)
            found.update(zip(places, cast(fed, plan.dtype), strict=True))
        return [
            found[place] if place in found else torch.zeros_like(local(p), dtype=plan.dtype)
            for place, (_, p, _) in enumerate(plan.parameters)
        ]

    def _together(self, plan: Plan) -> Iterator[list[int]]:
        """Yield the places of parameters with a gradient, in runs that are large enough for a launch, and no larger.

        What is made for each of a run, such as float32 of a bf16 weight, is alive for all of it at once.
        """
        places = [place for place, (_, p, _) in enumerate(plan.parameters) if p.grad is not None]
        held = [local(plan.parameters[place].tensor) for place in places]
        return runs(places, [tensor.numel() for tensor in held], TOGETHER if apart(held) else 0)

    def _orthogonalize(
        self,
        plan: Plan,
        matrices: Mapping[Matrix, Tensor],  # M; used up
    ) -> dict[Matrix, Tensor]:  # O, as the matrices
        """Run Newton–Schulz on what this rank owns and has a gradient for."""
        keys = [key for key in matrices if plan.parameters[key[0]].tensor.grad is not None]
        flat = [matrices[key].view(plan.parcels.whole(key)[1]) for key in keys]
        groups = [self.param_groups[plan.parameters[index].group] for index, _ in keys]
        found, rows = dict(matrices), self._row_moments(plan)
        for batch in batches(flat, groups, [WHOLE] * len(keys)):
            own = [rows[keys[i]] for i in batch if keys[i] in rows]
            updates = orthogonalize([flat[i] for i in batch], groups[batch[0]], [WHOLE] * len(batch), own)
            for i, update in zip(batch, updates, strict=True):
                found[keys[i]] = update.view(matrices[keys[i]].shape)
        return found

    def _row_moments(self, plan: Plan) -> dict[Matrix, Tensor]:  # V, [A] each
        """Return what NorMuon keeps of the matrices that have a gradient, of all in the plan, in the state's memory."""
        found = dict[Matrix, Tensor]()
        for place, (_, p, number) in enumerate(plan.parameters):
            if p.grad is not None and (rows := rows_kept(p, self.param_groups[number])):
                lengths = [shape[0] for _, shape in plan.parcels.parameters[place].matrices]
                parts = kept_rows(self.state[p], rows, plan.dtype, plan.device).split(lengths)
                found |= {(place, which): part for which, part in enumerate(parts)}
        return found

    def _share_row_moments(self, plans: Sequence[Plan]) -> None:
        """Let everybody have what owners have just updated, so that any rank can save it, or own the matrix next time.

        A few numbers for each matrix, added up over ranks of which one has more than zeros.
        """
        found: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}  # V, and what this rank adds
        for plan in [plan for plan in plans if plan.group.size > 1]:
            mine = set(plan.parcels.mine)
            for matrix, v in self._row_moments(plan).items():
                found.setdefault(v.dtype, []).append((v, v if matrix in mine else torch.zeros_like(v)))
        for pairs in found.values():
            total = self._plans.everybody.all_reduce(torch.cat([own for _, own in pairs]), ROWS_LABEL)
            copy_each_(zip([v for v, _ in pairs], total.split([v.numel() for v, _ in pairs]), strict=True))

    def _start_return(
        self,
        plan: Plan,
        updates: Mapping[Matrix, Tensor],  # O
        started: list[PendingWork],
    ) -> Exchange:
        """Let updates set out for those who hold a piece of the matrix."""
        parcels = [[updates[piece.matrix][plan.inside(piece)] for piece in to] for to in plan.parcels.back]
        return self._exchange(plan, parcels, plan.parcels.returning, UPDATES_LABEL, started)

    def _apply(self, returning: Exchange) -> None:
        """Decay and move what this rank holds; the scale is that of whole matrices."""
        returning.pending.wait()
        plan = returning.plan
        of_parameter: list[list[tuple[MatrixShard, Tensor]]] = [[] for _ in plan.parameters]
        for piece, update in returning.pieces():
            of_parameter[piece.matrix[0]].append((piece, update))
        for places in self._together(plan):
            groups = [self.param_groups[plan.parameters[place].group] for place in places]
            with contextlib.ExitStack() as rounded:
                weights, parts = list[Tensor](), list[list[WeightPart]]()
                for place, group in zip(places, groups, strict=True):
                    p = plan.parameters[place].tensor
                    weight = rounded.enter_context(rounded_once(local(p), self.master(p)))
                    weights.append(weight)
                    parts.append([])
                    for piece, update in of_parameter[place]:
                        factor = scale(plan.parcels.whole(piece.matrix)[1], group["scale"])
                        parts[-1].append(WeightPart(weight[plan.here(piece)], update, group["lr"], factor))
                decay_and_apply_(weights, groups, parts)

    def _exchange(
        self,
        plan: Plan,
        parcels: Sequence[Sequence[Tensor]],  # for every rank, tensors of the plan's dtype
        coming: Sequence[Sequence[MatrixShard]],
        label: str,
        started: list[PendingWork],
        header: Sequence[int] = (),
    ) -> Exchange:
        """Send every rank its parcel, behind a header if there is one. Collective; it is only started."""
        shapes = [[extent(piece.box) for piece in pieces] for pieces in coming]
        with plan.group.async_collectives() as pending:
            received = plan.group.exchange(parcels, shapes, label, numbers_on(plan.device, header, plan.dtype))
        started.append(pending)
        return Exchange(plan, coming, received, pending)

    # ---- AdamW --------------------------------------------------------------------------------------------

    def _step_adamw(self) -> None:
        """Run torch's AdamW on what this rank holds of its groups' parameters."""
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None and group["algorithm"] == "adamw"]
            for p in moving:
                begin(self.state[p], p, self.kept_dtype(p))
            if moving:
                masters = [self.master(p) for p in moving]
                weights = [local(p) if master is None else master for p, master in zip(moving, masters, strict=True)]
                gradients = [_local_gradient(p, self.kept_dtype(p)) for p in moving]
                states = [{name: local(value) for name, value in self.state[p].items()} for p in moving]
                adamw_(group, weights, gradients, states)
                for p, master in zip(moving, masters, strict=True):
                    if master is not None:
                        local(p).copy_(master)

    # ---- Checks -------------------------------------------------------------------------------------------

    def _digest(self, plans: Sequence[Plan], *more: str) -> list[int]:  # [HEADER]
        """Return what ranks must have alike in this step, as a few small numbers: options, and who has gradients."""
        options = [{k: str(v) for k, v in group.items() if k not in GROUP_NOTES} for group in self.param_groups]
        moving = [p for plan in plans for p in plan.parameters if p.tensor.grad is not None]
        more += tuple(self._seen_by_replicas(moving))
        what = (options, [p.name for p in moving], bool(self.master_weights), *more)
        return list(zlib.crc32(repr(what).encode()).to_bytes(HEADER, "little"))

    def _seen_by_replicas(self, moving: Sequence[Parameter]) -> list[str]:
        """Return, in the first step, what is alike on replicas only if their gradients were averaged: their norms."""
        norms = [gradient.norm() for _, p, _ in moving if self._compares and (gradient := p.grad) is not None]
        return [str(norm) for norm in torch.stack(norms).tolist()] if norms else []

    def _check(self, group: dict[str, Any]) -> None:
        """Raise ValueError or TypeError, naming what is wrong with the options or parameters of a group."""
        check_options(group)
        for name, p in named(group):
            refuse_without_backend(name, p)
        if group["algorithm"] == "muon":
            check_muon_parameters(group)

    def _plans_now(self) -> list[Plan]:
        """Return the plans for the groups as they are; ValueError for groups that lack what every plan asks for."""
        for group in self.param_groups:
            check_complete(group, self.DEFAULTS, "MuonW")
        return self._plans.of(self.param_groups, self.state)

    def _moving(self) -> list[tuple[str, Tensor, Tensor]]:
        """Return all parameters that have a gradient: (name, parameter, gradient)."""
        return [(n, p, p.grad) for group in self.param_groups for n, p in named(group) if p.grad is not None]

    def _refusal(self) -> Exception | None:
        """Return why this step cannot be made, looked for before anything changes."""
        try:
            if self._clipped and getattr(self, "grad_scale", None) is not None:
                raise RuntimeError(
                    "gradients were clipped before they were unscaled; call scaler.unscale_(optimizer) before "
                    "clip_grad_norm_. Drop these, for they are clipped by a norm that the scale has enlarged."
                )
            for group in self.param_groups:
                check_options(group)
                for name, p in named(group):
                    if p.grad is not None:
                        _check_gradient(name, p)
                        check_shapes(name, p, self.state.get(p, {}), rows_kept(p, group))
        except (RuntimeError, TypeError, ValueError) as error:
            return error
        return None

    def _refuse(self, plans: Sequence[Plan], refusal: Exception) -> NoReturn:
        """Raise the refusal, once the other ranks, which may have none, have heard of it in the first exchange.

        They say that this rank differs, and this rank says how.
        """
        if plans:
            plan = plans[0]
            nothing = [
                [torch.zeros(extent(p.box), dtype=plan.dtype, device=plan.device) for p in to]
                for to in plan.parcels.out
            ]
            header = self._digest(plans, str(refusal))
            self._exchange(plan, nothing, plan.parcels.coming, MOMENTUM_LABEL, [], header).pending.wait()
        raise refusal


def _local_gradient(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what this rank holds of the gradient."""
    assert parameter.grad is not None
    return local(parameter.grad).to(dtype)


def _check_gradient(name: str, parameter: Tensor) -> None:
    """Raise RuntimeError for a gradient that is placed in another way, is still to be summed, or is sparse."""
    gradient = parameter.grad
    assert gradient is not None
    if getattr(gradient, "placements", None) != getattr(parameter, "placements", None):
        how = getattr(gradient, "placements", "a plain tensor")
        raise RuntimeError(
            f"the gradient of {name!r} is {how}, the parameter {getattr(parameter, 'placements', 'is one')}; "
            "redistribute it to the parameter's placements first."
        )
    if gradient.is_sparse:
        raise RuntimeError(f"parameter {name!r} has a sparse gradient; MuonW takes dense ones (sparse=False).")


def _refuse_different(gathering: Exchange) -> None:
    """Raise RankMismatchError, on all ranks of the group, where their headers are not alike."""
    heads = gathering.received.heads
    if len(heads) < 2 or (torch.stack(heads) == heads[0]).all():  # which on a GPU is the step's only wait
        return
    others = ", ".join(str(rank) for rank, head in enumerate(heads) if not torch.equal(head, heads[0]))
    if isinstance(gathering.plan.parameters[0].tensor, DTensor):
        raise RankMismatchError(
            f"rank(s) {others} step with other options, or with gradients for other parameters, than rank 0; "
            "set options alike on every rank, and let every rank's loss reach the same parameters."
        )
    raise RankMismatchError(
        f"replica(s) {others} step with other gradients or options than replica 0; average gradients "
        "before the step, as DistributedDataParallel does, and set options alike on every rank."
    )
