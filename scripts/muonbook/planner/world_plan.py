"""A whole world, planned: what its ranks hold, send and compute in a step, and how long it takes on an assumed fabric.

    micro-batch   one sequence: forward and backward of a stage's layers, all-reduces over TP (with sequence
                  parallelism reduce-scatters and all-gathers), all-to-alls of experts, activations to the next stage
                  and their gradients back; under FSDP2 the gathers of parameters
    bubble        P - 1 micro-batches of the slowest stage, in which others wait: (P - 1) / (M + P - 1) of a pipeline
                  of M micro-batches under 1F1B (Narayanan et al. 2021, section 2.2)
    update        the optimizer's moves and Newton–Schulz, those of dense weights and then those of experts

One after the other: nothing overlaps. Experts are taken to be chosen evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from distmuon.launch import UsageError
from distmuon.sharding.layout import ITEM_BYTES, gradient_dtype
from distmuon.sharding.ledger import ring_bytes
from distmuon.sharding.ownership import padding_bytes
from muonbook.planner.cost_model import hops
from muonbook.planner.fabrics import DEVICES, FABRICS, SUSTAINED, Device, Fabric
from muonbook.planner.model_shapes import Shape, Weight, local_specs
from muonbook.planner.parts.activations import ACTIVATION_BYTES, StageActivations
from muonbook.planner.parts.every_rank import Move, Zero1Part
from muonbook.planner.parts.fsdp_worlds import FsdpPart
from muonbook.planner.planned_baselines import Part, PlannedBaseline
from muonbook.planner.stages import Degrees, StageWeights, bubble_share, check_degrees, stages

OPTIMIZERS = ("adamw", "muon", "muonw")
STATES = {"parameters": "parameters", "gradients": "gradients", "masters": "master weights"}
MOMENTS = {  # kinds that come and go, by when they are there: an update begins when the passes are over
    "passes": ("gathered layers", "activations"),
    "update": ("while stepping",),
}
KEPT = ("parameters", "gradients", "master weights", "optimizer state")
GATHERS = "FSDP2's gathers (dp)"
HELD = (*KEPT, *(kind for kinds in MOMENTS.values() for kind in kinds))


@dataclass(frozen=True)
class WorldSetting:
    """All that a plan depends on. rule: of BUCKET_RULES. tokens: of all ranks, per step. recompute: of a layer, keep
    the input alone, and compute the rest again in the backward pass. sequence_parallel: where TP cuts no matrix, it
    cuts the sequence (Korthikanti et al. 2022, section 4.2.2)."""

    shape: Shape
    degrees: Degrees
    optimizer: str = "muon"
    strategy: str = "owner"
    rule: str = "ours"
    tokens: int = 1 << 24
    device: Device = DEVICES["h100"]
    network: Fabric = FABRICS["nvlink_infiniband"]
    recompute: bool = False
    sequence_parallel: bool = False

    @property
    def micro_batches(self) -> float:
        """M: sequences of a step for one DP rank, each a micro-batch; on average."""
        return self.tokens / self.shape.context / self.degrees.dp

    @property
    def fabric(self) -> Fabric:
        return replace(self.network, flops_per_second=SUSTAINED * self.device.peak_flops)

    def by(self, baseline: PlannedBaseline) -> WorldSetting:
        """Return the same world trained by another baseline."""
        return replace(self, optimizer=baseline.optimizer, strategy=baseline.strategy, rule=baseline.rule)

    def check(self) -> None:
        """Raise UsageError, naming option and remedy, for what cannot be."""
        check_degrees(self.shape, self.degrees)
        if self.micro_batches < 1:
            least = self.shape.context * self.degrees.dp
            raise UsageError(
                f"--tokens {self.tokens:,} are fewer than a sequence of {self.shape.context:,} for each of --dp "
                f"{self.degrees.dp} ranks; choose {least:,} or more."
            )
        if not self.divides_sequences:
            raise UsageError(
                f"--sequence-parallel: --tp {self.degrees.tp} does not divide a sequence of {self.shape.context:,}; "
                f"choose another T, or leave it out."
            )

    @property
    def divides_sequences(self) -> bool:
        """Whether T divides a sequence, where it has to."""
        return not self.sequence_parallel or self.shape.context % self.degrees.tp == 0


class StagePlan:
    """One pipeline stage, or several that hold the same: its parts laid out, and what its ranks hold and do.

    Arrays are over the ranks of a stage, [D, T]: what dense weights and what experts ask of a rank is added up.
    parts: where they are laid out already, as the property of that name has them.
    """

    def __init__(self, setting: WorldSetting, weights: StageWeights, parts: dict[str, Part] | None = None) -> None:
        self.setting, self.weights, degrees = setting, weights, setting.degrees
        if parts is not None:
            self.parts = parts
        self.activations = StageActivations(
            setting.shape, weights, degrees, setting.recompute, setting.sequence_parallel
        )
        self._everywhere = np.ones((degrees.dp, degrees.tp))

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The dense weights and the experts, if there are any, laid out; by what their groups are called."""
        degrees = self.setting.degrees
        found = {"": _part(self.setting, self.weights.dense, degrees.dp)}
        if self.weights.experts:
            found["expert "] = _part(self.setting, self.weights.experts, degrees.replicas)
        return found

    # ---- What it holds ---------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> dict[str, np.ndarray]:
        """{kind: bytes of every rank, [D, T]}: model states by kind, what a step adds at most, activations."""
        found = {kind: np.zeros_like(self._everywhere) for kind in HELD}
        for part in self.parts.values():
            for kind, amounts in part.states().items():
                found[STATES.get(kind, "optimizer state")] += self._over(part, amounts)
        found["gathered layers"] += max(part.passing_bytes for part in self.parts.values())
        found["while stepping"] += max(part.update_bytes for part in self.parts.values())
        found["activations"] += self.activations.held_bytes(self.setting.micro_batches)
        return found

    @property
    def held(self) -> np.ndarray:
        """Return all that every rank holds at its worst moment, in the passes or in the update, [D, T] bytes."""
        kept, passes, update = (self._sum(kinds) for kinds in (KEPT, *MOMENTS.values()))
        return kept + np.maximum(passes, update)

    @property
    def padding_bytes(self) -> int:
        """What the padding of ZeRO-1's shards takes on every rank, of parameters and gradients."""
        return sum(padding_bytes(part.world.layout) for part in self.parts.values() if isinstance(part, Zero1Part))

    def _sum(self, kinds: Iterable[str]) -> np.ndarray:
        return np.sum([self.memory[kind] for kind in kinds], axis=0)

    # ---- What it sends ---------------------------------------------------------------------------------------

    @cached_property
    def sent(self) -> dict[Move, np.ndarray]:
        """{(group, move): bytes that every rank sends in a step, [D, T]}."""
        found: dict[Move, np.ndarray] = {}
        for name, part in self.parts.items():
            for (group, move), amounts in part.sent().items():
                found[name + group, move] = self._over(part, amounts)
        for key, (_, amount) in self.passing().items():
            found[key] = self.setting.micro_batches * amount * self._everywhere
        if self.tied_bytes:
            found["pp", "tied embedding"] = self.tied_bytes * self._everywhere
        return found

    def passing(self) -> dict[Move, tuple[float, float]]:
        """Return {(group, move): (hops, bytes that a rank sends)} of one micro-batch, forward and backward."""
        shape, (_, tp, pp, ep) = self.setting.shape, self.setting.degrees
        found: dict[Move, tuple[float, float]] = {}
        if tp > 1:
            over_tp = self.activations.messages()
            found["tp", "activations"] = over_tp.hops, over_tp.sent_bytes
        if pp > 1:
            neighbours = (not self.activations.is_first) + (not self.activations.is_last)
            found["pp", "activations"] = 2, self.activations.passed_on_bytes() * neighbours
        if ep > 1 and shape.experts and self.weights.mixtures:
            calls = (4 + 2 * self.setting.recompute) * self.weights.mixtures  # there and back, in every pass
            payload = shape.context * shape.width * ACTIVATION_BYTES * shape.experts.active / tp
            found["ep", "tokens"] = calls * hops("all_to_all", ep), calls * payload * (ep - 1) / ep
        return found

    @property
    def tied_bytes(self) -> int:
        """What a rank sends once in a step to add up the gradients of an embedding that is the head, too, elsewhere."""
        tables = [w for w in self.weights.dense if w.name in ("tokens", "head")]
        if not self.setting.shape.tied or self.setting.degrees.pp == 1 or not tables:
            return 0
        specs, _ = local_specs(tables[:1], self.setting.degrees.tp)
        return ring_bytes("all_reduce", ITEM_BYTES[gradient_dtype(specs[0].dtype)] * specs[0].numel, 2)

    # ---- What it computes, and how long that takes -------------------------------------------------------------

    @cached_property
    def flops(self) -> np.ndarray:
        """What Newton–Schulz costs every rank in a step, [D, T] FLOPs."""
        return sum((self._over(part, part.flops()) for part in self.parts.values()), 0 * self._everywhere)

    def pass_seconds(self) -> dict[str, float]:
        """Return seconds of one micro-batch, forward and backward, part by part."""
        setting, fabric, (dp, tp, _, ep) = self.setting, self.setting.fabric, self.setting.degrees
        work = (8 if setting.recompute else 6) * self.weights.active * setting.shape.context / tp
        links = {"tp": fabric.ring(tp, 1), "ep": fabric.exchange(ep, tp), "pp": fabric.ring(2, dp * tp)}
        found = {"forward, backward": work / fabric.flops_per_second}
        for (group, move), (messages, amount) in self.passing().items():
            link = links[group]
            found[f"{move} ({group})"] = messages * link.alpha_seconds + amount / link.bytes_per_second
        if not _baseline(setting).shards_parameters:
            return found  # before anything is laid out: a search asks for this of every division
        gathers = [
            part.pass_seconds(fabric.ring(part.dp, tp * dp // part.dp))
            for part in self.parts.values()
            if isinstance(part, FsdpPart) and part.dp > 1
        ]
        return found | ({GATHERS: sum(gathers)} if gathers else {})

    def update_seconds(self) -> dict[str, float]:
        """Return seconds of the update, part by part, dense weights and experts together."""
        fabric, (dp, tp, _, _) = self.setting.fabric, self.setting.degrees
        found: dict[str, float] = {}
        for part in self.parts.values():
            links = fabric.links(part.dp, tp, stride=tp * (dp // part.dp))
            for name, took in part.update_seconds(links, fabric.flops_per_second).items():
                found[name] = found.get(name, 0.0) + took
        if self.tied_bytes:
            found["tied embedding"] = self.tied_bytes / fabric.ring(2, dp * tp).bytes_per_second
        return found

    def _over(self, part: Part, amounts: np.ndarray) -> np.ndarray:
        """Return a column over a part's ranks, [D'] or [D' x T], as one over all ranks of the stage, [D, T]."""
        return np.repeat(amounts.reshape(part.dp, -1), self.setting.degrees.dp // part.dp, axis=0) * self._everywhere


def _part(setting: WorldSetting, weights: Sequence[Weight], dp: int) -> Part:
    specs, muon = local_specs(weights, setting.degrees.tp)
    return _baseline(setting).lay_out(specs, muon, dp, setting.degrees.tp, setting.micro_batches)


def _baseline(setting: WorldSetting) -> PlannedBaseline:
    return PlannedBaseline("", setting.optimizer, setting.strategy, setting.rule)


# ---- The whole world ------------------------------------------------------------------------------------------


class WorldPlan:
    """All stages of a world. Raises UsageError for a setting that cannot be."""

    def __init__(self, setting: WorldSetting) -> None:
        setting.check()
        self.setting = setting
        self.stages = [StagePlan(setting, each) for each in stages(setting.shape, *setting.degrees[2:])]

    def _mean(self, of: Callable[[StagePlan], np.ndarray]) -> float:
        """Return the mean over all ranks of what every stage has an array of."""
        weighted = (len(stage.weights.numbers) * float(of(stage).mean()) for stage in self.stages)
        return sum(weighted) / self.setting.degrees.pp

    @cached_property
    def fullest(self) -> tuple[StagePlan, tuple[int, int], float]:
        """The rank that holds most: its stage, (dp, tp), and how many bytes."""
        found = []
        for stage in self.stages:
            held = stage.held
            place = np.unravel_index(int(np.argmax(held)), held.shape)
            found.append((float(held[place]), stage, (int(place[0]), int(place[1]))))
        most, stage, rank = max(found, key=lambda row: row[0])
        return stage, rank, most

    @property
    def held(self) -> dict[str, float]:
        """What the fullest rank holds, {kind: bytes}."""
        stage, rank, _ = self.fullest
        return {kind: float(amounts[rank]) for kind, amounts in stage.memory.items()}

    @property
    def held_at_worst(self) -> dict[str, float]:
        """What the fullest rank holds at its worst moment, {kind: bytes}, without kinds of which it holds nothing."""
        there = max(MOMENTS.values(), key=lambda kinds: sum(self.held[kind] for kind in kinds))
        return {kind: self.held[kind] for kind in (*KEPT, *there) if self.held[kind]}

    @property
    def mean_worst(self) -> float:
        """What a rank holds at its worst moment, on average over all, in bytes."""
        return self._mean(lambda stage: stage.held)

    @property
    def mean_held(self) -> dict[str, float]:
        """What a rank holds, on average over all, {kind: bytes}."""
        return {kind: self._mean(lambda stage, kind=kind: stage.memory[kind]) for kind in HELD}  # type: ignore[misc]

    @property
    def padding_bytes(self) -> int:
        """What padding takes on the fullest rank, of its parameters and gradients."""
        return self.fullest[0].padding_bytes

    @property
    def fits(self) -> bool:
        """Whether the fullest rank's bytes fit its device; nothing is kept back for libraries and fragments."""
        return self.fullest[2] <= self.setting.device.memory_bytes

    @cached_property
    def sent(self) -> dict[Move, tuple[float, float]]:
        """{(group, move): bytes that a rank sends in a step, mean over ranks, and most}."""
        found: dict[Move, tuple[float, float]] = {}
        for stage in self.stages:
            for move, amounts in stage.sent.items():
                mean, most = found.get(move, (0.0, 0.0))
                share = len(stage.weights.numbers) * float(amounts.mean()) / self.setting.degrees.pp
                found[move] = mean + share, max(most, float(amounts.max()))
        return found

    @property
    def most_sent(self) -> float:
        """What the rank sends that sends most, in bytes."""
        return max(float(np.sum(list(stage.sent.values()), axis=0).max()) for stage in self.stages)

    @cached_property
    def flops(self) -> tuple[float, float]:
        """What Newton–Schulz costs a rank in a step: (mean over ranks, most), FLOPs."""
        return self._mean(lambda stage: stage.flops), max(float(stage.flops.max()) for stage in self.stages)

    @property
    def bubble(self) -> float:
        """The share of the pipeline's time in which a rank waits."""
        return bubble_share(self.setting.degrees.pp, self.setting.micro_batches)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of a step, part by part, one after the other: of the slowest stage, for which all others wait."""
        passes = max((stage.pass_seconds() for stage in self.stages), key=lambda parts: sum(parts.values()))
        update = max((stage.update_seconds() for stage in self.stages), key=lambda parts: sum(parts.values()))
        found = {name: self.setting.micro_batches * took for name, took in passes.items()}
        if self.setting.degrees.pp > 1:
            found["bubble"] = (self.setting.degrees.pp - 1) * sum(passes.values())
        return {name: took for name, took in (found | update).items() if took}

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def model_flops_share(self) -> float:
        """Which share of all devices' peak goes into 6 FLOPs per active parameter and token."""
        work = 6 * self.setting.shape.active * self.setting.tokens
        return work / self.step_seconds / self.setting.degrees.ranks / self.setting.device.peak_flops

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for a results file. Bytes and FLOPs are whole, seconds have four digits."""
        setting = self.setting
        (stage, rank, most), (mean, slowest) = self.fullest, self.flops
        return {
            "model": setting.shape.title,
            "ranks": setting.degrees.ranks,
            **setting.degrees._asdict(),
            "optimizer": setting.optimizer,
            "strategy": setting.strategy if setting.optimizer == "muon" else None,
            "buckets": setting.rule if setting.optimizer != "muonw" else None,
            "tokens": setting.tokens,
            "device": setting.device.title,
            "fabric": setting.network.title,
            "recompute": setting.recompute,
            "sequence_parallel": setting.sequence_parallel,
            "micro_batches": setting.micro_batches,
            "fullest": {"stage": stage.weights.numbers[0], "dp": rank[0], "tp": rank[1], "bytes": round(most)},
            "held": {kind: round(amount) for kind, amount in self.held.items()},
            "held_mean": {kind: round(amount) for kind, amount in self.mean_held.items()},
            "padding": self.padding_bytes,
            "fits": self.fits,
            "sent": {
                f"{group}: {move}": {"mean": round(each), "most": round(top)}
                for (group, move), (each, top) in self.sent.items()
            },
            "newton_schulz_flops": {"mean": mean, "most": slowest},
            "bubble": short(self.bubble),
            "seconds": {name: short(took) for name, took in self.seconds.items()},
            "step_seconds": short(self.step_seconds),
            "model_flops_share": short(self.model_flops_share),
        }


def short(value: float) -> float:
    """Return a number with four digits, for the assumptions hold for fewer."""
    return float(f"{value:.4g}")
