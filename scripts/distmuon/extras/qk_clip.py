"""QK-Clip: after a step, heads whose logits have grown too large get smaller query and key weights.

    S_h     = 1/sqrt(d) max over batch, i, j of q_i . k_j      of head h, in this step's forward passes, on all ranks
    gamma_h = min(1, tau / S_h)
    W_q,h  <- gamma_h^alpha W_q,h,   W_k,h <- gamma_h^(1 - alpha) W_k,h     alpha = 1/2, tau = 100

The forward passes were made with the weights before the step, so logits may pass tau by what one step adds to them.

    clip = QKClip(optimizer, {"blocks.0": AttentionHeads(block.query, block.key, heads=8)})
    block.watch = clip.recorder("blocks.0", is_causal=True)     # the block calls watch(q, k) in its forward pass

Source: Kimi K2 (Kimi Team 2025, arXiv 2507.20534), section 2.1 and Algorithm 1.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distmuon.optim.masters import local_views
from distmuon.optim.options import check_number
from distmuon.optim.param_groups import named, refuse_meta
from distmuon.sharding.boxes import Box, all_of, volume
from distmuon.sharding.collectives import Group, numbers_on
from distmuon.sharding.consistency import RankMismatchError, check_same, raise_together
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import Range
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.local_views import LocalView, at, fill_, local
from distmuon.sharding.meshes import common_mesh, group_of, own_box
from distmuon.sharding.precision import widest
from distmuon.sharding.tensor_parallel import tp_split_dim
from distmuon.sharding.warning import warn_user

LABEL, SCALED_LABEL = "largest logits", "clipped heads"  # in ledgers
CHUNK_NUMEL = 2**24  # logits that exist at a time: 32 MB in bf16
VOTES = 3  # beside the logits: whether the step was skipped; a digest of the options, and the same with a minus
SCALED = ("weight", "bias")  # what a projection may consist of: its output is linear in both, row by row


# ---- Which rows of which parameters make which head, and which are here ------------------------------------


class AttentionHeads(NamedTuple):
    """The projections of one attention layer.

    query, key: modules with a weight [rows, inputs] and perhaps a bias [rows], of d rows for each head, one head after
        the other. The same module twice is a fused one, with the rows of query, key and value in this order. Where TP
        cuts a fused one, a rank holds its part of each.
    heads: of the query, in the whole layer.
    key_heads: of the key, where several query heads share one; None: as many.
    """

    query: nn.Module
    key: nn.Module
    heads: int
    key_heads: int | None = None

    @property
    def keys(self) -> int:
        """How many key heads there are."""
        return self.heads if self.key_heads is None else self.key_heads

    @property
    def fused(self) -> bool:
        return self.query is self.key


class PlacedHeads:
    """A layer on this rank. tp: over whose ranks plain tensors with the mark `tp_split_dim` are cut.

    The parameters are those of this moment: FSDP2 puts others into the modules while they run.
    Raises ValueError, naming the layer and the remedy, for what cannot be scaled head by head.
    """

    def __init__(self, name: str, attention: AttentionHeads, tp: Group) -> None:
        self.name, self.attention, self.tp = name, attention, tp
        heads, keys = attention.heads, attention.keys
        if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in (heads, keys)):
            raise ValueError(f"{name!r} has heads={heads!r}, key_heads={keys!r}; give numbers from 1.")
        if heads % keys:
            raise ValueError(f"{name!r} has {heads} heads and {keys} key heads; give a number that divides {heads}.")
        if attention.fused:
            projections = [("fused projection", attention.query, heads + 2 * keys)]
        else:
            projections = [("query", attention.query, heads), ("key", attention.key, keys)]
        self.parameters = {which: self._scaled(which, module) for which, module, _ in projections}
        self.weights = {f"the {which} of {name!r}": held["weight"] for which, held in self.parameters.items()}
        for which, _, number in projections:
            for leaf, p in self.parameters[which].items():
                refuse_meta(f"{name}, {which}, {leaf}", p)
                self._check_rows(f"the {leaf} of the {which} of {name!r}", p, number)
        first, _, number = projections[0]
        self._weight = self.parameters[first]["weight"]
        self.width = self._weight.shape[0] * self._cuts(self._weight) // number  # d

    def heads_of(
        self,
        query: Tensor,  # [batch, heads here, length, d]
        key: Tensor,  # [batch, key heads here, key length, d]
    ) -> Range:
        """Return which heads of the whole layer these are; raise ValueError for tensors that cannot be this layer's."""
        name, attention, weight = self.name, self.attention, self._weight
        if not isinstance(query, Tensor) or not isinstance(key, Tensor):
            raise TypeError(f"queries or keys of {name!r} are no tensors; record what attention is given.")
        if isinstance(query, DTensor) or isinstance(key, DTensor):
            raise ValueError(f"queries or keys of {name!r} are DTensors; record their local tensors (to_local()).")
        cuts, place = self._cuts(weight), self.tp.rank
        if isinstance(weight, DTensor) and query.ndim == 4 and query.shape[1] != attention.heads:
            last = weight.device_mesh.ndim - 1  # FSDP2 leaves TP the last dimension of the mesh
            cuts, place = weight.device_mesh.shape[last], weight.device_mesh.get_local_rank(last)
        heads, keys = attention.heads // cuts, attention.keys // cuts
        expected = [[heads, self.width], [keys, self.width]]
        if [[t.shape[1], t.shape[3]] if t.ndim == 4 else [] for t in (query, key)] != expected:
            raise ValueError(
                f"queries and keys of {name!r} have shapes {list(query.shape)} and {list(key.shape)}; expected "
                f"[batch, {heads}, length, {self.width}] and [batch, {keys}, length, {self.width}], as "
                "scaled_dot_product_attention takes them."
            )
        if isinstance(weight, DTensor) and cuts > 1 and attention.fused:
            raise ValueError(
                f"{name!r} is fused and cut over TP as one DTensor, which does not say whose rows are whose; give "
                "query and key modules of their own."
            )
        first = heads * place if cuts > 1 else 0
        return Range(first, first + heads)

    def factors(
        self,
        gammas: Sequence[float],  # of all heads of the layer
        alpha: float,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (parameter, factors of its rows on this rank): gamma^alpha for queries, gamma^(1 - alpha) for keys.

        A key head that several query heads share stays: each of them takes its whole gamma, and none moves another's
        logits. Source: Kimi K2, section 2.1, which treats the key part that all heads share (k^R) so.
        """
        keys = self.attention.keys
        shared = keys < self.attention.heads
        query = [gamma if shared else gamma**alpha for gamma in gammas]
        key = [1.0] * keys if shared else [gamma ** (1 - alpha) for gamma in gammas]
        of_projections = [[query, key, [1.0] * keys]] if self.attention.fused else [[query], [key]]
        for (which, held), parts in zip(self.parameters.items(), of_projections, strict=True):
            for leaf, p in held.items():
                device = local(p).device
                wide = [torch.tensor(part, dtype=widest(device), device=device) for part in parts]
                rows = [part.repeat_interleave(self.width) for part in wide]
                if isinstance(p, DTensor):
                    yield p, torch.cat(rows)[own_box(f"{self.name}, {which}, {leaf}", p)[0].as_slice]
                else:
                    cuts = self._cuts(p)
                    yield p, torch.cat([part.chunk(cuts)[self.tp.rank if cuts > 1 else 0] for part in rows])

    def _scaled(self, which: str, module: nn.Module) -> dict[str, Tensor]:
        """Return the parameters of a projection."""
        found: dict[str, Tensor] = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
        if "weight" not in found or found.keys() - set(SCALED) or found["weight"].ndim != 2:
            shapes = ", ".join(f"{leaf} {list(p.shape)}" for leaf, p in found.items()) or "no parameters"
            raise ValueError(
                f"the {which} of {self.name!r} has {shapes}; the clip scales rows of a weight [rows, inputs] and of a "
                "bias. Give such a module, or bound these logits by a norm on queries and keys."
            )
        return found

    def _cuts(self, p: Tensor) -> int:
        """Return into how many parts TP has cut a plain tensor's rows."""
        return self.tp.size if not isinstance(p, DTensor) and tp_split_dim(p) == 0 else 1

    def _check_rows(self, where: str, p: Tensor, number: int) -> None:
        cuts, attention = self._cuts(p), self.attention
        if not isinstance(p, DTensor) and self.tp.size > 1 and tp_split_dim(p) not in (0, None):
            raise ValueError(f"{where} is cut over TP along its inputs, through all heads; cut it along its rows.")
        if (rows := p.shape[0] * cuts) % number:
            raise ValueError(f"{where} has {rows} rows, which are no {number} heads; give the layer's number of heads.")
        if attention.heads % cuts or attention.keys % cuts:
            raise ValueError(
                f"{where} is cut over {cuts} TP ranks, which cannot hold {attention.heads} heads and {attention.keys} "
                "key heads in equal parts; choose a T that divides both."
            )


# ---- The clip ----------------------------------------------------------------------------------------------


class NonFiniteLogits(FloatingPointError):
    """A head's largest logit is infinite or NaN. Raised on every rank, after the step, before anything is scaled."""


class QKClip:
    """Records the largest logit of every head, and after each step of the optimizer scales down heads that pass tau.

    optimizer: `DistributedMuon`, `Zero1AdamW`, `MuonW`, `Muon`, one of torch's, or one of your own that says in
        `local_views` what it keeps; it trains the weights. The clip is a post hook of its `step`: nothing more is to be
        called. All ranks make the clip together.
    attentions: {name: `AttentionHeads`}; TP-local modules where TP cuts layers, by whole heads.
    threshold: tau, more than 0; math.inf only records. May be changed later, on all ranks alike.
    alpha: the query's part of the shrinking, in [0, 1]; all of it where query heads share a key head.
    grid: for plain tensors on several ranks, under an optimizer that does not know of these by its `grid`, its
        `replicas` (`MuonW`'s) or local views of which a rank keeps a part: what `Grid.of` takes, such as
        `torch.distributed.group.WORLD` under DDP; `Grid.alone()` for a model of this rank's own.

    largest, gammas: {name: [heads], on the CPU}, of whole layers, alike on all ranks, in the latest step that was not
        skipped; -inf where nothing was recorded.
    skipped_steps: how many were, by a GradScaler or because of on_nonfinite="skip"; nothing is scaled then.
    ledger: what this rank has sent.

    A step costs one all-reduce of heads + 3 numbers; where parameters have master weights, both are scaled, and what is
    clipped is gathered again if a rank keeps a part of the masters. Momentum stays. There is nothing to save: a step
    uses up what was recorded. A norm between the weights and the logits makes the clip idle, for it undoes the scaling.

    Raises ValueError, naming layer and remedy, for what it cannot take; RankMismatchError on all ranks where they
    differ.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        attentions: Mapping[str, AttentionHeads],
        threshold: float = 100.0,
        *,
        alpha: float = 0.5,
        grid: Any = None,
    ) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"optimizer is {optimizer!r}; give the one that trains the weights.")
        entries = attentions.values() if isinstance(attentions, Mapping) else [attentions]
        if others := [type(one).__name__ for one in entries if not isinstance(one, AttentionHeads)]:
            raise TypeError(f"attentions holds a {others[0]}; give {{name: AttentionHeads(query, key, heads)}}.")
        self.threshold, self.alpha, self._optimizer = threshold, alpha, optimizer
        self.grid = _grid_of(optimizer, grid)
        self.ledger = self.grid.ledger
        with raise_together(self.grid, "the clip", "make the same one on every rank"):
            self._check_options()
            self.layers = {name: PlacedHeads(name, one, self.grid.tp) for name, one in attentions.items()}
            self._check_weights()
        lines = [(name, f"{layer.attention.heads} heads") for name, layer in self.layers.items()]
        check_same(self.grid, "clips", [("options", self._options()), *lines], "make the same one on every rank")
        self.largest: dict[str, Tensor] = {}
        self.gammas: dict[str, Tensor] = {}
        self.skipped_steps, self._warned = 0, False
        self._skips_seen = getattr(optimizer, "skipped_steps", 0)
        self._seen: dict[str, tuple[slice, Tensor]] = {}  # name -> (which heads are here, [heads here])
        optimizer.register_step_post_hook(self._after_step)

    # ---- In the forward pass ------------------------------------------------------------------------------

    def record(
        self,
        name: str,
        query: Tensor,
        key: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> None:
        """Note the largest logit of every head, beside what earlier micro-batches had.

        name: the layer's, as the constructor was given it.
        query: [batch, heads here, length, d], as scaled_dot_product_attention takes it.
        key: [batch, key heads here, key length, d].
        is_causal, scale: as scaled_dot_product_attention takes them.

        Without gradients (`torch.no_grad`) nothing is noted, and it costs nothing: evaluation does not count.
        """
        if torch.is_grad_enabled():
            if scale is not None:
                check_number("scale", scale)
            here = self._layer(name).heads_of(query, key).as_slice
            found = largest_logits(query.detach(), key.detach(), is_causal, scale)
            self._seen[name] = here, torch.maximum(found, self._seen[name][1]) if name in self._seen else found

    def recorder(self, name: str, is_causal: bool = False, scale: float | None = None) -> Recorder:
        """Return what a module may call with its queries and keys."""
        self._layer(name)
        return Recorder(self, name, is_causal, scale)

    def forget(self) -> None:
        """Drop what was recorded, where a step is given up without a call of the optimizer's.

        So does a GradScaler with torch's own optimizers that know nothing of it, or a loop that skips a bad loss.
        """
        self._seen.clear()

    # ---- After the step -----------------------------------------------------------------------------------

    def summary(self) -> dict[str, float]:
        """Return the latest step in two numbers, for metrics: the largest logit of all, how many heads were clipped."""
        largest = max((float(values.max()) for values in self.largest.values()), default=-math.inf)
        clipped = sum(int((values < 1).sum()) for values in self.gammas.values())
        return {"largest logit": largest, "clipped heads": float(clipped)}

    @torch.no_grad()
    def _after_step(self, optimizer: Any, *_: Any) -> None:
        """Agree on the largest logits, and scale by them. Collective."""
        try:
            largest, skipped = self._over_ranks()
        finally:
            self.forget()
        if skipped:
            self.skipped_steps += 1
            return
        self.largest = largest
        self.gammas = {name: torch.ones_like(values) for name, values in largest.items()}
        self._require_finite()
        self._warn_of_silent_layers()
        for name, values in largest.items():
            # gamma_h = min(1, tau / S_h)
            self.gammas[name] = (self.threshold / values).where(values > self.threshold, 1.0)
        self._scale()

    def _over_ranks(self) -> tuple[dict[str, Tensor], bool]:  # {name: [heads]}, on the CPU
        """Return the largest logits of all ranks, and whether the step was skipped, in one all-reduce by maximum.

        A NaN, which a maximum may lose, travels as infinity. Raises RankMismatchError, on all ranks, for unlike
        options.
        """
        heads = [layer.attention.heads for layer in self.layers.values()]
        wide = widest(self.grid.device)
        numbers = torch.full((sum(heads) + VOTES,), -torch.inf, dtype=wide, device=self.grid.device)
        *of_layers, votes = numbers.split([*heads, VOTES])
        for name, of_layer in zip(self.layers, of_layers, strict=True):
            if name in self._seen:
                here, found = self._seen[name]
                of_layer[here] = found.nan_to_num(torch.inf, torch.inf, -torch.inf)
        digest = zlib.crc32(self._options().encode())
        votes.copy_(torch.tensor([self._was_skipped(), digest, -digest], dtype=wide))
        numbers = self.grid.world.all_reduce(numbers, LABEL, dist.ReduceOp.MAX).cpu()
        *of_layers, votes = numbers.split([*heads, VOTES])
        skipped, greatest, minus_least = votes.tolist()
        if greatest != -minus_least:
            raise RankMismatchError(
                "the options of the clip differ between ranks; set threshold and alpha alike on every rank. The step "
                "was made, and nothing was clipped."
            )
        self._check_options()  # which may be others than at construction
        return dict(zip(self.layers, of_layers, strict=True)), bool(skipped)

    def _was_skipped(self) -> float:
        """Return 1 where the optimizer has left its parameters as they were, as far as this rank knows."""
        if not hasattr(self._optimizer, "skipped_steps"):  # which optimizers have that decide by themselves
            return float(getattr(self._optimizer, "found_inf", 0.0))  # a GradScaler's, for the length of a step
        before, self._skips_seen = self._skips_seen, self._optimizer.skipped_steps
        return float(self._skips_seen != before)

    def _scale(self) -> None:
        """Multiply the rows of clipped heads."""
        clipped = [name for name, gammas in self.gammas.items() if (gammas < 1).any()]
        factors = dict(
            pair for name in clipped for pair in self.layers[name].factors(self.gammas[name].tolist(), self.alpha)
        )
        # ours can do it themselves, and know then that the write was no stranger's
        if factors and (of_its_own := getattr(self._optimizer, "scale_rows_", None)) is not None:
            trained = {p for group in self._optimizer.param_groups for p in group["params"]}
            of_its_own({p: rows for p, rows in factors.items() if p in trained})
            factors = {p: rows for p, rows in factors.items() if p not in trained}
        scale_rows_(self._optimizer, factors, self.grid.world)

    # ---- Checks -------------------------------------------------------------------------------------------

    def _layer(self, name: str) -> PlacedHeads:
        if name not in [*self.layers]:
            raise ValueError(f"the clip knows no layer {name!r}; it has {', '.join(map(repr, self.layers))}.")
        return self.layers[name]

    def _options(self) -> str:
        with contextlib.suppress(TypeError, ValueError):  # no numbers, which all ranks are to hear of
            return f"threshold={float(self.threshold)}, alpha={float(self.alpha)}"
        return f"threshold={self.threshold!r}, alpha={self.alpha!r}"

    def _check_options(self) -> None:
        check_number("threshold", self.threshold)
        check_number("alpha", self.alpha)
        if not self.threshold > 0:
            raise ValueError(f"threshold is {self.threshold}; give a logit, more than 0 (Kimi K2 has 100).")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}; give the query's part, in [0, 1] (Kimi K2 has 0.5).")

    def _check_weights(self) -> None:
        """Raise ValueError where there is nothing to clip, or weights are not the optimizer's, or two layers'."""
        if not self.layers:
            raise ValueError("there is no layer to clip; give {name: AttentionHeads(query, key, heads)}.")
        trained = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        first: dict[int, str] = {}
        for where, weight in (pair for layer in self.layers.values() for pair in layer.weights.items()):
            if id(weight) not in trained:
                raise ValueError(f"{where} is no parameter of the optimizer; give the clip the one that trains it.")
            if first.setdefault(id(weight), where) != where:
                raise ValueError(
                    f"{where} is {first[id(weight)]}, too, and would be scaled twice; give one name to layers that "
                    "share weights, and record all of them under it."
                )

    def _require_finite(self) -> None:
        for name, values in self.largest.items():
            if heads := (values == torch.inf).nonzero().flatten().tolist():
                raise NonFiniteLogits(
                    f"the logits of {name!r}, head {heads[0]}, are not finite, and the step was made; go back to a "
                    "checkpoint, with a lower learning rate or threshold."
                )

    def _warn_of_silent_layers(self) -> None:
        silent = [repr(name) for name, values in self.largest.items() if not (values > -torch.inf).any()]
        if silent and not self._warned:
            self._warned = True
            warn_user(
                f"no logits of {', '.join(silent)} were recorded before this step, so none are clipped; let the "
                "forward pass record them, with gradients enabled.",
            )


class Recorder:
    """What a module calls with its queries and keys. A copied or pickled module has None in its place."""

    def __init__(self, clip: QKClip, name: str, is_causal: bool, scale: float | None) -> None:
        self._clip, self._name, self._settings = clip, name, (is_causal, scale)

    def __call__(self, query: Tensor, key: Tensor) -> None:
        self._clip.record(self._name, query, key, *self._settings)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@torch.no_grad()
def largest_logits(
    query: Tensor,  # [batch, heads, length, d]
    key: Tensor,  # [batch, key heads, key length, d]
    is_causal: bool = False,
    scale: float | None = None,
    chunk_numel: int = CHUNK_NUMEL,
) -> Tensor:  # [heads], in the widest dtype of the device
    """Return scale * max q_i . k_j of each head, over the batch and over the pairs (i, j) that attention uses.

    Fused attention does not return it, so queries and keys are multiplied once more.

    is_causal, scale: what `scaled_dot_product_attention` was given: only keys j <= i count; 1 / sqrt(d) by default.
    Fewer key heads are shared, as with its enable_gqa. A NaN makes its head's result NaN; -inf where there is no pair.
    Source: Kimi K2 (Kimi Team 2025, arXiv 2507.20534), section 2.1, S_max^h.

    Products are taken in the tensors' dtype, a chunk of queries at a time. It costs what attention's first product
    costs: one matrix product beside attention's own two forward and five backward, half of it where causal.
    """
    batch, heads, length, width = query.shape
    key_heads, keys = key.shape[1], key.shape[2]
    found = query.new_full((key_heads, heads // key_heads), -torch.inf)  # [K, G]
    if query.numel() and key.numel():
        grouped, shared = query.unflatten(1, found.shape), key.unsqueeze(2).mT  # [B, K, G, L, d], [B, K, 1, d, S]
        rows = max(1, chunk_numel // (batch * heads * keys))
        for start in range(0, length, rows):
            some, end = grouped[:, :, :, start : start + rows], min(start + rows, length)
            logits = some @ (shared[..., :end] if is_causal else shared)  # [B, K, G, rows, S]
            if is_causal:
                later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(start + 1)
                logits = logits.masked_fill(later, -torch.inf)
            found = torch.maximum(found, logits.amax((0, 3, 4)))
    return found.flatten().to(widest(found.device)) * (width**-0.5 if scale is None else scale)


# ---- What an optimizer keeps of rows ------------------------------------------------------------------------


def scale_rows_(
    optimizer: torch.optim.Optimizer,
    factors: Mapping[Tensor, Tensor],  # {parameter: of each of its rows that is here}, in one order on all ranks
    world: Group,
) -> None:
    """Multiply parameters row by row, and what the optimizer keeps of them as its `local_views` say.

    A parameter narrower than its master weight is then what that rounds to; where a rank keeps but a part of the
    master, all ranks bring theirs together. Collective under an optimizer that has `local_views` of its own.
    """
    views = {id(view.parameter): view for view in local_views(optimizer)} if factors else {}
    for p, rows in factors.items():
        by_row, view = rows.view(-1, *[1] * (p.ndim - 1)), views.get(id(p))
        if view is None or view.values is None or view.values.dtype == p.dtype:
            local(p).mul_(by_row)
            if view is not None:
                view.follow_parameter_()
        else:
            of_rows = at(view.held, by_row.expand(local(p).shape).contiguous())
            for box, values in view.of(view.values):
                each = torch.empty(values.shape, dtype=rows.dtype, device=values.device)
                fill_(each, box, of_rows)
                values.mul_(each)
            _round(p, view, view.of(view.values))
    if world.size > 1 and hasattr(optimizer, "local_views"):
        kept = [(p, views[id(p)]) for p in factors if id(p) in views]
        for p, view in _in_parts(kept, world):
            # others add -0.0, which leaves every number as it is, 0.0 included
            whole = torch.full(view.shape, -0.0, dtype=p.dtype, device=local(p).device)
            if view.counted and view.values is not None:
                fill_(whole, all_of(view.shape), view.of(view.values))
            _round(p, view, [(all_of(view.shape), world.all_reduce(whole, SCALED_LABEL))])


def _in_parts(kept: Sequence[tuple[Tensor, LocalView]], world: Group) -> list[tuple[Tensor, LocalView]]:
    """Return the parameters that are narrower than their masters, of which some rank does not keep all. Collective."""
    if not kept:
        return []
    numbers = []
    for p, view in kept:
        is_narrower = view.values is not None and view.values.dtype != p.dtype
        here, all_here = (sum(volume(box) for box, _ in boxes) for boxes in (view.boxes, view.held))
        numbers += [float(is_narrower), float(here < all_here)]
    votes = numbers_on(local(kept[0][0]).device, numbers, torch.float32)
    votes = world.all_reduce(votes, SCALED_LABEL, dist.ReduceOp.MAX).view(-1, 2).all(1)
    return [pair for pair, vote in zip(kept, votes.tolist(), strict=True) if vote]


def _round(p: Tensor, view: LocalView, boxes: Sequence[tuple[Box, Tensor]]) -> None:
    """Fill a parameter from boxes of the whole, as far as they go."""
    for box, into in at(view.held, local(p.detach())):
        fill_(into, box, boxes)


def _grid_of(optimizer: torch.optim.Optimizer, given: Any) -> Grid:
    """Return the ranks over which batches and heads are spread. Collective where they have no group yet."""
    own = getattr(optimizer, "grid", None)
    if isinstance(own, Grid):
        if given is not None and given is not own:
            raise ValueError("the optimizer has a grid of its own; leave out the clip's.")
        return own
    if given is None:
        given = getattr(optimizer, "replicas", None)
    parameters = [pair for group in optimizer.param_groups for pair in named(group)]
    if (mesh := common_mesh(parameters)) is not None:
        ledger = getattr(optimizer, "ledger", None)
        ledger = ledger if isinstance(ledger, Ledger) else Ledger()
        return replace(Grid.alone(mesh.device_type), world=group_of(mesh, ledger), ledger=ledger)
    if given is None and dist.is_initialized() and dist.get_world_size() > 1:
        if all(view.is_whole for view in local_views(optimizer)):
            raise ValueError(
                f"parameters are plain tensors on one of {dist.get_world_size()} ranks, and nothing says whose batches "
                "count; give the clip grid=torch.distributed.group.WORLD for replicas, Grid.alone() for this rank "
                "alone."
            )
        given = dist.group.WORLD
    return Grid.alone(str(parameters[0][1].device)) if given is None else Grid.of(given)
