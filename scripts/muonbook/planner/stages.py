"""Pipeline and expert parallelism: which parameters the ranks of a stage hold, and in which groups they are shared.

    rank = tp + T x (dp + D x pp)        and inside dp:  ep + E x (which replica of the experts)

Layers are dealt out to pipeline stages in contiguous runs, the embedding with the first and the head with the last. A
stage's dense weights are data-parallel over all D; its routed experts are dealt out to E ranks of those D, in runs, and
are data-parallel over the D / E ranks that hold the same ones. T cuts both. That is Megatron-LM's convention with
expert-tensor-parallel size T (megatron/core/parallel_state.py: `expert_data_parallel_size`, order "tp-cp-ep-dp-pp").
So Newton–Schulz divides by both: a rank meets its stage's matrices, and of those its experts' alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from distmuon.launch import UsageError
from distmuon.sharding.layout import ParamSpec
from muonbook.planner.model_shapes import Shape, Weight

BLOCK, EXPERT = re.compile(r"blocks\.(\d+)\."), re.compile(r"\.experts\.(\d+)\.")


class Degrees(NamedTuple):
    """How a world is divided: D data-parallel ranks, T tensor-, P pipeline-parallel; E of the D share out experts."""

    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same experts, for one TP rank of a stage."""
        return self.dp // self.ep

    def __str__(self) -> str:
        return f"{self.dp} DP x {self.tp} TP x {self.pp} PP, {self.ep} EP"


@dataclass(frozen=True)
class StageWeights:
    """What one pipeline stage holds. numbers: of the stages that hold the same, in order. experts: those of one EP
    rank. active: elements of its matrices that one token is multiplied by, as `Shape.active`."""

    numbers: tuple[int, ...]
    layers: int
    mixtures: int  # of the layers, how many have experts
    dense: tuple[Weight, ...]
    experts: tuple[Weight, ...]
    active: int


def stage_of(name: str, layers: int, pp: int) -> int:
    """Return the pipeline stage that holds a parameter: about as many layers as the others, all whole."""
    block = BLOCK.match(name)
    if block:
        return int(block[1]) * pp // layers
    return 0 if name in ("tokens", "positions") else pp - 1


def units_of(specs: Iterable[ParamSpec]) -> list[str]:
    """Return for each parameter the unit that FSDP2 gathers it with: its block, or "" for all that is in none."""
    return [block[0] if (block := BLOCK.match(spec.name)) else "" for spec in specs]


def expert_of(name: str) -> int | None:
    """Return the number of the routed expert to which a parameter belongs; None for every other."""
    found = EXPERT.search(name)
    return int(found[1]) if found else None


def stages(shape: Shape, pp: int, ep: int) -> list[StageWeights]:
    """Return the stages that differ, each once, the first one first. A tied head has a copy in the last of several."""
    routed = shape.experts.routed if shape.experts else 0
    return [
        StageWeights(numbers, layers, mixtures, dense, tuple(w for e, w in experts if e < routed // ep), active)
        for numbers, layers, mixtures, dense, experts, active in _whole_stages(shape, pp)
    ]


@lru_cache(maxsize=16)
def _whole_stages(shape: Shape, pp: int) -> list[tuple]:
    """Return the fields of `StageWeights` for E = 1, each expert's weight with its number."""
    by_stage: list[list[Weight]] = [[] for _ in range(pp)]
    for weight in _weights(shape):
        by_stage[stage_of(weight.name, shape.layers, pp)].append(weight)
    if shape.tied and pp > 1:
        table = by_stage[0][0]
        by_stage[0][0] = table._replace(used=0.0)
        by_stage[-1].append(table._replace(name="head"))
    alike: dict[tuple[Weight, ...], list[int]] = {}
    for number, weights in enumerate(by_stage):
        alike.setdefault(tuple(w._replace(name=BLOCK.sub("", w.name)) for w in weights), []).append(number)
    return [_stage(tuple(numbers), by_stage[numbers[0]]) for numbers in alike.values()]


@lru_cache(maxsize=4)
def _weights(shape: Shape) -> list[Weight]:
    return shape.weights()


def _stage(numbers: tuple[int, ...], weights: Sequence[Weight]) -> tuple:
    of = [(expert_of(weight.name), weight) for weight in weights]
    layers = {block[0] for weight in weights if (block := BLOCK.match(weight.name))}
    mixtures = {BLOCK.match(weight.name)[0] for expert, weight in of if expert is not None}  # type: ignore[index]
    active = round(sum(w.used * math.prod(w.shape) for w in weights if len(w.shape) == 2))
    dense = tuple(weight for expert, weight in of if expert is None)
    experts = [(expert, weight) for expert, weight in of if expert is not None]
    return numbers, len(layers), len(mixtures), dense, experts, active


# ---- What cannot be -----------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def tp_choices(shape: Shape) -> list[int]:
    """Return every T over which the model's heads, and all that TP cuts, can be shared out evenly."""
    cut = {w.shape[w.cut] for w in _weights(shape) if w.cut is not None and w.name not in ("tokens", "head")}
    every = math.gcd(*cut, shape.heads, shape.key_heads)
    return _divisors(every)


def check_degrees(shape: Shape, degrees: Degrees) -> None:
    """Raise UsageError, naming option and remedy, where the model cannot be divided so."""
    dp, tp, pp, ep = degrees
    if tp not in (choices := tp_choices(shape)):
        raise UsageError(
            f"--tp {tp} does not divide what {shape.title} has to be cut, {shape.heads} heads with "
            f"{shape.key_heads} of keys and values among it; choose one of {', '.join(map(str, choices))}."
        )
    if pp > shape.layers:
        raise UsageError(f"--pp {pp}: {shape.title} has {shape.layers} layers; choose from 1 to {shape.layers}.")
    if shape.experts is None:
        if ep > 1:
            raise UsageError(f"--ep {ep}: {shape.title} has no experts to share out; leave --ep out.")
        return
    if shape.experts.routed % ep:
        choices = _divisors(shape.experts.routed)
        raise UsageError(
            f"--ep {ep} does not divide the {shape.experts.routed} experts of {shape.title}; choose one of "
            f"{', '.join(map(str, choices))}."
        )
    if dp % ep:
        raise UsageError(
            f"--dp {dp} is not a multiple of --ep {ep}, whose ranks are some of its own; choose a multiple of {ep}."
        )


def all_degrees(shape: Shape, ranks: int, most_tp: int) -> Iterator[Degrees]:
    """Yield every division of `ranks` that the model permits, T up to `most_tp`."""
    routed = shape.experts.routed if shape.experts else 1
    for tp in tp_choices(shape):
        if tp <= most_tp and ranks % tp == 0:
            for pp in _divisors(ranks // tp):
                dp = ranks // tp // pp
                if pp <= shape.layers:
                    yield from (Degrees(dp, tp, pp, ep) for ep in _divisors(math.gcd(dp, routed)))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
