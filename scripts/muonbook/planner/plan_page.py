"""A plan for people: what scripts/plan.py prints."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Collection, Iterator, Mapping

from distmuon.launch import UsageError, check_known
from distmuon.optim import strategies
from distmuon.sharding.ownership import MUCH_PADDING
from muonbook import jobs
from muonbook.figures.style import in_bytes
from muonbook.planner.choices import Compared, Search, compared, search
from muonbook.planner.fabrics import DEVICES, FABRICS
from muonbook.planner.model_shapes import find_shape
from muonbook.planner.planned_worlds import BUCKET_RULES
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import OPTIMIZERS, WorldPlan, WorldSetting

LITTLE_PADDING = 0.001  # of parameters and gradients: up to it, padding is not told
SMALL_SHARE = 0.002  # of a step, or of what is sent: parts below it are told together


# ---- Asked on a command line -----------------------------------------------------------------------------------


def plan(arguments: argparse.Namespace) -> None:
    """Plan what the arguments of scripts/plan.py ask for; print it, write it where they say so.

    Raises UsageError, naming option and remedy, for what cannot be planned.
    """
    setting = setting_of(arguments)
    own = strategies.is_file(arguments.strategy)
    with _strategy_at_fault(arguments.strategy) if own else contextlib.nullcontext():
        if setting.degrees.dp:
            plans = [WorldPlan(setting)]
            told = lines(plans[0])
        else:
            searched = search(setting, arguments.ranks)
            plans, told = searched.plans, search_lines(searched)
        found = {"plans": [each.as_dict() for each in plans]}
    print("\n".join(told))
    if arguments.json:
        jobs.write_json(arguments.json, found)


def compare(arguments: argparse.Namespace) -> None:
    """Plan by every baseline what the arguments of scripts/plan.py ask for; print it, write it where they say so.

    Raises UsageError, naming option and remedy, for what cannot be planned.
    """
    setting = setting_of(arguments)
    if not setting.degrees.dp:
        raise UsageError(f"--compare needs a grid: give --tp with --ranks {arguments.ranks}, or --dp.")
    found = compared(setting)
    print("\n".join(comparison_lines(found)))
    if arguments.json:
        jobs.write_json(arguments.json, {"baselines": [each.as_dict() for each in found]})


def setting_of(arguments: argparse.Namespace) -> WorldSetting:
    """Return what is asked for; D = 0 where a grid is to be looked for."""
    shape = find_shape(arguments.model)
    check_known(arguments, optimizer=OPTIMIZERS, buckets=BUCKET_RULES, device=DEVICES, fabric=FABRICS)
    with _strategy_at_fault(arguments.strategy):
        strategies.priced(arguments.strategy)
    degrees = _degrees(arguments)
    if arguments.sequence_parallel and degrees.dp and degrees.tp == 1:
        raise UsageError("--sequence-parallel does nothing with --tp 1; choose a larger T, or leave it out.")
    return WorldSetting(
        shape, degrees, arguments.optimizer, arguments.strategy, arguments.buckets, arguments.tokens,
        DEVICES[arguments.device], FABRICS[arguments.fabric], arguments.recompute, arguments.sequence_parallel,
    )  # fmt: skip


@contextlib.contextmanager
def _strategy_at_fault(name: str) -> Iterator[None]:
    """Raise UsageError for a ValueError inside, which is the strategy's fault."""
    try:
        yield
    except UsageError:
        raise
    except ValueError as error:
        wrong = str(error).removeprefix(f"strategy is {name!r}").lstrip(",; ").removesuffix(".")
        raise UsageError(f"--strategy {name}: {wrong}.") from error


