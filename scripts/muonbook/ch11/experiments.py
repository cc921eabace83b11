"""A tour of the museum: small trainings of each exhibit, compared with one process, and which alarms go off in them.

Chapter 11 and tests/book/ch11/test_museum.py take the same tour. Gradients are made up, different on every DP rank.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distmuon import launch
from distmuon.models.digits import digits
from distmuon.models.recipe import Recipe
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.muon import Muon
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import Layout, ParamSpec, plan
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.tensor_parallel import load_slices, mark, whole_parameters
from distmuon.verify.certificate import difference
from distmuon.verify.prediction import predict_step
from distmuon.verify.problem import train_on_grid
from distmuon.verify.training import problem_of
from muonbook.ch11.museum import broken

DP, TP, STEPS = 2, 2, 3
BUCKET_SIZE = 160  # two buckets, an odd number of elements in each: both are padded
# whole shape and tp_split_dim. `rows` and `other` straddle the shard boundary. `rows`, where a 1-D view raises, is on
# all ranks: were it on some of them only, the others would wait for those in vain.
SHAPES: dict[str, tuple[tuple[int, int], int | None]] = {
    "columns": ((12, 10), 0),
    "rows": ((9, 16), 1),
    "whole": ((7, 5), None),
    "other": ((7, 9), None),
}


class Scenario(NamedTuple):
    """groups: names per Muon group; the first learns ten times as fast. scale: of the gradients. steps: to train.

    vector: elements of one more parameter, which goes to AdamW; 0: none. lr: of the first group.
    """

    groups: tuple[tuple[str, ...], ...] = (("columns", "rows", "whole", "other"),)
    micro_batches: int = 1
    scale: float = 1.0
    steps: int = STEPS
    vector: int = 0
    lr: float = 0.1
    weight_decay: float = 0.1


SCENARIOS = {
    "one group": Scenario(),
    "two groups": Scenario(groups=(("columns", "rows"), ("whole", "other"))),
    "two micro-batches": Scenario(micro_batches=2),
    "large gradients": Scenario(scale=2.0**20),
    "first step": Scenario(steps=1),
}


# `other` and the vector share the second bucket, and the vector fills all of DP rank 1's shard: nothing there for Muon.
LONELY = Scenario(steps=1, vector=200)
PLAIN_STEP = Scenario(steps=1, lr=1.0, weight_decay=0.0)  # the update itself is what the parameters move by


# in float64, so that the losses are the same on every machine
DIGITS, RECIPE = "the digits network", Recipe(steps=20, dtype="float64")


class Visit(NamedTuple):
    """What one rank sees: whole parameters (none after an error), bytes that differ from the prediction, the error.

    loss: the last one, of the digits network; None of the scenarios, whose gradients are made up.
    """

    parameters: dict[str, Tensor]
    bytes: list[str]
    error: str
    loss: float | None = None


def initial() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, (shape, _) in SHAPES.items()}


def gradients(scenario: Scenario, step: int, dp_rank: int, micro: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * dp_rank + micro + 1)
    return {n: torch.randn(shape, generator=generator) * scenario.scale for n, (shape, _) in SHAPES.items()}


def muon_groups(scenario: Scenario, parameters: Mapping[str, nn.Parameter] | nn.ParameterDict) -> list[dict[str, Any]]:
    """Return the scenario's groups of named parameters, each with a tenth of the learning rate of the one before."""
    groups: list[dict[str, Any]] = [{"params": [(k, parameters[k]) for k in keys]} for keys in scenario.groups]
    for place, group in enumerate(groups):
        group |= {"lr": scenario.lr * 0.1**place, "weight_decay": scenario.weight_decay}
    return groups


