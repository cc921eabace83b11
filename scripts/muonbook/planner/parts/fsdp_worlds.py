"""MuonW on FSDP2: what every rank holds, sends and computes where parameters are sharded, too; from shapes alone.

    forward, backward   a layer's parameters are gathered over DP before each, its gradients reduce-scattered after
    step                two all-to-alls among all D x T ranks: pieces of momentum to owners, pieces of updates back;
                        of a large model two for every wave

FSDP2 cuts a parameter's rows into D equal runs, the last ones shorter or empty, and pads what it sends. Owners are
dealt by `sharding.ownership.balance`, as `optim.exchange_plan` does; but where `ExchangePlan` walks over all pieces of
all matrices, here matrices of one shape are counted together, and a rank's bytes are sums of arrays. Tests hold the two
equal on small worlds, and the gathers to what torch's dispatcher counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from distmuon.optim.muonw import HEADER
from distmuon.optim.newton_schulz import flops
from distmuon.optim.strategies.costs import WholeMatrices
from distmuon.sharding.layout import DEFAULT_BUCKET_SIZE, ITEM_BYTES, ParamSpec
from distmuon.sharding.ownership import balance
from distmuon.sharding.tensor_lists import runs
from muonbook.planner.cost_model import LinkCost, hops
from muonbook.planner.parts.every_rank import Move
from muonbook.planner.planned_worlds import COMPUTE_BYTES, MOMENTUM_BYTES


class Dtypes(NamedTuple):
    """Of FSDP2's `MixedPrecisionPolicy`, by name: in which shards are kept, gathered, and gradients reduced."""

    kept: str = "float32"
    gathered: str = "bfloat16"
    reduced: str = "float32"


MIXED = Dtypes()