def _degrees(arguments: argparse.Namespace) -> Degrees:
    """Return the grid that is asked for. D, if it is not given, is what --ranks leaves."""
    ranks, given = arguments.ranks, (arguments.dp, arguments.tp, arguments.pp, arguments.ep)
    if ranks is not None and given == (None,) * 4:
        return Degrees(0)
    dp, tp, pp, ep = (each or 1 for each in given)
    if arguments.dp is None:
        dp = 8 if ranks is None else ranks // (tp * pp)
    found = Degrees(dp, tp, pp, ep)
    if ranks is not None and found.ranks != ranks:
        told = f"--dp {dp} x " if arguments.dp else ""
        wrong = f"is {found.ranks} ranks" if arguments.dp else "does not divide that"
        raise UsageError(
            f"--ranks {ranks}: {told}--tp {tp} x --pp {pp} {wrong}; leave --ranks out, or make them agree."
        )
    return found


# ---- Printed ---------------------------------------------------------------------------------------------------


def lines(plan: WorldPlan) -> list[str]:
    """Return a plan in at most thirty lines, three digits each."""
    return [*_heading(plan), *_memory(plan), *_sent(plan), *_work(plan), *_seconds(plan)]


def _heading(plan: WorldPlan) -> list[str]:
    return [_place(plan), f"{_who(plan.setting)}; on {_machine(plan.setting)}", _batch(plan.setting)]


def _place(plan: WorldPlan) -> str:
    shape, degrees = plan.setting.shape, plan.setting.degrees
    ranks = jobs.plural(degrees.ranks, "rank")
    return f"{shape.title}, {_billions(shape.parameters)} parameters, on {ranks}: {degrees}"


def _batch(setting: WorldSetting) -> str:
    sequences = f"{setting.micro_batches:.4g} sequences of {setting.shape.context:,} for each DP rank"
    return f"{setting.tokens:,} tokens in a step, {sequences}"


def _machine(setting: WorldSetting) -> str:
    return f"{setting.device.title}, {setting.network.title}"


def _who(setting: WorldSetting) -> str:
    if setting.optimizer == "muonw":
        return "MuonW on FSDP2"
    if setting.optimizer == "adamw":
        return f"ZeRO-1 AdamW, buckets: {setting.rule}"
    period = 1 + sum(number for number, _ in strategies.priced(setting.strategy).others)
    mean = f" (mean of the {period} steps of its default period)" if period > 1 else ""
    return f"Muon, {setting.strategy}{mean}, buckets: {setting.rule}"


def _memory(plan: WorldPlan) -> list[str]:
    (stage, (dp, tp), most), mean = plan.fullest, plan.mean_held
    room = plan.setting.device.memory_bytes
    verdict = "fits" if plan.fits else "does not fit"
    place = f"stage {stage.weights.numbers[0]}, dp {dp}, tp {tp}"
    rows = [
        f"  {kind:<18}{in_bytes(held):>9}{in_bytes(mean[kind]):>9}{_padding(plan) if kind == 'gradients' else ''}"
        for kind, held in plan.held.items()
        if held
    ]
    told = f"{in_bytes(most):>9}{in_bytes(plan.mean_worst):>9}   of {in_bytes(room)}: {verdict}"
    total = f"  {'worst moment':<18}{told}"
    return [f"Memory of the fullest rank ({place}), and on average", *rows, total]


def _padding(plan: WorldPlan) -> str:
    """Return how much of parameters and gradients is padding, as a share of the rest; "" for a little of it."""
    padding, held = plan.padding_bytes, plan.held["parameters"] + plan.held["gradients"]
    share = padding / (held - padding)
    if share <= LITTLE_PADDING:
        return ""
    remedy = "; gather_cut, or fewer DP ranks, pad less" if share >= MUCH_PADDING else ""
    return f"   of both, {in_bytes(padding)} is padding ({share:.1%}){remedy}"


def _sent(plan: WorldPlan) -> list[str]:
    moves: dict[str, dict[str, float]] = {}  # by group
    for (group, move), (mean, _) in plan.sent.items():
        if mean:
            moves.setdefault(group, {})[move] = mean
    groups = {group: sum(parts.values()) for group, parts in moves.items()}
    total = in_bytes(sum(groups.values()))
    told = [f"Sent by a rank in a step: {total} on average, {in_bytes(plan.most_sent)} at most"]
    for name, sent in _large(groups).items():
        parts = ", ".join(f"{move} {in_bytes(mean)}" for move, mean in moves.get(name, {}).items())
        told.append(f"  {name:<12}{in_bytes(sent):>9}   {parts}".rstrip())
    return told


