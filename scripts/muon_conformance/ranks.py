"""Checks on several ranks: wherever PyTorch has put the matrices, training is what it is on one process.

One world runs every placement, one after the other; what a rank finds goes into a file at once. A placement in which
some ranks raise and others wait ends that world, and the next one goes on behind it: nothing hangs, nothing is lost.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import tempfile
import threading
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from distmuon import launch
from distmuon.launch import World
from distmuon.sharding.ledger import OPERATORS, WITHOUT_PAYLOAD
from distmuon.verify.counter import CollectiveCounter
from muon_conformance.adapter import Adapter, load
from muon_conformance.kit import CHECKS, Breach, Check, Subject, Unclaimed, said
from muon_conformance.placements import PLACEMENTS, MatrixNet, Placement, box_of, give, held, rows_of

STEPS = 4
TIMEOUT = 8.0  # seconds that a rank waits for the others in a collective; for a whole placement, twice as long
WAITED = ("Timed out", "timed out", "Timeout", "Connection closed", "Connection reset")  # in the words of who did
WORLDS = {2: ("replicated", "own", "fsdp", "fsdp_uneven", "fsdp_short"), 4: tuple(PLACEMENTS)}

Facts = dict[str, Any]


class OpenCounter(CollectiveCounter):
    """Counts what the ledger has a formula for, and names what it has none for: an optimizer may send as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.uncounted: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if func.namespace in ("c10d", "_c10d_functional") and name not in {*OPERATORS, *WITHOUT_PAYLOAD}:
            self.uncounted.add(name)
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


# ---- On every rank ----------------------------------------------------------------------------------------