@dataclass(frozen=True)
class FsdpPart:
    """Parameters under FSDP2 over `dp` ranks, TP-local as `specs` has them. muon: indices of Muon's, all "whole"; none:
    AdamW for everything.

    units: of each parameter, which `fully_shard` it belongs to; "" for that of the whole model, which keeps its
    parameters from forward to backward. micro_batches: forward and backward passes of a step. bucket_size: of `MuonW`.
    """

    specs: Sequence[ParamSpec]
    muon: frozenset[int]
    dp: int
    tp: int
    units: Sequence[str]
    micro_batches: float = 1
    dtypes: Dtypes = MIXED
    bucket_size: int = DEFAULT_BUCKET_SIZE

    # ---- What stays ------------------------------------------------------------------------------------------

    def states(self) -> dict[str, np.ndarray]:
        """Return {kind of `model_states.KINDS`: [D] int64 bytes}; shards are padded to the longest."""
        kinds = ("parameters", "gradients", "masters", "momentum", "exp_avg", "exp_avg_sq", "counters")
        found = {kind: np.zeros(self.dp, np.int64) for kind in kinds}
        item = ITEM_BYTES[self.dtypes.kept]
        for (spec, muon), count in self._alike.items():
            own = count * item * _pieces(spec, self.dp)
            for kind in ("parameters", "gradients"):
                found[kind] += count * item * _longest(spec, self.dp)
            for kind in ("momentum",) if muon else ("exp_avg", "exp_avg_sq"):
                found[kind] += own
            found["counters"] += 0 if muon else 4 * count
        return found

    @cached_property
    def _alike(self) -> Counter[tuple[ParamSpec, bool]]:
        """How many parameters there are of each kind, without their names, and whether they are Muon's."""
        return Counter((spec._replace(name=""), index in self.muon) for index, spec in enumerate(self.specs))

    # ---- Forward and backward --------------------------------------------------------------------------------

    def gathers(self) -> dict[str, tuple[int, int, int]]:
        """Return {"weights", "gradients": (calls, payload bytes, bytes that a rank sends)} of one micro-batch."""
        sizes = self._by_unit
        calls = {unit: 1 if unit == "" else 2 for unit in sizes} if self.dp > 1 else {}
        gathered = sum(calls[unit] * sizes[unit] for unit in calls) * ITEM_BYTES[self.dtypes.gathered]
        reduced = sum(sizes[unit] for unit in calls) * ITEM_BYTES[self.dtypes.reduced]
        return {
            "weights": (sum(calls.values()), self.dp * gathered, (self.dp - 1) * gathered),
            "gradients": (len(calls), self.dp * reduced, (self.dp - 1) * reduced),
        }

    @cached_property
    def _by_unit(self) -> Counter[str]:
        """Elements of the longest rank's shards, by the unit with which they are gathered."""
        sizes = Counter[str]()
        for spec, unit in zip(self.specs, self.units, strict=True):
            sizes[unit] += _longest(spec, self.dp)
        return sizes

    def pass_seconds(self, link: LinkCost) -> float:
        """Return what the gathers of one micro-batch take over DP; nothing overlaps."""
        once = hops("all_gather", self.dp) * link.alpha_seconds
        return sum(calls * once + sent / link.bytes_per_second for calls, _, sent in self.gathers().values())

    # ---- The step --------------------------------------------------------------------------------------------

    @cached_property
    def waves(self) -> list[list[int]]:
        """Muon's parameters, as a step takes them, one wave after the other."""
        indices = sorted(self.muon)
        sizes = [math.prod(self._whole(index)) for index in indices]
        return list(runs(indices, sizes, self.bucket_size * self.dp * self.tp))

    @cached_property
    def owners(self) -> dict[int, int]:
        """Who orthogonalizes each parameter, as `exchange_plan.owners`: {index: rank}, rank = dp x T + tp."""
        ranks = self.dp * self.tp
        loads, found = [0.0] * ranks, dict[int, int]()
        for wave in self.waves:
            costs = dict[int, float]()
            for index in wave:
                holders, cost = np.flatnonzero(self._held(self.specs[index])), float(flops(self._whole(index)))
                if len(holders) == 1:
                    found[index] = int(holders[0])
                    loads[found[index]] += cost
                else:
                    costs[index] = cost
            owner_of = balance(dict(enumerate(costs.values())), ranks, loads)
            for place, (index, cost) in enumerate(costs.items()):
                found[index] = owner_of[place]
                loads[owner_of[place]] += cost
        return found

    def flops(self) -> np.ndarray:
        """Return what Newton–Schulz costs every rank, [D x T]."""
        found = np.zeros(self.dp * self.tp)
        for index, rank in self.owners.items():
            found[rank] += flops(self._whole(index))
        return found

    def exchanged(self) -> tuple[np.ndarray, np.ndarray]:
        """Return what every rank sends in the two all-to-alls of a step, momentum and updates: [D x T] bytes each."""
        ranks = self.dp * self.tp
        out, back = np.zeros((2, ranks), np.int64)
        if ranks == 1 or not self.muon:
            return out, back
        for place, index in ((place, index) for wave in self.waves for place, index in enumerate(wave)):
            spec, owner = self.specs[index], self.owners[index]
            held, cut = self._held(spec), spec.tp_split_dim is not None
            back[owner] += held.sum() - held[owner]
            if cut:  # every piece has one holder
                out += held
                out[owner] -= held[owner]
            else:  # replicas on all TP ranks, which take turns
                turn = np.arange(self.dp) * self.tp + place % self.tp
                sending = turn[np.arange(self.dp) != owner // self.tp]
                out[sending] += held[sending]
        header = HEADER * (ranks - 1)
        return MOMENTUM_BYTES * (out + header), MOMENTUM_BYTES * back

    def sent(self) -> dict[Move, np.ndarray]:
        """Return {move: int64 bytes that every rank sends in a step}, [D x T]."""
        out, back = self.exchanged()
        passes = {("dp", name): round(self.micro_batches * sent) for name, (*_, sent) in self.gathers().items()}
        everywhere = np.ones(self.dp * self.tp, np.int64)
        return {move: sent * everywhere for move, sent in passes.items()} | {
            ("mesh", "momentum"): out,
            ("mesh", "updates"): back,
        }

    @cached_property
    def passing_bytes(self) -> int:
        """What forward and backward passes allocate: two units whole, in the dtypes of the gather and the reduction."""
        two = self.dp * sum(sorted(self._by_unit.values())[-2:]) if self.dp > 1 else 0
        return two * (ITEM_BYTES[self.dtypes.gathered] + ITEM_BYTES[self.dtypes.reduced])

    @cached_property
    def update_bytes(self) -> int:
        """Estimate of what a step allocates on the worst rank."""
        return int(self.step_bytes().max())

    def step_bytes(self, compute_bytes: int = COMPUTE_BYTES) -> np.ndarray:
        """Return what every rank's step allocates, [D x T], in the wave that takes most.

        Momentum, parcels and updates of its own shard; what it owns, and Newton–Schulz on it. compute_bytes: per
        element in Newton–Schulz.
        """
        most = np.zeros(self.dp * self.tp, np.int64)
        for wave in self.waves:
            alike = Counter(self.specs[index]._replace(name="") for index in wave)
            own = sum((count * self._held(spec) for spec, count in alike.items()), np.zeros_like(most))
            owned = [WholeMatrices()] * len(most)
            for index in wave:
                rank = self.owners[index]
                owned[rank] = owned[rank].plus(WholeMatrices.of_one(self.specs[index], self.tp))
            parcels = np.array([3 * MOMENTUM_BYTES * whole.total for whole in owned])
            working = np.array([whole.bytes(MOMENTUM_BYTES, compute_bytes) for whole in owned])
            most = np.maximum(most, 3 * MOMENTUM_BYTES * own + parcels + working)
        return most

    def update_seconds(self, links: Mapping[str, LinkCost], flops_per_second: float) -> dict[str, float]:
        """Return seconds of the step, part by part, of the rank that takes longest in each."""
        ranks, link = self.dp * self.tp, links["mesh"]
        if not self.muon:
            return {}
        once = len(self.waves) * hops("all_to_all", ranks) * link.alpha_seconds
        *sent, operations = self._most
        names = zip(("momentum", "updates"), sent, strict=True)
        moves = {name: once + most / link.bytes_per_second for name, most in names} if ranks > 1 else {}
        return moves | {"Newton–Schulz": operations / flops_per_second}

    @cached_property
    def _most(self) -> tuple[int, int, float]:
        """Bytes of momentum, bytes of updates and operations of a step, each of the rank that has most of them."""
        out, back = self.exchanged()
        return int(out.max()), int(back.max()), float(self.flops().max())

    def _whole(self, index: int) -> tuple[int, ...]:
        return self.specs[index].full_shape(self.tp)

    def _held(self, spec: ParamSpec) -> np.ndarray:
        """Return how many elements of a parameter every rank holds, [D x T]; what TP does not cut, all of a row do."""
        return np.repeat(_pieces(spec, self.dp), self.tp)


def _pieces(spec: ParamSpec, dp: int) -> np.ndarray:
    """Return how many elements of a TP-local parameter each DP rank holds, [D]."""
    rows, row = spec.shape[0], spec.numel // spec.shape[0]
    chunk = -(-rows // dp)
    return row * np.clip(rows - chunk * np.arange(dp, dtype=np.int64), 0, chunk)


def _longest(spec: ParamSpec, dp: int) -> int:
    return -(-spec.shape[0] // dp) * (spec.numel // spec.shape[0])