def _work(plan: WorldPlan) -> list[str]:
    mean, most = plan.flops
    if not most:
        return []
    slowest = f"{most / 1e12:.3g} on the slowest ({most / mean:.2f} times that)"
    return [f"Newton–Schulz of a rank in a step: {mean / 1e12:.3g} TFLOP on average, {slowest}"]


def _seconds(plan: WorldPlan) -> list[str]:
    total = plan.step_seconds
    rows = [f"  {name:<24}{took:>9.3g}{took / total:>7.1%}" for name, took in _large(plan.seconds).items()]
    bubble = f"; bubble {plan.bubble:.1%} of the pipeline" if plan.setting.degrees.pp > 1 else ""
    return [f"Seconds of a step: {total:.3g}, {plan.model_flops_share:.0%} of the peak in the model{bubble}", *rows]


def search_lines(found: Search) -> list[str]:
    """Return what fits, quickest first, and the first of it as `lines` has it."""
    first = found.plans[0]
    table = [
        f"{first.setting.shape.title} on {jobs.plural(first.setting.degrees.ranks, 'rank')}; {_who(first.setting)}",
        f"on {_machine(first.setting)}; {first.setting.tokens:,} tokens in a step",
        f"{found.possible} divisions are possible, {found.roomy} have room by rule of thumb; planned, quickest first:",
        "    DP   TP   PP   EP    fullest  seconds   of the peak",
    ]
    for plan in found.plans:
        sizes = "".join(f"{size:>5}" for size in plan.setting.degrees)
        held, took = in_bytes(plan.fullest[2]), f"{plan.step_seconds:.3g}"
        table.append(f" {sizes}{held:>11}{took:>9}{plan.model_flops_share:>11.0%}")
    return [*table, "The first of them:", *_memory(first), *_work(first), *_seconds(first)]


def comparison_lines(found: Collection[Compared]) -> list[str]:
    """Return the world, and a line for every baseline in it, below the AdamW that is laid out alike."""
    first = next(iter(found)).muon
    room = in_bytes(first.setting.device.memory_bytes)
    rows = [
        _place(first),
        f"{_batch(first.setting)}; on {_machine(first.setting)}",
        f"{'':24}seconds  / AdamW's  Newton–Schulz, s  a matrix done on  worst rank of {room}",
    ]
    above = None
    for each in found:
        if each.baseline.adamw != above:
            above = each.baseline.adamw
            layout = {"megatron": ", buckets", "flat": ", flat"}[above.rule] if above.optimizer == "adamw" else ""
            rows.append(f"  {above.title + layout:<22}{each.adamw.step_seconds:7.3g}{'':49}{_held(each.adamw)}")
        ranks = f"{each.repeats:.3g} rank" + ("s" if round(each.repeats) > 1 else "")
        took = f"{each.muon.step_seconds:7.3g}{each.over_adamw:10.2f}x{each.muon.seconds['Newton–Schulz']:18.3g}"
        rows.append(f"    {each.baseline.title:<20}{took}{ranks:>18}  {_held(each.muon)}")
    return rows


def _held(plan: WorldPlan) -> str:
    return in_bytes(plan.fullest[2]) + ("" if plan.fits else ": no room")


def _billions(number: int) -> str:
    return f"{number / 1e12:.3g} trillion" if number >= 1e12 else f"{number / 1e9:.3g} billion"


def _large(parts: Mapping[str, float], most: int = 12) -> dict[str, float]:
    """Return at most so many parts, in their order; all others, and those below SMALL_SHARE, as one at the end."""
    total = sum(parts.values())
    largest = sorted(parts, key=lambda name: -parts[name])[: len(parts) if len(parts) <= most else most - 1]
    found = {name: part for name, part in parts.items() if name in largest and part >= SMALL_SHARE * total}
    rest = total - sum(found.values())
    return found | ({"others": rest} if len(found) < len(parts) else {})