def local_shape(name: str, tp: int) -> tuple[int, ...]:
    """Return the shape of what a TP rank holds of a matrix."""
    shape, cut = SHAPES[name]
    return tuple(size // tp if dim == cut else size for dim, size in enumerate(shape))


def on_grid(name: str | None, scenario: Scenario, grid: Grid) -> tuple[dict[str, Tensor], Ledger]:
    """Return whole parameters and ledger with exhibit `name`, or with the healthy code."""
    model = nn.ParameterDict()
    for key, (_, cut) in SHAPES.items():
        model[key] = mark(nn.Parameter(torch.empty(local_shape(key, grid.tp.size))), cut if grid.tp.size > 1 else None)
    load_slices(model, initial(), grid.tp)
    groups = muon_groups(scenario, model)
    if scenario.vector:
        model["vector"] = mark(nn.Parameter(torch.zeros(scenario.vector)), None)
        groups.append({"params": [("vector", model["vector"])], "algorithm": "adamw"})
    optimizer = maker(name)(groups, grid, bucket_size=BUCKET_SIZE, batched=False)
    grid.ledger.clear()
    for step in range(scenario.steps):
        for micro in range(scenario.micro_batches):
            for key, gradient in gradients(scenario, step, grid.dp.rank, micro).items():
                dim = SHAPES[key][1]
                mine = gradient if dim is None else gradient.chunk(grid.tp.size, dim)[grid.tp.rank]
                (model[key] * mine).sum().backward()
        if scenario.vector:
            model["vector"].sum().backward()
        optimizer.step()
    ledger = copy.deepcopy(grid.ledger)
    whole = whole_parameters(model, replace(grid.tp, ledger=Ledger()))
    return {key: whole[key] for key in SHAPES}, ledger


def maker(name: str | None) -> Any:
    """Return what makes distributed Muon with exhibit `name` in it, or the healthy one."""
    return DistributedMuon if name is None else functools.partial(broken, name)


@functools.cache
def alone(scenario: Scenario, dp: int = DP) -> dict[str, Tensor]:
    """Return the parameters of single-device Muon; gradients are added in the order in which the ranks add them.

    Every exhibit is held against the same few references, so each is trained once: do not write into what comes back.
    """
    parameters = {key: nn.Parameter(value) for key, value in initial().items()}
    optimizer = Muon(muon_groups(scenario, parameters), input_dtype=torch.bfloat16, batched=False)
    for step in range(scenario.steps):
        for key, parameter in parameters.items():
            shares = [
                sum(gradients(scenario, step, rank, micro)[key] for micro in range(scenario.micro_batches))
                for rank in range(dp)
            ]
            parameter.grad = torch.as_tensor(sum(shares)) / dp
        optimizer.step()
    return {key: parameter.detach() for key, parameter in parameters.items()}


def predicted(scenario: Scenario, grid: Grid) -> Ledger:
    """Return the ledger that the healthy code will have filled on this rank."""
    ledger = Ledger()
    ledger.add(predict_step(layout_of(scenario), TP, grid.dp.rank, range(len(SHAPES))), scenario.steps)
    return ledger


def layout_of(scenario: Scenario) -> Layout:
    """Return the map of what a TP rank holds."""
    specs = [ParamSpec(name, local_shape(name, TP), "float32", cut) for name, (_, cut) in SHAPES.items()]
    if scenario.vector:
        specs.append(ParamSpec("vector", (scenario.vector,), "float32"))
    return plan(specs, DP, BUCKET_SIZE)


def visit(name: str | None, scenario: Scenario, grid: Grid) -> Visit:
    """Train with exhibit `name`, or with the healthy code (None); all ranks of a 2 x 2 grid together."""
    parameters, ledger = on_grid(name, scenario, grid)
    return Visit(parameters, ledger.differences(predicted(scenario, grid)), "")


def train_digits(name: str | None, grid: Grid) -> Visit:
    """Train the digits network with exhibit `name`, or with the healthy code (None), for its last loss. Collective."""
    data, _ = digits(grid, RECIPE.seed)
    run = train_on_grid(problem_of(RECIPE, data, grid.tp.size, maker(name)), grid)
    return Visit(run.parameters, [], "", run.losses[-1])


def visit_lonely(world: launch.World, name: str) -> Visit:
    """Return what this rank sees of one exhibit where a rank owns nothing, if its world does not end."""
    return visit(name, LONELY, Grid.of(world))


def moved(found: dict[str, Tensor], scenario: Scenario) -> dict[str, float]:
    """Return how far each parameter is from the reference, in units of its movement; 0 where bitwise equal."""
    start, reference = initial(), alone(scenario)
    return {
        key: 0.0 if torch.equal(found[key], reference[key]) else difference(found, {key: reference[key]}, start)
        for key in reference
    }


# ---- Which alarms go off ----------------------------------------------------------------------------------

RIGHT = "right, bit for bit"
CLOSE = 0.05  # of the movement: rounding in bf16 moves a correct result less
Exhibit = str | None  # None: the healthy code
Ranks = Sequence[Mapping[tuple[Exhibit, str], Visit]]  # what every rank saw, by exhibit and scenario


def tour(world: launch.World, names: Sequence[Exhibit]) -> Ranks | None:
    """Return what every rank sees of each exhibit in every scenario, and, for the table of several, on the digits."""
    grid = Grid.of(world)
    seen = visit_all(names, grid)
    for name in names if len(names) > 1 else ():
        seen[name, DIGITS] = survived(functools.partial(train_digits, name, grid))
    return world.gather(seen)


def visit_all(names: Sequence[Exhibit], grid: Grid) -> dict[tuple[Exhibit, str], Visit]:
    """Return what this rank sees of each exhibit in every scenario."""
    return {
        (name, label): survived(functools.partial(visit, name, scenario, grid))
        for name in names
        for label, scenario in SCENARIOS.items()
    }


def survived(take: Callable[[], Visit]) -> Visit:
    """Return the visit, of which an error is a part: it reads the same on all ranks, or they would not meet again."""
    try:
        return take()
    except (IndexError, RuntimeError) as error:
        return Visit({}, [], f"{type(error).__name__}: {error}")


def report(ranks: Ranks, names: Sequence[Exhibit]) -> tuple[bool, dict[str, list[str]]]:
    """Print the label of a single exhibit, or of many the table of alarms; return the labels of all."""
    labels = {name or "healthy": label_of(name, ranks) for name in names}
    if len(names) > 1:
        show_table(names, ranks)
    else:
        print("\n".join(*labels.values()))
    if list(names) == ["empty shard"]:
        show_lonely()
    return True, labels


def verdict(visit: Visit, scenario: Scenario) -> str:
    """Return what one rank sees of the result: "right", or which matrices are wrong and how."""
    if visit.error:
        return f"stops: {visit.error.splitlines()[0]}"
    if lost := [name for name, matrix in visit.parameters.items() if matrix.isnan().any()]:
        return f"NaN in {', '.join(lost)}"
    far = moved(visit.parameters, scenario)
    kinds = {
        "WRONG": [name for name, distance in far.items() if distance > CLOSE],
        "rounded differently": [name for name, distance in far.items() if 0 < distance <= CLOSE],
    }
    found = [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]
    return "; ".join(found) or RIGHT


def alarms(name: Exhibit, ranks: Ranks) -> dict[str, list[str]]:
    """Return which alarms go off in which scenarios: {alarm: [scenario, ...]}."""
    off: dict[str, list[str]] = {"stops": [], "result": [], "bytes": [], "replicas": []}
    for label, scenario in SCENARIOS.items():
        visits = [rank[name, label] for rank in ranks]
        if any(visit.error for visit in visits):
            off["stops"].append(label)
            continue
        if any(verdict(visit, scenario) != RIGHT for visit in visits):
            off["result"].append(label)
        if any(visit.bytes for visit in visits):
            off["bytes"].append(label)
        healthy = {key: seen for key, seen in visits[0].parameters.items() if not seen.isnan().any()}
        if any(not seen.equal(visit.parameters[key]) for visit in visits for key, seen in healthy.items()):
            off["replicas"].append(label)
    return off


def label_of(name: Exhibit, ranks: Ranks) -> list[str]:
    """Return what one exhibit does in every scenario, line by line."""
    off = alarms(name, ranks)
    lines = [f"{name or 'healthy'}, on {DP} DP x {TP} TP ranks, compared with one process:"]
    outcomes: dict[str, list[str]] = {}
    for label, scenario in SCENARIOS.items():
        counted = "" if label in off["stops"] else f"; bytes {'WRONG' if label in off['bytes'] else 'as predicted'}"
        outcomes.setdefault(verdict(ranks[0][name, label], scenario) + counted, []).append(label)
    for outcome, labels in sorted(outcomes.items(), key=lambda item: len(item[1])):
        where = "all scenarios" if len(outcomes) == 1 else "the others" if len(labels) > 2 else ", ".join(labels)
        lines.append(f"  {where:18s} {outcome}")
    if off["bytes"]:
        different = [line for rank in ranks for line in rank[name, off["bytes"][0]].bytes]
        row = different[0].partition(":")[0]
        lines.append(f"  ledger differs     {row}, among others")
    if not off["stops"]:
        lines.append(f"  replicas           {'RANKS DIFFER' if off['replicas'] else 'all ranks agree'}")
    return lines


def show_table(names: Sequence[Exhibit], ranks: Ranks) -> None:
    """Print what is trained, and in how many scenarios each exhibit sets off each alarm, beside a loss."""
    shapes = ", ".join(f"{name} {rows} x {columns}" for name, ((rows, columns), _) in SHAPES.items())
    buckets = " and ".join(f"{b.numel} + {b.padded - b.numel}" for b in layout_of(Scenario()).buckets)
    print(f"{DP} DP x {TP} TP ranks; {shapes}.")
    print(f"Buckets on a TP rank: {buckets} elements, with padding.")
    print(f"Loss: of {DIGITS}, after {RECIPE.steps} steps.\n")
    print(f"{'scenarios, of ' + str(len(SCENARIOS)):30s}  stops  result  bytes  replicas   loss")
    for name in names:
        off = [len(labels) or "." for labels in alarms(name, ranks).values()]
        loss = ranks[0][name, DIGITS].loss
        last = "stops" if loss is None else f"{loss:.3f}"
        print(f"{name or 'healthy':30s}  {off[0]!s:>5s}  {off[1]!s:>6s}  {off[2]!s:>5s}  {off[3]!s:>8s}  {last:>5s}")


def show_lonely() -> None:
    """Show the one exhibit that can end a rank: it gets a world of its own."""
    try:
        launch.run("muonbook.ch11.experiments:visit_lonely", ("empty shard",), dp=DP, tp=TP, timeout=5)
        print("  a rank owns nothing: nothing happened")
    except launch.WorldError as error:
        who = "a rank" if error.rank is None else f"DP rank {error.rank // TP}"
        where = "dp_gather" if " in dp_gather" in str(error) else "another collective"
        print(f"  a rank owns nothing: the run was aborted, and {who} was in {where}")
