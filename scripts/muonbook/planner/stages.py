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
from functools import cached_property, lru_cache
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
        stages, experts = f" x {self.pp} PP" * (self.pp > 1), f", {self.ep} EP" * (self.ep > 1)
        return f"{self.dp} DP x {self.tp} TP{stages}{experts}"


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

    @cached_property
    def mixture_layers(self) -> frozenset[str]:
        """The layers that have experts, as the names of their weights begin."""
        return frozenset(units_of(self.experts))


def stage_of(name: str, layers: int, pp: int) -> int:
    """Return the pipeline stage that holds a parameter: about as many layers as the others, all whole."""
    block = BLOCK.match(name)
    return _stage_of(int(block[1]) if block else None, name, layers, pp)


def _stage_of(block: int | None, name: str, layers: int, pp: int) -> int:
    if block is not None:
        return block * pp // layers
    return 0 if name in ("tokens", "positions") else pp - 1


def bubble_share(pp: int, micro_batches: float) -> float:
    """Return the share of a pipeline's time in which a rank waits: of `pp` stages, with this many micro-batches."""
    return (pp - 1) / (micro_batches + pp - 1)


def units_of(specs: Iterable[ParamSpec | Weight]) -> list[str]:
    """Return for each parameter the unit that FSDP2 gathers it with: its block, or "" for all that is in none."""
    return [block[0] if (block := BLOCK.match(spec.name)) else "" for spec in specs]


def expert_of(name: str) -> int | None:
    """Return the number of the routed expert to which a parameter belongs; None for every other."""
    found = EXPERT.search(name)
    return int(found[1]) if found else None


@lru_cache(maxsize=64)  # a search asks for the same of every T
def stages(shape: Shape, pp: int, ep: int) -> tuple[StageWeights, ...]:
    """Return the stages that differ, each once, the first one first. A tied head has a copy in the last of several."""
    routed = shape.experts.routed if shape.experts else 0
    return tuple(
        StageWeights(numbers, layers, mixtures, dense, tuple(w for e, w in experts if e < routed // ep), active)
        for numbers, layers, mixtures, dense, experts, active in _whole_stages(shape, pp)
    )


class _Read(NamedTuple):
    """A weight with what its name says. block: its number, or None. alike: what it is but for its block, numbered."""

    weight: Weight
    block: int | None
    expert: int | None
    alike: int


@lru_cache(maxsize=4)
def _read(shape: Shape) -> list[_Read]:
    """Return all weights with what their names say: names are read once, and there may be tens of thousands."""
    found, alike = [], dict[tuple, int]()
    for weight in weights_of(shape):
        block = BLOCK.match(weight.name)
        rest = weight.name[block.end() if block else 0 :]
        number = alike.setdefault((rest, *weight[1:]), len(alike))
        found.append(_Read(weight, int(block[1]) if block else None, expert_of(weight.name), number))
    return found


@lru_cache(maxsize=16)
def _whole_stages(shape: Shape, pp: int) -> list[tuple]:
    """Return the fields of `StageWeights` for E = 1, each expert's weight with its number."""
    by_stage: list[list[_Read]] = [[] for _ in range(pp)]
    for one in _read(shape):
        by_stage[_stage_of(one.block, one.weight.name, shape.layers, pp)].append(one)
    if shape.tied and pp > 1:
        table = by_stage[0][0]
        by_stage[0][0] = table._replace(weight=table.weight._replace(used=0.0), alike=-1)
        by_stage[-1].append(table._replace(weight=table.weight._replace(name="head"), alike=-2))
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, weights in enumerate(by_stage):
        alike.setdefault(tuple(one.alike for one in weights), []).append(number)
    return [_stage(tuple(numbers), by_stage[numbers[0]]) for numbers in alike.values()]


@lru_cache(maxsize=4)
def weights_of(shape: Shape) -> tuple[Weight, ...]:
    """Return `shape.weights()`, which takes its time where there are many experts, made once."""
    return tuple(shape.weights())


def _stage(numbers: tuple[int, ...], read: Sequence[_Read]) -> tuple:
    layers = {one.block for one in read if one.block is not None}
    mixtures = {one.block for one in read if one.expert is not None}
    active = round(sum(w.used * math.prod(w.shape) for w, *_ in read if len(w.shape) == 2))
    dense = tuple(one.weight for one in read if one.expert is None)
    experts = [(one.expert, one.weight) for one in read if one.expert is not None]
    return numbers, len(layers), len(mixtures), dense, experts, active


# ---- What cannot be -----------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def tp_choices(shape: Shape) -> list[int]:
    """Return every T over which the model's heads, and all that TP cuts, can be shared out evenly."""
    cut = {w.shape[w.cut] for w in weights_of(shape) if w.cut is not None and w.name not in ("tokens", "head")}
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
