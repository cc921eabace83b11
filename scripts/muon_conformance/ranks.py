"""Checks on several ranks: wherever PyTorch has put the matrices, training is what it is on one process.

Every placement has a world of its own. What a rank finds goes into a file; a rank that dies, or waits for one that has,
is ended by a clock of its own: nothing hangs, nothing is lost.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from muon_conformance.adapter import Adapter, load
from muon_conformance.kit import CHECKS, Breach, Check, Subject, Unclaimed, said
from muon_conformance.placements import PLACEMENTS, MatrixNet, give, gradient, held

PRELOAD = ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo"]  # once, for all ranks
STEPS = 4
START = 120.0  # seconds that a rank waits for the others to be there
TIMEOUT = 8.0  # seconds that a rank waits for the others in a collective; for a whole placement, twice as long
WAITED = ("Timed out", "timed out", "Timeout", "Connection closed", "Connection reset")  # in the words of who did
WORLDS = {2: ("replicated", "own", "fsdp", "fsdp_uneven", "fsdp_short"), 4: tuple(PLACEMENTS)}

Facts = dict[str, Any]


class World(NamedTuple):
    """Where a rank is."""

    rank: int
    size: int
    device: str = "cpu"


# ---- On every rank ----------------------------------------------------------------------------------------


def examine(rank: int, size: int, source: str, name: str, folder: str, timeout: float) -> None:
    """Train under a placement, in a process of its own; write what this rank saw into the folder."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")  # names may lead elsewhere
    adapter, store = load(source), dist.FileStore(f"{folder}/store", size)
    _meet(store, "here", rank, size, START)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    Path(folder, f"{rank}.begun").touch()
    faulthandler.dump_traceback_later(2 * timeout, exit=True)  # no signal reaches a rank that is blocked in a wait
    try:
        facts = _train(World(rank, size), adapter, name)
    except Exception as error:  # the optimizer's, whatever it is
        facts = {"raised": said(error)}
    Path(folder, f"{rank}.json").write_text(json.dumps(facts))
    try:
        _meet(store, "done", rank, size, timeout)  # whoever left at once would break others' collectives
    finally:
        os._exit(0)  # without waiting for what has been sent to those that are gone


def _meet(store: dist.Store, where: str, rank: int, size: int, timeout: float) -> None:
    store.set(f"{where} {rank}", "")
    store.wait([f"{where} {other}" for other in range(size)], datetime.timedelta(seconds=timeout))


def _train(world: World, adapter: Adapter, name: str) -> Facts:
    """Return this rank's part of the movement and of its difference from one process."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # its advice on speed is the optimizer's
    torch.set_num_threads(1)
    placement = PLACEMENTS[name]
    model = MatrixNet(placement.shapes)
    begun = {n: p.detach().clone() for n, p in model.named_parameters()}
    mesh = placement.wrap(world, model)
    named = {n: model.get_parameter(n) for n in begun}
    own = (-1.0) ** world.rank if placement.own else 0.0  # a rank's is everybody's plus what the next one's is less by

    def take(steps: range) -> None:
        for step in steps:
            for n, p in named.items():
                give(p, gradient(n, begun[n], step) + own * gradient(f"own {n}", begun[n], step))
            optimizer.step()

    optimizer = adapter.optimizer_on(world, mesh, named.values())
    take(range(STEPS // 2))
    if placement.resumed:
        state = optimizer.state_dict()
        optimizer = adapter.optimizer_on(world, mesh, named.values())
        optimizer.load_state_dict(state)
    take(range(STEPS // 2, STEPS))
    wholes = _on_one_process(adapter, begun)
    facts: Facts = {"movement": [], "difference": [], "replicas": {}}
    for (n, p), whole in zip(named.items(), wholes, strict=True):
        local = p.to_local().detach() if isinstance(p, DTensor) else p.detach()
        elements = held(torch.arange(p.numel()).view(p.shape), p)  # that this rank holds, by their numbers
        facts["movement"].append(_square(held(whole, p) - held(begun[n], p)))
        facts["difference"].append(_square(local - held(whole, p)))
        facts["replicas"][f"{n} {_digest(elements)}"] = _digest(local)
    return facts


def _on_one_process(adapter: Adapter, begun: Mapping[str, Tensor]) -> list[Tensor]:
    """Return what the optimizer makes of whole matrices here; the reference's, where it cannot do without ranks."""
    subject, weights = Subject(adapter), [*begun.values()]
    rows = [[gradient(name, weight, step) for name, weight in begun.items()] for step in range(STEPS)]
    try:
        return subject.train(weights, rows)[0]
    except Exception:
        if adapter.nesterov is None or adapter.scale is None:
            raise
        return subject.plain(weights, rows)


def _square(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def _digest(tensor: Tensor) -> int:
    return zlib.crc32(bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()))


# ---- In the command's process -----------------------------------------------------------------------------


def facts_of(source: str, ranks: int, name: str) -> list[Facts]:
    """Return what every rank found under a placement; of one that has left no word, that it has not."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        world = [
            context.Process(target=examine, args=(rank, ranks, source, name, folder, TIMEOUT), daemon=True)
            for rank in range(ranks)
        ]
        for process in world:
            process.start()
        for process in world:
            process.join()
        if len(list(Path(folder).glob("*.begun"))) < ranks:
            raise RuntimeError("the ranks have not met, before anything was asked of the optimizer")
        files = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        return [
            json.loads(file.read_text()) if file.exists() else {"raised": f"it died (exit code {process.exitcode})"}
            for file, process in zip(files, world, strict=True)
        ]


def look(name: str, ranks: int, subject: Subject) -> str:
    """Return how training under a placement compares with one process."""
    claimed = name in subject.adapter.placements
    if PLACEMENTS[name].own and not claimed:  # an average over ranks is not what a claimless optimizer makes
        raise Unclaimed("it takes gradients that are the same on all ranks.")
    facts = facts_of(subject.adapter.source, ranks, name)
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
    subject.numbers |= {"distance": off}
    held: dict[str, set[int]] = {}
    for one in facts:
        for what, digest in one["replicas"].items():
            held.setdefault(what, set()).add(digest)
    drifted = [what.partition(" ")[0] for what, digests in held.items() if len(digests) > 1]
    if drifted:
        return f"ranks that hold the same part of {drifted[0]} end with different numbers.", ""
    if not off <= subject.tolerance:
        return f"a matrix is {off:.2g} of its movement from where one process takes it.", ""
    return "", f"as on one process, {f'up to {off:.0e}' if off else 'to the bit'}."


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
