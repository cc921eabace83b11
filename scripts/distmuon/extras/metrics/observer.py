"""Metrics: what an optimizer does to a model, observed every so many steps, the same numbers on every grid.

    metrics = Metrics(optimizer, every=20, to=[Console(), JsonLines("run.jsonl")], scalars={"loss": "mean"})
    ...
    metrics.record(loss=loss.detach())
    optimizer.step()               # every 20th is observed
    print(metrics.latest)

An observed step costs a copy of the parameters that this rank holds, one all-reduce of a few numbers for each
parameter, and for each sample one of two matrices. All others cost a comparison.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from distmuon.extras.metrics.matrix import orthogonality, update_of
from distmuon.extras.metrics.watched import REDUCTIONS, Stopwatch, WatchedOptimizer, of_table
from distmuon.extras.metrics.writers import Writer
from distmuon.optim.muon import momentum_, scale
from distmuon.optim.options import check_count, check_number, plain
from distmuon.sharding.boxes import extent
from distmuon.sharding.collectives import Group
from distmuon.sharding.consistency import check_same, raise_together
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.local_views import LocalView, fill_
from distmuon.sharding.warning import warn_user

Sample = tuple[int, int]  # (number of the parameter, which of its matrices)


@dataclass
class StepSnapshot:
    """An observed step that has begun: what will be gone when it has ended."""

    before: dict[int, Tensor]  # this rank's values, by parameter
    samples: list[Sample]
    momenta: dict[int, Tensor | None]  # of the parameters that are sampled
    sent_bytes: int
    skipped_steps: int
    stopwatch: Stopwatch


class Metrics:
    """Observes every `every`-th step of an optimizer, by torch's hooks around `step`.

    optimizer: Muon, MuonW, DistributedMuon, Zero1AdamW, torch's Muon or AdamW, or one of your own that has the method
        `local_views` (see `LocalView`). All ranks construct this together; in the observed steps they talk. One that
        trains whole plain tensors is observed by each rank for itself.
    every: steps from one observation to the next.
    to: writers, `Console`, `JsonLines`, `TensorBoard` or alike; rank 0's are used. One that fails later, as on a full
        disk, is dropped with a warning: training goes on. Two optimizers of one model want a file each.
    scalars: what else will be recorded, {name: "max", "sum" or "mean"}. Over the ranks that have recorded it; a sum
        over TP rank 0 of each TP group (the mesh dimension "tp"), since its ranks read the same data.
    samples: matrices that are looked at more closely in each observation, in turns. Each takes two eigendecompositions
        of its shorter side on rank 0, while the others wait; 0 for none.
    start: steps made before, for a run that is resumed. Steps are calls of `step`, skipped ones too.

    latest: the record of the latest observation, {} before; on all ranks the same, but for samples, which rank 0 has:
        step, time, optimizer, skipped: the step's number, seconds since 1970, the optimizer's class, whether it was
            skipped for an infinity in a gradient
        totals, groups, parameters: of all, in a list, by name; each has:
            update_rms      of what moved the weights, decay and learning rate taken out, over those with a gradient;
                            None where no step was taken or lr is 0. It is measured at the weights: in bf16 without
                            masters their rounding is part of it. Muon's is mostly between 0.1 and 0.2, and
                            AdamW's falls towards that as one trains.
            weight_rms      after the step
            momentum_norm   Frobenius; momentum_buffer, or exp_avg
            gradient_norm   of the mean gradient; sharded: before clipping; else as `step` finds it
        samples: by name, error, cosine, singular_values: see `matrix`; of the update by its scale, so that 1 is ideal
        seconds: of the step, forward and backward not included (a closure is), mean over ranks;
            communication, newton_schulz: shares of it; see `Stopwatch`
        sent_bytes: in the step, by the optimizer's ledger, mean over ranks; 0 for torch's optimizers, which have none
        scalars: {name: value}; None where no rank has recorded it since the observation before

    What else writes to parameters in hooks of `step` comes after this, or it counts as the optimizer's.
    Raises TypeError for another optimizer; ValueError for a wrong value, or a file that cannot be written;
    RankMismatchError on all ranks where they ask for different things.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        every: int = 20,
        to: Iterable[Writer] = (),
        *,
        scalars: Mapping[str, str] | None = None,
        samples: int = 1,
        start: int = 0,
    ) -> None:
        self.optimizer, self.every, self.step = optimizer, every, start
        self.latest: dict[str, Any] = {}
        if not isinstance(scalars, Mapping | None):
            raise TypeError(f'scalars is {scalars!r}; give names and how to reduce them, such as {{"loss": "mean"}}.')
        self._writers = list(to) if isinstance(to, Iterable) else []
        if not isinstance(to, Iterable) or not all(hasattr(writer, "write") for writer in self._writers):
            raise TypeError(f"to is {to!r}; give writers in a list, such as [Console()].")
        self._reductions, self._samples = dict(scalars or {}), samples
        self._recorded: dict[str, float | Tensor] = {}
        self._underway: StepSnapshot | None = None
        self._look()
        self._agree()
        self._hooks = [
            optimizer.register_step_pre_hook(self.before_step),
            optimizer.register_step_post_hook(self.after_step),
        ]

    def record(self, **values: float | Tensor) -> None:
        """Hand in scalars for the next observation; of one that comes again before it, the later value counts.

        Tensors are copied, and read at the observation, so that nothing waits for a GPU now. No collective: ranks may
        leave some out. Raises ValueError for a name that was not announced, and for what is not one number.
        """
        if unknown := values.keys() - self._reductions.keys():
            known = ", ".join(self._reductions) or "none"
            raise ValueError(
                f"scalar(s) {', '.join(sorted(unknown))} were not announced ({known} were); name them in scalars= with "
                "how to reduce them, on every rank."
            )
        for name, value in values.items():
            if isinstance(value, DTensor):
                raise ValueError(f"scalar {name!r} is a DTensor; give its full_tensor(), which all ranks ask for.")
            if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
                raise ValueError(
                    f"scalar {name!r} is {value.dtype} of shape {tuple(value.shape)}; give one real number."
                )
            if not isinstance(value, Tensor):
                check_number(f"scalar {name!r}", value)
            self._recorded[name] = value.detach().clone() if isinstance(value, Tensor) else float(value)

    def log(self, **scalars: float) -> None:
        """Write what was measured after a step, such as a loss on held-out text, at once, whether the step is observed
        or not: a record of its own, with step, time and scalars alone. It adds to the observation of that step.

        No collective: what rank 0 is given is written, as it is. Raises TypeError, and writes nothing, for what is no
        number.
        """
        for name, value in scalars.items():
            if value is not None:
                check_number(f"scalar {name!r}", value)
        self._write(
            {"step": self.step, "time": time.time(), "scalars": {name: plain(value) for name, value in scalars.items()}}
        )

    def close(self) -> None:
        """Stop observing, and close the writers. No collective; twice does no harm."""
        self._abandon()
        for hook in self._hooks:
            hook.remove()
        for writer in self._writers:
            writer.close()
        self._writers = []

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *raised: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    # ---- Around a step ------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_step(self, *_: Any) -> None:
        """Keep what the step is about to overwrite, if it is one to be observed; torch calls it, by the hook."""
        self.step += 1
        self._abandon()  # where the step before has raised
        if self.step % self.every:
            return
        if self._seen != self._parameters():
            self._look()
        views = self._watched.views()
        samples = self._round_robin(views)
        momenta = {index: self._watched.momentum_of(views[index]) for index, _ in samples}
        self._underway = StepSnapshot(
            {index: view.values.clone() for index, view in enumerate(views) if view.values is not None},
            samples,
            {index: None if momentum is None else momentum.clone() for index, momentum in momenta.items()},
            self._watched.sent_bytes,
            getattr(self.optimizer, "skipped_steps", 0),
            Stopwatch(self._watched.device),
        )

    @torch.no_grad()
    def after_step(self, *_: Any) -> None:
        """Measure a step that was observed, let all ranks add up, write. Collective; torch calls it, by the hook."""
        step = self._underway
        if step is None:
            return
        self._abandon()
        watched = self._watched
        views, sent_bytes = watched.views(), watched.sent_bytes - step.sent_bytes
        skipped = getattr(self.optimizer, "skipped_steps", 0) > step.skipped_steps
        measured = [not skipped and float(group["lr"]) != 0 for group in self.optimizer.param_groups]
        updates = self._updates(step, views, measured)
        fed = self._ns_input(step, views, updates)
        due = [(index, number) for index, number in step.samples if measured[watched.group_of[index]]]
        samples = {sample: self._gather(sample, views, updates, fed) for sample in due}
        scalars = {name: float(value) for name, value in self._recorded.items()}
        self._recorded.clear()
        recorded = [scalars.get(name) for name in self._reductions]
        sums, table = watched.all_reduce(views, updates, step.stopwatch.seconds(), sent_bytes, recorded)
        self.latest = {
            "step": self.step,
            "time": time.time(),
            "optimizer": type(self.optimizer).__name__,
            "skipped": skipped,
            **watched.norms(views, sums, measured),
            "samples": {_name_of(views, s): orthogonality(*pair) for s, pair in samples.items() if pair},
            **of_table(table, self._reductions),
        }
        self._write(self.latest)

    def _updates(self, step: StepSnapshot, views: Sequence[LocalView], measured: list[bool]) -> dict[int, Tensor]:
        """Return the update of all values that had a gradient, and can be measured, in float32 or wider."""
        found = {}
        for index, (view, number) in enumerate(zip(views, self._watched.group_of, strict=True)):
            if measured[number] and view.values is not None and view.gradient is not None:
                group, before = self.optimizer.param_groups[number], step.before[index]
                wide = torch.promote_types(before.dtype, torch.float32)
                rates = float(group["lr"]), float(group.get("weight_decay", 0.0))
                found[index] = update_of(before.to(wide), view.values.to(wide), *rates)
        return found

    def _abandon(self) -> None:
        if self._underway is not None:
            self._underway.stopwatch.stop()
        self._underway = None

    # ---- Samples ------------------------------------------------------------------------------------------

    def _round_robin(self, views: Sequence[LocalView]) -> list[Sample]:
        """Return the matrices whose turn it is, the same on all ranks, and after a resumption."""
        every = [(i, n) for i, view in enumerate(views) for n in range(len(view.matrices))]
        first = (self.step // self.every - 1) * self._samples
        return [every[(first + n) % len(every)] for n in range(min(self._samples, len(every)))]

    def _ns_input(
        self, step: StepSnapshot, views: Sequence[LocalView], updates: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:  # U, as `LocalView.values`
        """Return what Newton–Schulz was fed of the parameters that are sampled, and had a gradient.

        It is computed again, from the momentum before the step and the gradient, and rounded as it was.
        """
        found = {}
        for index in step.momenta.keys() & updates.keys():
            group, view = self.optimizer.param_groups[self._watched.group_of[index]], views[index]
            before, after = step.momenta[index], self._watched.momentum_of(view)
            assert view.gradient is not None
            assert after is not None
            buffer = torch.zeros_like(after) if before is None else before
            options = group["momentum"], group["nesterov"], group["momentum_kind"]
            (fed,) = momentum_([buffer], [view.gradient.to(buffer.dtype)], *options)
            found[index] = fed.to(view.ns_dtype)
        return found

    def _gather(
        self, sample: Sample, views: Sequence[LocalView], *values: Mapping[int, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Return a matrix's update, by its scale, and what Newton–Schulz was fed, [A, B]; None but on rank 0.

        values: of both, by parameter. Collective: an all-reduce, to which every element's holder adds it.
        """
        index, view = sample[0], views[sample[0]]
        box, shape = view.matrices[sample[1]]
        dtype = torch.promote_types(view.kept_dtype, torch.float32)
        both = torch.zeros(2, *extent(box), dtype=dtype, device=self._watched.device)
        if view.counted and index in values[0]:
            for into, of_parameter in zip(both, values, strict=True):
                fill_(into, box, view.of(of_parameter[index]))
        self._watched.world.all_reduce(both, "samples")
        if not self._first or not both.any():  # zeros: it had no gradient on any rank
            return None
        moved, fed = both.view(2, *shape)
        return moved / scale(shape, self.optimizer.param_groups[self._watched.group_of[index]]["scale"]), fed

    # ---- Ranks and writers --------------------------------------------------------------------------------

    def _look(self) -> None:
        """Look who holds what: at construction, and where the groups are others than they were."""
        self._watched = WatchedOptimizer(self.optimizer)
        self._seen = self._parameters()
        world = self._watched.world
        alone = world.size == 1 and dist.is_available() and dist.is_initialized()
        self._first = (dist.get_rank() if alone else world.rank) == 0

    def _parameters(self) -> list[tuple[int, int, str]]:
        """Return what the views depend on: parameters, their groups, and how a group divides them into matrices."""
        groups = enumerate(self.optimizer.param_groups)
        return [(id(p), number, repr(group.get("matrices"))) for number, group in groups for p in group["params"]]

    def _agree(self) -> None:
        """Check the arguments, on all ranks alike, and open the writers of rank 0. Collective."""
        world = self._watched.world
        grid = Grid(world, Group("tp"), world, self._watched.device, Ledger())
        with raise_together(grid, "the metrics", "ask for the same on every rank"):
            self._check_arguments()
        options = {"optimizer": type(self.optimizer).__name__, "every": self.every, "samples": self._samples}
        options |= {"start": self.step, "scalars": self._reductions}
        lines = [(name, repr(value)) for name, value in options.items()]
        lines += [(f"parameter {number}", name) for number, name in enumerate(self._watched.names)]
        check_same(grid, "metrics", lines, "ask for the same on every rank")
        if not self._first:
            self._writers = []
        with raise_together(grid, "the writers", "give rank 0 what it can write to"):
            for writer in self._writers:
                writer.open(self.step)

    def _check_arguments(self) -> None:
        for name, value, least in (("every", self.every, 1), ("samples", self._samples, 0), ("start", self.step, 0)):
            check_count(name, value, least)
        for name, how in self._reductions.items():
            if how not in REDUCTIONS:
                raise ValueError(f"scalar {name!r} is to be reduced by {how!r}; choose one of {', '.join(REDUCTIONS)}.")

    def _write(self, record: Mapping[str, Any]) -> None:
        for writer in list(self._writers):
            try:
                writer.write(record)
            except OSError as error:
                warn_user(f"{type(writer).__name__} is dropped ({error}); training goes on.")
                writer.close()
                self._writers.remove(writer)


def _name_of(views: Sequence[LocalView], sample: Sample) -> str:
    view = views[sample[0]]
    return view.name if len(view.matrices) == 1 else f"{view.name}[{sample[1]}]"
