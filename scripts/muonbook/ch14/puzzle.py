"""Chapter 14's puzzle: gather the next wave while the present one is worked on, with two buffers and no more.

The solution is `look_ahead`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from muonbook.puzzles import Puzzle, bypassed, first_difference, insist

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from distmuon.launch import World
    from distmuon.sharding.collectives import Flight, Group

RANKS, SHARD = 4, 3  # shard: elements per rank and wave
WAVES = (1, 2, 5)  # of the three trials


class Seen(NamedTuple):
    """What one rank saw in one trial: what its work read, per wave; under which work the next gather was under way."""

    waves: int
    read: list[list[float]]
    hidden: list[int]


class Started:
    """One gather that has been started; `wait` returns when its buffer is filled."""

    def __init__(self, wave: int, flight: Flight, out: Tensor) -> None:
        self.wave, self.out, self.landed = wave, out, False
        self._flight = flight

    def wait(self) -> None:
        self._flight.wait()
        self.landed = True


class Wire:
    """Where gathers are started. rank, size: of this rank, and of its group."""

    def __init__(self, group: Group, waves: int, buffers: list[Tensor]) -> None:
        self.rank, self.size = group.rank, group.size
        self._group, self._waves, self._buffers = group, waves, buffers
        self.started: list[Started] = []
        self.read: list[list[float]] = []
        self.hidden: list[int] = []

    def start(self, wave: int, out: Tensor) -> Started:
        """Start the gather of a wave into one of the buffers; return at once."""
        expected = len(self.started)
        insist(
            "" if wave in range(self._waves) else f"there is no wave {wave}; there are {self._waves}, from 0 on.",
            ""
            if wave == expected
            else f"wave {wave} was started where {expected} is next: a group pairs its n-th call on every rank, "
            "whatever it is for, so all ranks must start waves in one order; take 0, 1, 2 and so on.",
            ""
            if any(out is buffer for buffer in self._buffers)
            else "start was given a tensor that is not one of the two buffers; two have to do.",
        )
        for earlier in self.started:
            unread = earlier.wave >= len(self.read)
            insist(
                f"wave {wave} was started into the buffer of wave {earlier.wave}, "
                + ("which work has not read yet." if earlier.landed else "which is still being filled.")
                if earlier.out is out and (unread or not earlier.landed)
                else ""
            )
        out.fill_(float("nan"))  # what was there before must not pass for what comes
        with self._group.starting() as flight:
            self._group.all_gather(shard_of(wave, self.rank), f"wave {wave}", out=out)
        self.started.append(Started(wave, flight, out))
        return self.started[-1]

    def work(self, wave: int, buffer: Tensor) -> None:
        """Read a gathered wave, as Newton–Schulz would; waves come in order."""
        expected = len(self.read)
        insist("" if wave == expected else f"work({wave}) was called where work({expected}) is next.")
        mine = next((one for one in self.started if one.wave == wave), None)
        if mine is None:
            insist(f"work({wave}) was called before wave {wave} was started.")
        assert mine is not None
        insist(
            "" if mine.landed else f"work({wave}) was called before the wait for wave {wave}: its buffer may hold "
            "anything, and what is right today need not be right tomorrow.",
            "" if buffer is mine.out else f"work({wave}) was given the other buffer; wave {wave} is not in it.",
        )  # fmt: skip
        if any(one.wave == wave + 1 and not one.landed for one in self.started):
            self.hidden.append(wave)
        self.read.append(buffer.nan_to_num(nan=-1.0).tolist())


def shard_of(wave: int, rank: int) -> torch.Tensor:
    """Return a rank's shard of a wave [SHARD] float32: every element names its wave, its rank and its place."""
    import torch

    return 100.0 * wave + 10 * rank + torch.arange(SHARD)


def trial(world: World, solve: Callable[..., Any]) -> list[Seen]:
    """Run the reader's loop over one wave, two and five."""
    import torch

    from distmuon.sharding.grid import Grid
    from distmuon.verify.counter import CollectiveCounter

    grid, seen = Grid.of(world), []
    for waves in WAVES:
        buffers = [torch.zeros(world.size * SHARD) for _ in range(2)]
        wire = Wire(grid.dp, waves, buffers)
        grid.ledger.clear()
        with CollectiveCounter() as counter:
            solve(wire, buffers, waves, wire.work)
        left = [one.wave for one in wire.started if not one.landed]
        insist(
            f"with {waves} wave(s), wave {left[0]} is still under way after the return." if left else "",
            f"with {waves} wave(s), work({len(wire.read)}) was never called." if len(wire.read) < waves else "",
            bypassed(counter, grid.ledger),
        )
        seen.append(Seen(waves, wire.read, wire.hidden))
    return seen


def judge(evidence: list[list[Seen]]) -> list[str]:
    """Return what is wrong: what was read first, then what was not hidden."""
    wrong, exposed = [], []
    for rank, seen in enumerate(evidence):
        for one in seen:
            for wave, found in enumerate(one.read):
                wanted = [100.0 * wave + 10 * r + i for r in range(len(evidence)) for i in range(SHARD)]
                if (i := first_difference(found, wanted)) is not None:
                    wrong.append(f"rank {rank} read {found[i]:g} at index {i} of wave {wave}, not {wanted[i]:g}.")
            missing = sorted(set(range(one.waves - 1)) - set(one.hidden))
            if missing:
                exposed.append(
                    f"right, but with {one.waves} waves, while rank {rank} was at work({missing[0]}), wave "
                    f"{missing[0] + 1} was not under way: the wire is idle while you work, and you while it is busy."
                )
    return [*wrong[:1], *exposed[:1]]


def praise(evidence: list[list[Seen]]) -> str:
    """Return what was achieved, with the numbers of the run."""
    last = evidence[0][-1]
    return (
        f"of {last.waves} waves, {len(last.hidden)} travelled under the work on the one before, through two buffers, "
        f"in one order on all {len(evidence)} ranks."
    )


PUZZLE = Puzzle(
    name="look ahead",
    function="look_ahead",
    dp=RANKS,
    tp=1,
    trial=trial,
    judge=judge,
    praise=praise,
    hints=(
        "What must be true when work(k) begins? Wave k has been waited for, and wave k + 1 has been started. So the "
        "start of k + 1 stands between that wait and that work. And who starts wave 0?",
        "Start wave 0 before the loop. In the loop: wait for wave k, start wave k + 1 if there is one, work on k. Keep "
        "what start returned until the wait that belongs to it.",
        "Wave k lives in buffers[k % 2]: while work(k) reads one buffer, wave k + 1 fills the other, and wave k + 2 "
        "is started only after work(k) has let go of the first.",
    ),
)


# ---- The solution -----------------------------------------------------------------------------------------


def look_ahead(wire: Wire, buffers: list[Tensor], waves: int, work: Callable[[int, Tensor], None]) -> None:
    """Work on every wave in order, while the next one is gathered into the other buffer."""
    started = wire.start(0, buffers[0])
    for k in range(waves):
        started.wait()
        if k + 1 < waves:
            started = wire.start(k + 1, buffers[(k + 1) % 2])
        work(k, buffers[k % 2])