def examine(world: World, source: str, names: Sequence[str], folder: str, timeout: float) -> None:
    """Train under each placement; write what this rank saw into the folder."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # its advice on speed is the optimizer's
    adapter = load(source)
    for name in names:
        found: Facts = {}
        watch = threading.Timer(2 * timeout, os._exit, (1,))  # no signal reaches a rank that is blocked in a wait
        watch.daemon = True
        watch.start()
        Path(folder, f"{name}.begun").touch()
        try:
            found |= _train(world, adapter, PLACEMENTS[name], claimed=name in adapter.placements)
        except Exception as error:  # the optimizer's, whatever it is
            found["raised"] = said(error)
        Path(folder, f"{name}.{world.rank}.json").write_text(json.dumps(found))
        dist.barrier()  # where others wait in a collective of that placement, the world ends here
        watch.cancel()


def _train(world: World, adapter: Adapter, placement: Placement, claimed: bool) -> Facts:
    """Return this rank's part of the movement and of its difference from one process, and what a step sends."""
    model = MatrixNet(placement.shapes)
    names = [name for name, _ in model.named_parameters()]
    begun = [p.detach().clone() for p in model.parameters()]
    mesh = placement.wrap(world, model)
    named = dict(model.named_parameters())
    parameters = [named[name] for name in names]
    optimizer = adapter.optimizer_on(world, mesh, parameters)
    with OpenCounter() as counter:
        _steps(world, optimizer, parameters, names, placement, range(1))
    facts: Facts = {"calls": counter.ledger.total().calls, "sent_bytes": counter.ledger.total().sent_bytes}
    facts["uncounted"] = sorted(counter.uncounted)
    _steps(world, optimizer, parameters, names, placement, range(1, STEPS // 2))
    if placement.resumed:
        state = optimizer.state_dict()
        optimizer = adapter.optimizer_on(world, mesh, parameters)
        optimizer.load_state_dict(state)
    _steps(world, optimizer, parameters, names, placement, range(STEPS // 2, STEPS))
    wholes = _on_one_process(adapter, begun, names, claimed)
    local = [p.to_local().detach() if isinstance(p, DTensor) else p.detach() for p in parameters]
    facts["movement"] = [_square(held(w, p) - held(b, p)) for w, b, p in zip(wholes, begun, parameters, strict=True)]
    facts["replicas"] = {
        f"{name} {box_of(p)}": zlib.crc32(one.contiguous().numpy().tobytes())
        for name, p, one in zip(names, parameters, local, strict=True)
    }
    facts["difference"] = [_square(one - held(w, p)) for one, w, p in zip(local, wholes, parameters, strict=True)]
    return facts


def _steps(
    world: World,
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    names: Sequence[str],
    placement: Placement,
    steps: range,
) -> None:
    """Take some steps; with gradients of its own, a rank's is everybody's plus what the next one's is less by."""
    own = (-1.0) ** world.rank if placement.own else 0.0
    others = rows_of([(f"own {name}", p) for name, p in zip(names, parameters, strict=True)], steps)
    for row, deviations in zip(rows_of(list(zip(names, parameters, strict=True)), steps), others, strict=True):
        for p, whole, deviation in zip(parameters, row, deviations, strict=True):
            give(p, whole + own * deviation)
        optimizer.step()


def _on_one_process(adapter: Adapter, begun: Sequence[Tensor], names: Sequence[str], claimed: bool) -> list[Tensor]:
    """Return what the optimizer makes of whole matrices here; the reference's, where it cannot do without ranks."""
    subject = Subject(adapter)
    rows = list(rows_of(list(zip(names, begun, strict=True)), range(STEPS)))
    try:
        return subject.train(begun, rows)[0]
    except Exception:
        if adapter.nesterov is None or adapter.scale is None:
            raise
        return subject.plain(begun, rows)


def _square(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


# ---- In the command's process -----------------------------------------------------------------------------


@functools.cache
def facts_of(source: str, ranks: int) -> dict[str, list[Facts]]:
    """Return what every rank found under each placement; [{}] where it was not tried.

    Starts as many worlds as it takes, and keeps what came of them.
    """
    adapter = load(source)
    waiting, found = [name for name in WORLDS[ranks] if _is_tried(adapter, name)], {}
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        while waiting:
            problem = None
            try:
                launch.run(examine, (source, tuple(waiting), folder, TIMEOUT), dp=ranks, timeout=TIMEOUT)
            except launch.WorldError as error:
                problem = said(error)
            done = [name for name in waiting if len(list(Path(folder).glob(f"{name}.*.json"))) == ranks]
            for name in done:
                files = [Path(folder, f"{name}.{rank}.json") for rank in range(ranks)]
                found[name] = [json.loads(file.read_text()) for file in files]
            waiting = [name for name in waiting if name not in done]
            if problem is not None and waiting and Path(folder, f"{waiting[0]}.begun").exists():
                here = [json.loads(file.read_text()) for file in Path(folder).glob(f"{waiting[0]}.*.json")]
                silent = [{"raised": problem}, {}]  # of those that have left no word
                ended = waiting.pop(0)
                found[ended] = [*here, *silent]
                if ended not in adapter.placements:  # it may go on like this, and nothing of it is claimed
                    found |= {name: [{}] for name in waiting if name not in adapter.placements}
                    waiting = [name for name in waiting if name in adapter.placements]
            elif waiting and not done:
                raise RuntimeError(f"the world ended before its first placement: {problem}")
    return found


def _is_tried(adapter: Adapter, name: str) -> bool:
    """Say whether a placement is worth a try: an average over ranks is not what a claimless optimizer makes."""
    return name in adapter.placements or not PLACEMENTS[name].own


def look(name: str, ranks: int, subject: Subject) -> str:
    """Return how training under a placement compares with one process."""
    claimed = name in subject.adapter.placements
    if not _is_tried(subject.adapter, name):
        raise Unclaimed("it takes gradients that are the same on all ranks.")
    facts = facts_of(subject.adapter.source, ranks)[name]
    if facts == [{}]:
        raise Unclaimed("not tried: another placement that is not claimed has left ranks waiting.")
    trouble = _trouble(facts)
    wrong, seen = (trouble, "") if trouble else _compared(facts, subject)
    if ModuleNotFoundError.__name__ in wrong:
        raise Unclaimed(f"it cannot run here: {wrong}")
    if claimed and wrong:
        raise Breach(f"expected to train as on one process; {wrong}")
    if not claimed:
        raise Unclaimed(f"tried all the same: {wrong or seen}")
    return seen


def _trouble(facts: Sequence[Facts]) -> str:
    """Return what ranks raised, in a sentence; "" for nothing. Who waited in vain for another one is no cause."""
    raised = [one["raised"] for one in facts if "raised" in one]
    causes = [words for words in raised if not any(sign in words for sign in WAITED)] or raised
    if not raised or (len(raised) == len(facts) and len(set(raised)) == 1):
        return f"every rank raised {raised[0]}." if raised else ""
    return f"some ranks raised while others waited for them: {causes[0]}."


def _compared(facts: Sequence[Facts], subject: Subject) -> tuple[str, str]:
    """Return what is wrong, or "", and what was seen."""
    movement, difference = (
        torch.tensor([one[what] for one in facts], dtype=torch.float64).sum(0) for what in ("movement", "difference")
    )
    off = float((difference / movement).sqrt().max())
    calls, sent = (max(one[what] for one in facts) for what in ("calls", "sent_bytes"))
    subject.numbers |= {"distance": off, "calls": calls, "sent_bytes": sent}
    traffic = f"{calls} collectives and {sent:,} bytes from the busiest rank in a step"
    uncounted = sorted({name for one in facts for name in one["uncounted"]})
    traffic += f", {' and '.join(uncounted)} not counted" if uncounted else ""
    held: dict[str, set[int]] = {}
    for one in facts:
        for what, digest in one["replicas"].items():
            held.setdefault(what, set()).add(digest)
    drifted = [what.partition(" ")[0] for what, digests in held.items() if len(digests) > 1]
    if drifted:
        return f"ranks that hold the same part of {drifted[0]} end with different numbers ({traffic}).", ""
    if not off <= subject.tolerance:
        return f"a matrix is {off:.2g} of its movement from where one process takes it ({traffic}).", ""
    return "", f"as on one process, {f'up to {off:.0e}' if off else 'to the bit'}; {traffic}."


WHYS = {
    "own": "Averaging is part of the optimizer then: a rank that steps on its own gradient drifts from the others.",
    "resumed": "A run is stopped and resumed; a shard of momentum that is lost or exchanged shows only in the loss.",
    "replicated": "Replicas that end differently are different models, and DDP never looks.",
    "fsdp_short": "Some ranks then hold nothing of a matrix, and still have to take part.",
    "fsdp_uneven": "Most matrices of real models do not divide; padding or a wrong boundary spoils a row in silence.",
}
WHY = "Newton–Schulz on a part of a matrix is no part of Newton–Schulz on the whole: it must see whole matrices."
for _ranks, _names in WORLDS.items():
    for _name in _names:
        _says = f"{_ranks} ranks: {PLACEMENTS[_name].says}"
        CHECKS[_says] = Check(_says, WHYS.get(_name, WHY), partial(look, _name, _ranks), _ranks)
