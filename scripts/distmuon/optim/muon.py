"""Muon on one device, and the four pieces of arithmetic that every distributed form reuses unchanged.

    M_t = mu M_{t-1} + G_t                              momentum     (elementwise: works on a flat shard)
    U_t = mu M_t + G_t                                  Nesterov     (elementwise)
    O_t = NewtonSchulz(U_t)                             needs the whole matrix
    W_t = W_{t-1} - lr (scale(A, B) O_t + lambda W_{t-1})   decay, apply (elementwise)

Source: Moonlight (Liu et al. 2025, arXiv 2502.16982), equations 1 to 4; Muon (Jordan et al. 2024). Everything but
Newton–Schulz touches one element at a time, which is why ZeRO-1 can run it on shards.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from distmuon.optim.batches import batches, matrices_in
from distmuon.optim.coefficients import Coefficients
from distmuon.optim.fast_paths import batching_pays
from distmuon.optim.masters import MasterWeights, rounded_once, views_in_place
from distmuon.optim.newton_schulz import ComputeDtype, Form, Norm, newton_schulz_
from distmuon.optim.normalization import InputNorm, OutputNorm, adapt_rows_, equalize_input_, normalize_output_
from distmuon.optim.options import (
    MUON_DEFAULTS,
    NS_OPTIONS,
    MomentumKind,
    ScaleKind,
    check_complete,
    check_dtype,
    check_muon_options,
    options_among,
    options_on_host,
    refuse_unknown_in_group,
)
from distmuon.optim.param_groups import (
    Watch,
    check_muon_parameters,
    list_params,
    name_like_the_others,
    named,
    refuse_model,
    withdrawn_if_refused,
)
from distmuon.optim.states import check_shapes, kept, kept_rows, rows_kept
from distmuon.sharding.hooks import NEWTON_SCHULZ, of_kind
from distmuon.sharding.local_views import LocalView
from distmuon.sharding.matrices import Matrices, MatrixLayout, parts
from distmuon.sharding.tensor_lists import apart, cast, copy_each_, each, places_by, runs

# ---- The arithmetic ---------------------------------------------------------------------------------------


def momentum_(
    buffers: list[Tensor],  # M, each [...]: matrices or flat shards of them; overwritten
    gradients: list[Tensor],  # G, as the buffers
    momentum: float,  # mu
    nesterov: bool = True,
    kind: str = "sum",
) -> list[Tensor]:  # U, as the buffers
    """Update the momentum `buffers` in place; return what Newton–Schulz is fed, new tensors.

    kind: "sum", M <- mu M + G (the paper), or "average", M <- mu M + (1 - mu) G (torch,
    Jordan's code). With Nesterov the second applies the same rule once more. The two differ
    by the factor 1 - mu, which Newton–Schulz divides out.
    """
    if kind == "average":
        # M_t = mu M_{t-1} + (1 - mu) G_t
        each("lerp_", buffers, gradients, 1 - momentum)
    else:
        # M_t = mu M_{t-1} + G_t
        each("mul_", buffers, momentum)
        each("add_", buffers, gradients)
    if not nesterov:
        return [buffer.clone() for buffer in buffers]
    if kind == "average":
        # U_t = mu M_t + (1 - mu) G_t
        return each("lerp", gradients, buffers, momentum)
    # U_t = mu M_t + G_t
    return each("add", gradients, buffers, alpha=momentum)


def scale(shape: Sequence[int], kind: str = "match_rms") -> float:
    """Return the factor on the orthogonalized update of a matrix, from its *full* shape [A, B].

    "match_rms": 0.2 sqrt(max(A, B)); a semi-orthogonal [A, B] has RMS 1/sqrt(max(A, B))
    (Moonlight, Lemma 1), so the update's RMS becomes 0.2, about AdamW's, whose learning rate
    and decay are then safe; the best rate is often a few times as high. "original":
    sqrt(max(1, A / B)) (Jordan et al. 2024). "unit_rms": sqrt(A / B), with which inputs of RMS 1
    are moved by an RMS of about 1, whatever the shape (Bernstein 2024; Pethick et al. 2025),
    and which Megatron calls unit_rms_norm.
    """
    a, b = shape
    if kind == "match_rms":
        # 0.2 sqrt(max(A, B))
        return 0.2 * math.sqrt(max(a, b))
    if not b:
        return 1.0
    # sqrt(A / B), or sqrt(max(1, A / B))
    return math.sqrt(a / b if kind == "unit_rms" else max(1.0, a / b))


def decay_(
    weights: list[Tensor],  # W, each [...]; overwritten
    lr: float,
    weight_decay: float,  # lambda
) -> None:
    """Take decoupled weight decay in place."""
    # W <- (1 - lr lambda) W
    each("mul_", weights, 1 - lr * weight_decay)


def decay_cautiously_(
    weights: list[Tensor],  # W, each [...]; overwritten
    updates: Sequence[Tensor],  # O, as the weights
    lr: float,
    weight_decay: float,  # lambda
) -> None:
    """Take decay in place where the update makes the weight smaller, too (Chen et al. 2025, arXiv 2510.12402)."""
    signs = each("sign", weights)
    for (dtype, of_update), places in places_by((w.dtype, o.dtype) for w, o in zip(weights, updates, strict=True)):
        # widened before it is asked for its sign, and narrowed after, since what is tiny would become 0
        wide = cast([updates[i] for i in places], torch.promote_types(dtype, of_update))
        each("mul_", [signs[i] for i in places], cast(each("sign", wide), dtype))
    # 1 where W O >= 0, else 0
    each("add_", each("clamp_max_", signs, 0), 1)
    # W <- (1 - lr lambda) W where W O >= 0: to the bit, because lerp returns its ends as they are
    each("lerp_", weights, each("mul", weights, 1 - lr * weight_decay), signs)


def apply_(
    weights: list[Tensor],  # W, each [...]; overwritten
    updates: Sequence[Tensor],  # O, as the weights, of any dtype
    lr: float,
    factor: float,  # scale(A, B)
) -> None:
    """Take the step in place, in the dtype of each weight."""
    # a dtype that the weight's holds is widened inside the sum, without a copy
    fitting = [
        o if torch.promote_types(w.dtype, o.dtype) == w.dtype else o.to(w.dtype)
        for w, o in zip(weights, updates, strict=True)
    ]
    # W <- W - lr scale(A, B) O
    each("add_", weights, fitting, alpha=-lr * factor)


class WeightPart(NamedTuple):
    """A part of a weight that moves by itself: W and O, alike in shape, the learning rate, and scale(A, B)."""

    weight: Tensor
    update: Tensor
    lr: float
    factor: float


def momentum_of_all_(
    buffers: list[Tensor],  # M, each [...]; overwritten
    gradients: list[Tensor],  # G, as the buffers
    groups: Sequence[Mapping[str, Any]],  # the parameter group of each
) -> list[Tensor]:  # U, as the buffers
    """Update momentum under the options of many groups: on a GPU a few launches for all tensors that share them."""
    inputs: list[Any] = [None] * len(buffers)
    settings = [(_number(g["momentum"]), g["nesterov"], g["momentum_kind"]) for g in groups]
    for (options, _), places in places_by((s, m.dtype) for s, m in zip(settings, buffers, strict=True)):
        fed = momentum_([buffers[i] for i in places], [gradients[i] for i in places], *options)
        for i, u in zip(places, fed, strict=True):
            inputs[i] = u
    return inputs


def decay_and_apply_(
    weights: list[Tensor],  # W, each [...]; overwritten
    groups: Sequence[Mapping[str, Any]],  # the parameter group of each
    parts: Sequence[Sequence[WeightPart]],  # of each: all that it consists of
) -> None:
    """Decay and move weights under the options of many groups, as `momentum_of_all_` does."""
    settings = [(_number(g["lr"]), _number(g["weight_decay"]), g["cautious_decay"]) for g in groups]
    for (lr, weight_decay, cautious), places in places_by(settings):
        if cautious:
            found = [part for i in places for part in parts[i]]
            decay_cautiously_([part.weight for part in found], [part.update for part in found], lr, weight_decay)
        else:
            decay_([weights[i] for i in places], lr, weight_decay)
    every = [part for of_weight in parts for part in of_weight]
    for (lr, factor), places in places_by((_number(part.lr), part.factor) for part in every):
        apply_([every[i].weight for i in places], [every[i].update for i in places], lr, factor)


def _number(option: Any) -> Any:
    """Return an option as a number or a tensor, which can be keys; one that is an array of numpy's cannot."""
    return option if isinstance(option, Tensor) else float(option)


@of_kind(NEWTON_SCHULZ)
def orthogonalize(
    inputs: Sequence[Tensor],  # n matrices [A, B]; or whatever holds several
    group: Mapping[str, Any],
    divisions: Sequence[MatrixLayout] = (),
    moments: Sequence[Tensor] = (),  # V, [rows] each, if the group wants NorMuon; updated
) -> Sequence[Tensor]:  # as the inputs
    """Run Newton–Schulz on every matrix in the inputs, under one group's options.

    divisions: how each input falls into matrices, where that is not what the group's option says. Inputs that are one
        matrix each have one shape.
    moments: of the rows of all matrices in each input, matrix by matrix.
    The inputs are used up: one that comes alone, or holds several matrices, is overwritten by its result.
    """
    divisions = divisions or [MatrixLayout(group["matrices"])] * len(inputs)
    if any(division.matrices != "whole" for division in divisions):
        return _orthogonalize_parts([x.contiguous() for x in inputs], divisions, group, moments)
    stack = torch.stack(list(inputs)) if len(inputs) > 1 else inputs[0].unsqueeze(0)  # [n, A, B]
    return _orthogonalize_(stack, group, moments).unbind()


def _orthogonalize_(
    stack: Tensor,  # [n, A, B]; overwritten
    group: Mapping[str, Any],
    moments: Sequence[Tensor] = (),  # V, [A] each, or [k, A] of k matrices; updated
) -> Tensor:  # the same tensor
    """Run Newton–Schulz, and what a group wants before and after it."""
    if group["input_norm"]:
        equalize_input_(stack, group["input_norm"])
    newton_schulz_(stack, *(group[name] for name in NS_OPTIONS))
    if group["output_norm"]:
        normalize_output_(stack, group["output_norm"])
    if group["normuon_beta2"] is not None:
        v = torch.cat([v.view(-1, stack.shape[1]) for v in moments])  # [n, A]
        adapt_rows_(stack, v, group["normuon_beta2"])
        updated = v.split([v.numel() // stack.shape[1] for v in moments])
        copy_each_((old, new.view(old.shape)) for old, new in zip(moments, updated, strict=True))
    return stack


def _orthogonalize_parts(
    inputs: Sequence[Tensor],  # contiguous; overwritten
    divisions: Sequence[MatrixLayout],
    group: Mapping[str, Any],
    moments: Sequence[Tensor],  # V, as for `orthogonalize`
) -> Sequence[Tensor]:  # the same tensors
    """Copy all matrices of a shape out of the inputs, orthogonalize them, and put each back where it was."""
    by_shape: dict[tuple[int, int], list[Tensor]] = {}
    rows: dict[tuple[int, int], list[Tensor]] = {}  # V of each of them, [a]
    for place, (tensor, division) in enumerate(zip(inputs, divisions, strict=True)):
        start = 0
        for shape, view in matrices_in(tensor, division):
            by_shape.setdefault(shape, []).append(view)
            end = start + view.numel() // shape[1]
            rows.setdefault(shape, []).extend(moments[place][start:end].split(shape[0]) if moments else [])
            start = end
    for shape, views in by_shape.items():
        counts = [view.numel() // math.prod(shape) for view in views]
        stack = views[0].new_empty(sum(counts), *shape)  # [n, a, b]
        places = [place.view(view.shape) for place, view in zip(stack.split(counts), views, strict=True)]
        for place, view in zip(places, views, strict=True):
            place.copy_(view)
        if group["batched"] and batching_pays(shape, stack.device):
            _orthogonalize_(stack, group, rows[shape])
        else:
            for i, one in enumerate(stack.split(1)):  # in memory of its own: the last bits depend on alignment
                one.copy_(_orthogonalize_(one.clone(), group, rows[shape][i : i + 1]))
        for place, view in zip(places, views, strict=True):
            view.copy_(place)
    return inputs


# ---- The single-device optimizer --------------------------------------------------------------------------


OWN_DEFAULTS = MUON_DEFAULTS | {"input_dtype": None}


class Muon(MasterWeights):
    """Muon for whole matrices on one device. Other parameters belong to `torch.optim.AdamW`.

    All arguments but params and master_weights are options of each group, as torch has it, and what is given here is
    their default.

    params: as for any torch optimizer; every parameter is a matrix [A, B], or holds several.
    lr: learning rate, 0 or more. The default is AdamW's, right for scale="match_rms"; other scales want others.
    momentum: mu, in [0, 1).
    nesterov: feed Newton–Schulz the momentum with this step's gradient counted once more, as Nesterov does.
    momentum_kind: "sum", M <- mu M + G, or "average", M <- mu M + (1 - mu) G. Newton–Schulz divides the difference out.
    weight_decay: decoupled: a step multiplies weights by 1 - lr * weight_decay.
    cautious_decay: only where the update makes the weight smaller, too.
    scale: of the update of a matrix [A, B]: "match_rms", 0.2 sqrt(max(A, B)), "original", sqrt(max(1, A / B)), or
        "unit_rms", sqrt(A / B).
    ns_steps, ns_coefficients, compute_dtype, ns_form, ns_norm: of Newton–Schulz: what `newton_schulz` calls steps,
        coefficients, compute_dtype, form and norm.
    input_norm: give "rows", "columns" or "both" the same length before Newton–Schulz, as MuonEq does.
    output_norm: divide "rows" or "columns" of the update by their lengths, "rows_columns" or "columns_rows" one after
        the other, as Muon+ does, and keep its Frobenius norm.
    normuon_beta2: in [0, 1): divide rows of the update by the root of a running mean of their squares, as NorMuon does,
        with 0.95 in its paper, and keep the Frobenius norm. None: not.
    batched: orthogonalize small matrices of one shape in one batched product, which may sum in another order.
    matrices: which matrices a parameter holds, each with a scale of its own; see `distmuon.sharding.matrices`.
    input_dtype: round what Newton–Schulz is fed to this dtype first; None keeps it. A distributed run gathers the
        momentum in bf16, so the reference it is held against must round in the same place.
    master_weights: keep a float32 master of every bf16 parameter, 4 bytes for each of its elements, and its momentum in
        float32. None: none, and a warning where weight decay is lost to rounding; False: none.

    state: `momentum_buffer`, [A, B], in the parameter's dtype, or in float32 beside a `master_weight`. NorMuon has one
        number for each row of each matrix, `row_exp_avg_sq`, in float32 or wider.

    With momentum_kind="average", scale="original", compute_dtype=torch.bfloat16, ns_form="standard", ns_norm="torch",
    batched=False and an lr it is torch.optim.Muon. A bf16 parameter is decayed and moved in float32 and rounded once;
    torch.optim.Muon rounds it twice. Raises ValueError for a wrong value or parameter, TypeError for an unknown option;
    maximize, foreach, fused, capturable and differentiable do not exist.
    """

    DEFAULTS = OWN_DEFAULTS
    MADE_BY: ClassVar = "Muon"
    _watch = functools.cached_property(Watch)  # made when first wanted, by copies as well

    def __init__(
        self,
        params: Any,
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
        input_dtype: torch.dtype | None = None,
        master_weights: bool | None = None,
    ) -> None:
        options = options_among(locals(), {"muon": OWN_DEFAULTS})
        self.choose_masters(master_weights)
        refuse_model(params, "Muon", "its hidden matrices, or the whole model to MuonW")
        super().__init__(params, self.DEFAULTS | options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, refusing parameters and options that Muon cannot take; torch calls it for every group."""
        list_params(param_group, "Muon")
        refuse_unknown_in_group(param_group, (*self.DEFAULTS, "algorithm"), "Muon")
        self._watch.take(param_group)
        name_like_the_others(self, param_group)
        with withdrawn_if_refused(self):
            super().add_param_group(param_group)
            self._check(param_group)

    @torch._disable_dynamo  # torch.compile(optimizer.step) runs it as it is
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with options_on_host(self.param_groups):
            for group in self.param_groups:
                check_complete({"algorithm": "muon"} | group, {"muon": self.DEFAULTS}, "Muon")
                self._check_options(group)
                check_muon_parameters(group, self.state)  # which may be others than at construction
            self.warn_of_lost_decay()
            moving = [(p, group) for group in self.param_groups for p in self._moving(group)]
            self._watch.look(bool(moving))
            parameters, groups = [p for p, _ in moving], [group for _, group in moving]
            for batch in batches(parameters, groups):
                self._move([parameters[i] for i in batch], [groups[i] for i in batch])
        return loss

    def local_views(self) -> list[LocalView]:
        """Return what this process holds of every parameter: the whole; see `LocalView`."""
        return views_in_place(self, lambda group, p: group["input_dtype"] or p.dtype)

    def _check(self, group: dict[str, Any]) -> None:
        """Raise ValueError or TypeError, naming what is wrong with the options or parameters of a group."""
        self._check_options(group)
        check_muon_parameters(group)

    def _check_options(self, group: Mapping[str, Any]) -> None:
        if group.get("algorithm", "muon") != "muon":
            raise ValueError(
                f"a group has algorithm={group['algorithm']!r}; Muon on one device runs 'muon' alone: give this group "
                "to torch.optim.AdamW, or all groups to DistributedMuon."
            )
        check_dtype("input_dtype", group["input_dtype"], None)
        check_muon_options(group)

    def _required(self, group: Mapping[str, Any]) -> tuple[str, Sequence[str]]:
        return "muon", list(self.DEFAULTS)

    def _moving(self, group: dict[str, Any]) -> Iterator[Tensor]:
        """Return the parameters of a group that have a gradient."""
        for name, p in named(group):
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise RuntimeError(f"parameter {name!r} has a sparse gradient; Muon takes dense ones (sparse=False).")
            check_shapes(name, p, self.state.get(p, {}), rows_kept(p, group))
            yield p

    def _move(self, parameters: list[Tensor], groups: list[dict[str, Any]]) -> None:
        """Update the matrices of one batch, and free what that took."""
        divisions = [MatrixLayout(group["matrices"]) for group in groups]
        fed = self._momentum(parameters, groups)
        updates = orthogonalize(fed, groups[0], divisions, self._row_moments(parameters, groups, fed))
        sizes, room = [p.numel() for p in parameters], math.inf if apart(parameters) else 0
        for together in runs(range(len(parameters)), sizes, room):
            with contextlib.ExitStack() as rounded:
                weights, moving = list[Tensor](), list[list[WeightPart]]()
                for p, group, update in ((parameters[i], groups[i], updates[i]) for i in together):
                    weight = rounded.enter_context(rounded_once(p, self.master(p)))
                    found = parts(group["matrices"], p.shape)
                    rows = [part.rows for part in found]
                    weights.append(weight)
                    moving.append([])
                    for part, w, o in zip(found, weight.split(rows), update.split(rows), strict=True):
                        factor = scale(part.shape, group["scale"])
                        moving[-1].append(WeightPart(w, o, group["lr"], factor))
                decay_and_apply_(weights, [groups[i] for i in together], moving)

    def _row_moments(
        self,
        parameters: list[Tensor],
        groups: list[dict[str, Any]],  # alike
        like: list[Tensor],
    ) -> list[Tensor]:  # V, [rows] each
        """Return what NorMuon keeps of one batch; nothing where it is off."""
        if groups[0]["normuon_beta2"] is None:
            return []
        wanted = [rows_kept(p, group) for p, group in zip(parameters, groups, strict=True)]
        return [
            kept_rows(self.state[p], n, u.dtype, u.device) for p, n, u in zip(parameters, wanted, like, strict=True)
        ]

    def _momentum(
        self,
        parameters: list[Tensor],  # each [A, B]
        groups: list[dict[str, Any]],
    ) -> list[Tensor]:  # U, as the parameters
        """Update the momentum of one batch; return what Newton–Schulz is fed."""
        buffers, gradients = [], []
        for p in parameters:
            assert p.grad is not None
            buffers.append(kept(self.state[p], "momentum_buffer", p, self.kept_dtype(p)))
            gradients.append(p.grad.to(torch.promote_types(p.grad.dtype, buffers[-1].dtype)))
        fed = momentum_of_all_(buffers, gradients, groups)
        return [u.to(group["input_dtype"] or u.dtype) for u, group in zip(fed, groups, strict=True)]
