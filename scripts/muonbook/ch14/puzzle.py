"""Chapter 14's puzzle: gather the next wave while the present one is worked on, with two buffers and no more.

The solution is `look_ahead`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from muonbook.puzzles import CaseReport, Puzzle, call, first_difference, require

if TYPE_CHECKING:
    from torch import Tensor

    from distmuon.sharding.collectives import Group, PendingWork
    from distmuon.sharding.grid import Grid

RANKS, SHARD = 4, 3  # shard: elements per rank and wave
WAVES = (1, 2, 5)  # of the three trials


class StartedGather:
    """One gather that has been started; `wait` returns when its buffer is filled."""

    def __init__(self, pending: PendingWork, out: Tensor) -> None:
        self.out, self.filled = out, False
        self._pending = pending

    def wait(self) -> None:
        self._pending.wait()
        self.filled = True


class WaveGathers:
    """Where gathers are started. rank, size: of this rank, and of its group.

    read: what `work` found in its buffer, per wave. hidden: the waves under whose work the next gather was under way.
    """

    def __init__(self, group: Group, waves: int, buffers: list[Tensor]) -> None:
        self.rank, self.size = group.rank, group.size
        self._group, self._waves, self._buffers = group, waves, buffers
        self.started: list[StartedGather] = []
        self.read: list[Tensor] = []
        self.hidden: list[int] = []

    def start(self, wave: int, out: Tensor) -> StartedGather:
        """Start the gather of a wave into one of the buffers; return at once."""
        expected = len(self.started)
        require(wave in range(self._waves), f"there is no wave {wave}; there are {self._waves}, from 0 on.")
        require(
            wave == expected,
            f"wave {wave} was started where {expected} is next: a group pairs its n-th call on every rank, "
            "whatever it is for, so all ranks must start waves in one order; take 0, 1, 2 and so on.",
        )
        require(
            any(out is buffer for buffer in self._buffers),
            "start was given a tensor that is not one of the two buffers; two have to do.",
        )
        for before, earlier in enumerate(self.started):
            busy = "which work has not read yet." if earlier.filled else "which is still being filled."
            free = earlier.out is not out or (earlier.filled and before < len(self.read))
            require(free, f"wave {wave} was started into the buffer of wave {before}, {busy}")
        out.fill_(float("nan"))  # what was there before must not pass for what comes
        with self._group.async_collectives() as pending:
            self._group.all_gather(gathered(wave).view(RANKS, SHARD)[self.rank], f"wave {wave}", out=out)
        self.started.append(StartedGather(pending, out))
        return self.started[-1]

    def work(self, wave: int, buffer: Tensor) -> None:
        """Read a gathered wave, as Newton–Schulz would; waves come in order."""
        expected = len(self.read)
        require(wave == expected, f"work({wave}) was called where work({expected}) is next.")
        require(wave < len(self.started), f"work({wave}) was called before wave {wave} was started.")
        require(
            self.started[wave].filled,
            f"work({wave}) was called before the wait for wave {wave}: its buffer may hold "
            "anything, and what is right today need not be right tomorrow.",
        )
        mine = buffer is self.started[wave].out
        require(mine, f"work({wave}) was given the other buffer; wave {wave} is not in it.")
        if any(not later.filled for later in self.started[wave + 1 : wave + 2]):
            self.hidden.append(wave)
        self.read.append(buffer.clone())


def gathered(wave: int) -> Tensor:
    """Return a wave from all ranks, [RANKS * SHARD] float32: every element names its wave, its rank and its place."""
    import torch

    return (100.0 * wave + 10 * torch.arange(RANKS)[:, None] + torch.arange(SHARD)).view(-1)


def trial(grid: Grid, solve: Callable[..., Any]) -> Iterator[CaseReport]:
    """Run the reader's loop over one wave, two and five; judge what was read, then what was not hidden."""
    import torch

    rank = grid.dp.rank
    for waves in WAVES:
        buffers = [torch.zeros(RANKS * SHARD) for _ in range(2)]
        link = WaveGathers(grid.dp, waves, buffers)
        call(grid, solve, link, buffers, waves, link.work)
        for wave, gather in enumerate(link.started):
            require(gather.filled, f"with {waves} wave(s), wave {wave} is still under way after the return.")
        done = len(link.read)
        require(done == waves, f"with {waves} wave(s), work({done}) was never called.")

        wrong = exposed = ""
        for wave, found in enumerate(link.read):
            sentence = f"rank {rank} read {{found}} at index {{0}} of wave {wave}, not {{wanted}}."
            wrong = wrong or first_difference(found, gathered(wave), sentence)
        for wave in range(waves - 1):
            if wave not in link.hidden and not exposed:
                exposed = (
                    f"right, but with {waves} waves, while rank {rank} was at work({wave}), wave {wave + 1} "
                    "was not under way: the link is idle while you work, and you while it is busy."
                )
        yield CaseReport([wrong, exposed], len(link.hidden))


PUZZLE = Puzzle(
    function="look_ahead",
    trial=trial,
    praise=lambda facts: (
        f"of {WAVES[-1]} waves, {facts[0][-1]} travelled under the work on the one before, through two buffers, "
        f"in one order on all {RANKS} ranks."
    ),
    hints=(
        "What must be true when work(k) begins? Wave k has been waited for, and wave k + 1 has been started. So the "
        "start of k + 1 stands between that wait and that work. And who starts wave 0?",
        "Start wave 0 before the loop. In the loop: wait for wave k, start wave k + 1 if there is one, work on k. Keep "
        "what start returned until the wait that belongs to it.",
        "Wave k lives in buffers[k % 2]: while work(k) reads one buffer, wave k + 1 fills the other, and wave k + 2 "
        "is started only after work(k) has let go of the first.",
    ),
    goal="Gather the next piece of work while the present one is computed, with two buffers.",
    dp=RANKS,
)


# ---- The solution -----------------------------------------------------------------------------------------


def look_ahead(
    link: WaveGathers,
    buffers: list[Tensor],
    waves: int,
    work: Callable[[int, Tensor], None],
) -> None:
    """Work on every wave in order, while the next one is gathered into the other buffer."""
    started = link.start(0, buffers[0])
    for k in range(waves):
        started.wait()
        if k + 1 < waves:
            started = link.start(k + 1, buffers[(k + 1) % 2])
        work(k, buffers[k % 2])
