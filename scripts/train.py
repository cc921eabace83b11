"""Train a small transformer on text, on any grid, through any stop: one plain loop, to be copied.

python scripts/train.py --dp 2 --folder out/alice
python scripts/train.py --dp 2 --tp 2 --sharding zero1 --strategy owner --text language
python scripts/train.py --config my_run.toml --lr 0.005
torchrun --standalone --nproc-per-node 4 scripts/train.py --tp 2 --folder out/alice
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 scripts/train.py --backend nccl

The same command goes on where a run was stopped: from the newest checkpoint in its folder, on this grid or another.
Ctrl-C and SIGTERM save first. A step whose loss or gradients are not finite is skipped, and none of several in a row is
saved; ten end the run. Losses are in nats per token, in metrics.jsonl too. generate.py lets the trained model write.

python scripts/generate.py out/alice --prompt "Alice was "
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from distmuon import DistributedMuon, Grid, Metrics, MuonW, Zero1AdamW, checkpoint, launch
from distmuon.metrics import JsonLines, TensorBoard
from distmuon.models.corpus import Corpus, corpus
from distmuon.models.networks import ALONE, Transformer, initial_weights
from distmuon.models.run_settings import RunSettings, parse
from distmuon.models.run_summary import Progress, beginning, ending, loss_in_words, step_in_words
from distmuon.models.same_run import check_same_run, notes_of, settings_then, what_differs
from distmuon.optim.param_groups import groups_for
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.sharding.tensor_parallel import load_slices

GENERATOR = Path(__file__).with_name("generate.py")
SKIPS = 10  # steps in a row that may be skipped before the run ends
AGAIN = 0.5  # seconds before a folder that another run keeps is asked for again
STOP_WITHIN = 25.0  # seconds to save in, once asked to stop; torchrun kills after 30
CUTS: dict[str, Any] = {
    **dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel),
    **dict.fromkeys(("out", "down"), RowwiseParallel),
}


class Ended(NamedTuple):
    """How a run has ended, the same on all ranks.

    refused: why it did not begin. again: whether another start may succeed, which keep_going.py makes unless the exit
    code is 2. diverged: after `SKIPS` skips. unsaved: why the last checkpoint is missing.
    """

    step: int
    refused: str = ""
    again: bool = False
    diverged: bool = False
    unsaved: str = ""


# ---- The loop ---------------------------------------------------------------------------------------------


def train(world: launch.World, settings: RunSettings) -> Ended:
    """Train up to the last step, or until asked to stop. Runs on every rank."""
    text = corpus(settings.text)
    held = contextlib.ExitStack()  # the run's folder and its metrics
    saving: Future[None] | None = None
    if settings.folder is not None:
        try:
            held.enter_context(claim_patiently(world, settings.folder))
        except checkpoint.CheckpointError as error:
            # under torchrun, by what is left of this run on a machine that hangs
            return Ended(0, refused=str(error), again=launch.under_torchrun())
    try:
        check_same_everywhere(world, text)
        model, optimizer, forward = build(world, settings, text.vocabulary)
        first = resume(world, settings, text, model, optimizer)
        metrics = held.enter_context(observe(settings, optimizer, first))
    except (checkpoint.CheckpointError, ValueError, ModuleNotFoundError) as error:
        held.close()
        return Ended(0, refused=str(error))

    if world.rank == 0:
        log(world, *beginning(world, settings, text, optimizer, first))
    step, skips, held_out = first, 0, None
    clock = Clock(settings.tokens_per_step, settings.log_every)
    with held:
        for step in range(first + 1, settings.steps + 1):
            lr = settings.lr_at(step)
            for group in optimizer.param_groups:
                group["lr"] = lr
            own_loss = backward(world, settings, text, forward, optimizer, step)
            norm = optimizer.clip_grad_norm_(settings.clip).item()
            loss, stop = agree(world, own_loss)
            speed = clock.step()
            metrics.record(loss=loss, tokens_per_second=speed)

            if math.isfinite(loss) and math.isfinite(norm):
                optimizer.step()
                skips = 0
            else:
                metrics.step += 1  # it counts calls of `step`
                skips += 1
                found = f"loss {loss:g}, gradient norm {norm:g}"
                log(world, f"step {step:5d}   skipped: {found} ({skips} of {SKIPS})")
            optimizer.zero_grad()

            last = stop or step == settings.steps
            if step % settings.log_every == 0:
                log(world, f"step {step:5d}   {step_in_words(loss, norm, lr, speed, text)}")
            with clock.paused():
                if step % settings.evaluate_every == 0 or step == settings.steps:
                    held_out = evaluate(world, settings, text, forward), step
                    metrics.log(held_out_loss=held_out[0])
                    log(world, f"step {step:5d}   held out {loss_in_words(held_out[0], text)}")
                due = step % settings.save_every == 0 and not skips  # not amid skipped steps
                if settings.folder is not None and (last or due):
                    saving = save(world, settings, text, model, optimizer, step)
            if stop or skips == SKIPS:
                break
        unsaved = saving.exception() if saving is not None else None
    made = Progress(first, step, clock.seconds(), clock.training(), held_out)
    if world.rank == 0:
        log(world, *ending(settings, text, made, GENERATOR))
    return Ended(step, diverged=skips == SKIPS, unsaved=str(unsaved or ""))


def backward(
    world: launch.World, settings: RunSettings, text: Corpus, forward: Any, optimizer: torch.optim.Optimizer, step: int
) -> Tensor:
    """Add up the gradients of this rank's micro-batches; return their mean loss, in nats per token.

    FSDP2 sends gradients under every backward pass by itself, our own sharding under the last one.
    """
    total = torch.zeros((), device=world.device)
    parts = world.dp * settings.accumulate
    for micro in range(settings.accumulate):
        part = world.rank // world.tp * settings.accumulate + micro
        tokens, following = text.batch(step, settings.batch, settings.context, settings.seed, part, parts)
        loss = forward(tokens.to(world.device), following.to(world.device)) / settings.accumulate
        last = micro + 1 == settings.accumulate
        ours = last and isinstance(optimizer, ShardedOptimizer)
        with optimizer.overlap_backward() if ours else contextlib.nullcontext():  # type: ignore[attr-defined]
            loss.backward()
        total += loss.detach()
    return total


def agree(world: launch.World, loss: Tensor) -> tuple[float, bool]:
    """Return the mean loss, and whether any rank was asked to stop: the same on all ranks, in one collective."""
    both = torch.tensor([loss.item(), float(world.asked_to_stop())], dtype=torch.float64, device=world.device)
    if world.size > 1:
        dist.all_reduce(both)
    return both[0].item() / world.size, both[1].item() > 0


@torch.no_grad()
def evaluate(world: launch.World, settings: RunSettings, text: Corpus, forward: Any) -> float:
    """Return the model's mean loss on windows of the held-out text, in nats per token: the same on all ranks."""
    tokens, following = text.held_out_windows(4 * settings.batch, settings.context)
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    mine = slice(world.rank // world.tp, None, world.dp)
    pieces = list(zip(tokens[mine].chunk(4), following[mine].chunk(4), strict=True))
    for piece in pieces:
        total += forward(*(tensor.to(world.device) for tensor in piece)).double() / len(pieces)
    if world.size > 1:
        dist.all_reduce(total)
    return total.item() / world.size


class Clock:
    """How long a run has taken, and how many tokens it trains on per second.

    tokens: per step. window: steps over which the speed is averaged.
    """

    def __init__(self, tokens: int, window: int) -> None:
        self.tokens, self.start, self.pauses = tokens, time.perf_counter(), 0.0
        self.ends = deque([self.start], maxlen=window + 1)

    def step(self) -> float:
        """Count a step, and return tokens per second. To be called when its loss is known: a GPU has then got there."""
        self.ends.append(time.perf_counter() - self.pauses)
        return self.tokens * (len(self.ends) - 1) / (self.ends[-1] - self.ends[0])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count as training what is done inside."""
        begun = time.perf_counter()
        yield
        self.pauses += time.perf_counter() - begun

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def training(self) -> float:
        """Return the seconds without pauses, up to the last step."""
        return self.ends[-1] - self.start


# ---- The model and its optimizer --------------------------------------------------------------------------


def build(
    world: launch.World, settings: RunSettings, vocabulary: int
) -> tuple[nn.Module, MuonW | ShardedOptimizer, Any]:
    """Return the model on this grid, its optimizer, and what computes the mean loss of a batch."""
    shape = settings.shape(vocabulary)
    whole = initial_weights(Transformer(*shape), settings.seed)
    low = settings.dtype == "bfloat16"
    zero1 = settings.sharding == "zero1"
    grid = Grid.of(world)
    tp = grid.tp if zero1 else ALONE  # FSDP2's model is whole until `shard` cuts it
    model = Transformer(*shape, tp=tp)
    load_slices(model, whole, tp)
    model.to(world.device, torch.bfloat16 if zero1 and low else None)
    if not zero1 and grid.mesh is not None:
        shard(model, grid.mesh, torch.bfloat16 if low else None)
    by_itself = low and not zero1 and world.size == 1

    def forward(tokens: Tensor, following: Tensor) -> Tensor:  # [n, length], twice
        with torch.autocast(world.device, torch.bfloat16) if by_itself else contextlib.nullcontext():
            logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())

    return model, optimizer_of(model, grid, settings), forward


def shard(model: Transformer, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Cut the layers over TP, and shard everything over DP. dtype: in which FSDP2 gathers and computes.

    mesh: of dp and tp. The groups of a grid's mesh keep --timeout; those of `init_device_mesh` would wait for torch's.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        if mesh["tp"].size() > 1:
            parallelize_module(block, mesh["tp"], {name: cut() for name, cut in CUTS.items()})
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    # by default what is outside the blocks stays whole after an evaluation, and would be trained on when it is stale
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=True)


def optimizer_of(model: nn.Module, grid: Grid, settings: RunSettings) -> MuonW | ShardedOptimizer:
    """Return Muon with AdamW for what is no hidden matrix, or AdamW for everything."""
    groups, lr, decay = groups_for(model, settings.optimizer), settings.lr, settings.weight_decay
    if settings.sharding == "fsdp2":
        return MuonW(groups, lr=lr, weight_decay=decay)
    if settings.optimizer == "adamw":
        return Zero1AdamW(groups, grid, lr=lr, weight_decay=decay, overlap_forward=True)
    return DistributedMuon(groups, grid, lr=lr, weight_decay=decay, strategy=settings.strategy, overlap_forward=True)


# ---- Checkpoints and metrics ------------------------------------------------------------------------------


def check_same_everywhere(world: launch.World, text: Corpus) -> None:
    """Raise ValueError, on all ranks, where machines have different files under the text's name. Collective."""
    found: list[Any] = [text.sha256] * world.size
    if world.size > 1:
        dist.all_gather_object(found, text.sha256)
    if differing := [rank for rank, theirs in enumerate(found) if theirs != found[0]]:
        raise ValueError(f"rank {differing[0]} reads another text than rank 0; give every machine the same file.")


@contextlib.contextmanager
def claim_patiently(world: launch.World, folder: str) -> Iterator[None]:
    """Keep the folder to this run. Collective; raises CheckpointError where another run keeps it.

    What was killed a moment ago may take a second to go; a machine that was cut off, as long as a collective waits.
    """
    patience = world.timeout if launch.under_torchrun() else 3.0
    tries = math.ceil(patience / AGAIN)  # counted, and not timed: all ranks give up at the same one
    with contextlib.ExitStack() as held:
        for left in reversed(range(tries)):
            try:
                held.enter_context(checkpoint.claim(folder))
                break
            except checkpoint.CheckpointError as taken:
                if not left:
                    raise
                if left == tries - 1 and launch.under_torchrun():
                    log(world, f"waiting     {taken}")
                time.sleep(AGAIN)
        yield


def resume(
    world: launch.World, settings: RunSettings, text: Corpus, model: nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Go on from the newest checkpoint of the run, if there is one; return its step.

    Raises CheckpointError where none of them can be believed, or they are of another run.
    """
    if settings.folder is None:
        return 0
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    with warnings.catch_warnings():  # of a state that another optimizer made: the line on --sharding says so
        warnings.filterwarnings("ignore", message=".*its state was made by")
        loaded = checkpoint.load_newest(settings.folder, model, optimizer)
    for reason in loaded.refused:
        log(world, f"refused     {reason}")
    if not loaded.step:
        return 0
    check_same_run(settings, text, loaded.notes, loaded.step)
    log(world, f"step {loaded.step:5d}   gone on from {checkpoint.at_step(settings.folder, loaded.step)}")
    for line in what_differs(settings, loaded.notes, loaded.step):
        log(world, f"step {loaded.step:5d}   {line}")
    if settings_then(settings, loaded.notes).weight_decay != settings.weight_decay:  # loading has put the old one back
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
    return loaded.step


def save(
    world: launch.World,
    settings: RunSettings,
    text: Corpus,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
) -> Future[None]:
    """Begin to save in the background, once the save before has ended; remove what is older than `keep` saves.

    Training goes on where that fails, as on a full disk, and the next save may succeed; the reason is printed.
    """
    assert settings.folder is not None
    notes = notes_of(settings, text, step)
    folder = checkpoint.at_step(settings.folder, step)
    try:
        warnings.filterwarnings("ignore", message=".* was not saved: ", category=RuntimeWarning)  # `report` says it
        saving = checkpoint.async_save(folder, model, optimizer, notes)
    except (checkpoint.CheckpointError, OSError) as error:
        saving = Future()
        saving.set_exception(checkpoint.CheckpointError(f"{folder} was not saved: {error}"))

    def report(ended: Future[None]) -> None:
        if error := ended.exception():
            log(world, f"step {step:5d}   {error}")

    saving.add_done_callback(report)
    if world.rank == 0:
        with contextlib.suppress(OSError):  # what cannot be removed stays, and the next save tries again
            checkpoint.prune(settings.folder, settings.keep)
    return saving


def observe(settings: RunSettings, optimizer: torch.optim.Optimizer, first: int) -> Metrics:
    """Return metrics that go to the run's folder, every `log_every` steps."""
    to: list[Any] = []
    if settings.folder is not None:
        to.append(JsonLines(Path(settings.folder) / "metrics.jsonl"))
        if settings.tensorboard:
            to.append(TensorBoard(Path(settings.folder) / "tensorboard"))
    scalars = {"loss": "mean", "tokens_per_second": "mean"}
    return Metrics(optimizer, settings.log_every, to, scalars=scalars, samples=0, start=first)


def log(world: launch.World, *lines: str) -> None:
    """Print lines on rank 0; each in one piece, since a save that fails tells from a thread of its own."""
    if world.rank == 0:
        for line in lines:
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


# ---- The command ------------------------------------------------------------------------------------------


def main() -> int:
    arguments, settings = parse(__doc__)
    outcome, *_ = launch.run(train, (settings,), **launch.options(arguments), stop_within=STOP_WITHIN)
    if outcome.refused:
        raise launch.WorldError(outcome.refused, None) if outcome.again else launch.UsageError(outcome.refused)
    if outcome.unsaved:
        raise launch.OutputError(f"{outcome.unsaved.rstrip('.')}; {what_is_left(settings)}.")
    if not launch.is_main_process():
        return int(outcome.diverged)
    if outcome.diverged:
        print(
            f"error: {SKIPS} steps in a row had no finite loss and gradient; lower --lr; {what_is_left(settings)}.",
            file=sys.stderr,
        )
        return 1
    if outcome.step < settings.steps:
        saved = f"saved in {settings.folder}; the same command goes on" if settings.folder else "nothing was saved"
        print(f"stopped after step {outcome.step} of {settings.steps}; {saved}.")
    return 0


def what_is_left(settings: RunSettings) -> str:
    """Return in words what a run that has failed leaves behind."""
    steps = checkpoint.saved_steps(settings.folder) if settings.folder is not None else []
    return f"the newest checkpoint in {settings.folder} is of step {steps[0]}" if steps else "there is no checkpoint"


if __name__ == "__main__":
    launch.command(main)
