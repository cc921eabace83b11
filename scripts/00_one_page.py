"""Distributed Muon on one page. You can read it from top to bottom.

It uses plain torch and imports nothing of this project. Every process that it starts runs `train`,
and in the end we train the same network once more in one process and compare the weights. A process is called a rank.
The ranks form a grid of D rows and T columns. The ranks of one column have different images (data parallelism, DP),
and the ranks of one row have different parts of every matrix (tensor parallelism, TP).

python 00_one_page.py                                   eight processes on this machine's CPU
python 00_one_page.py --dp 2 --tp 2 --backend nccl      four GPUs
"""

import argparse
import math
import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import functional as F

LR, MU, DECAY = 0.02, 0.95, 0.1  # Muon's learning rate, momentum, weight decay
BATCH, PIXELS, HIDDEN = 480, 64, 192
PATIENCE = timedelta(seconds=60)  # how long a rank waits for another one before it gives up
MATRICES = {"gate": (HIDDEN, PIXELS), "up": (HIDDEN, PIXELS), "down": (PIXELS, HIDDEN)}
CUTS = (0, 0, 1)  # which dimension of each matrix is cut among the ranks of a row: rows, rows, columns

# ---- One process: a network, its gradients, Muon -----------------------------------------------------------


def initial(seed: int, *shape: int) -> Tensor:
    """Return random weights. They are float64, so that a visible difference is a mistake and not rounding."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64) / shape[-1] ** 0.5


READOUT = initial(9, PIXELS, 10)  # from pixels to ten digits; not trained


def gradients(weights, x: Tensor, labels: Tensor, tp_group=None) -> tuple[float, list]:
    """Return the loss of a gated MLP, and the gradients of its matrices (of my parts of them, with a tp_group).

    With parts of the matrices a rank computes only a summand of the layer's output, so the ranks of a row add theirs
    up. That works because all of them compute with the same images.
    """
    gate, up, down = (w.clone().requires_grad_() for w in weights)
    summand = (F.silu(x @ gate.mT) * (x @ up.mT)) @ down.mT  # [images, PIXELS]
    y = summand.detach().clone()
    if tp_group is not None:
        dist.all_reduce(y, group=tp_group)  # now y is the sum of all ranks of the row, on all of them
    loss = F.cross_entropy((x + y.requires_grad_()) @ READOUT.to(x.device), labels)
    loss.backward()  # from the loss back to y, which is the same on all ranks of the row
    summand.backward(y.grad)  # from y back to my parts of the matrices
    return loss.item(), [w.grad for w in (gate, up, down)]


def newton_schulz(m: Tensor) -> Tensor:
    """Return a matrix with the directions of m, all of them nearly equally strong (chapter 2)."""
    tall = len(m) > m.shape[1]
    x = m.mT if tall else m  # the products below are cheaper for a wide matrix
    x = x * (1 / x.norm())  # no singular value is above 1; a matrix of zeros would become NaN
    for _ in range(5):
        a = x @ x.mT
        b = torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315)  # -4.7750 a + 2.0315 a @ a
        x = torch.addmm(x, b, x, beta=3.4445)  # 3.4445 x + b @ x
    return x.mT.contiguous() if tall else x


def length(shape: tuple[int, ...]) -> float:
    """Return the factor of a matrix's update: a typical number then moves by 0.2 LR (chapter 3)."""
    return LR * (0.2 * max(shape) ** 0.5)


def one_process(steps: int, x: Tensor, labels: Tensor) -> tuple[list, list[Tensor]]:
    """Train without any distribution; return losses and weights."""
    weights = [initial(n, *shape) for n, shape in enumerate(MATRICES.values())]
    momenta = [torch.zeros_like(w) for w in weights]
    losses = []
    for n in range(steps):
        rows = torch.arange(n * BATCH, (n + 1) * BATCH) % len(x)  # this step's images
        loss, grads = gradients(weights, x[rows], labels[rows])
        losses.append(loss)
        for w, m, g in zip(weights, momenta, grads):
            m.mul_(MU).add_(g)  # momentum: MU * m + g, written over m
            o = newton_schulz(g + MU * m)  # orthogonalize; in Nesterov's variant g counts once more
            w.mul_(1 - LR * DECAY)  # weight decay: all weights shrink a little
            w.sub_(length(w.shape) * o)  # the step; its length depends on the shape (chapter 3)
    return losses, weights


# ---- Many processes ----------------------------------------------------------------------------------------


def all_gather(x: Tensor, group) -> list[Tensor]:
    """Send x to all ranks of the group; return what each of them has sent, in the order of their numbers."""
    gathered = [torch.empty_like(x).contiguous() for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, x.contiguous(), group=group)
    return gathered


class Rank:
    """One process of the grid: what it holds, and how it takes a step together with the others."""

    def __init__(self, rank: int, D: int, T: int, device: torch.device) -> None:
        self.D, self.T = D, T
        self.dp, self.tp = rank // T, rank % T  # my row and my column of the grid
        grid = torch.arange(D * T).view(D, T)  # the numbers of all ranks
        # Torch wants every rank to make every group, also those to which it does not belong.
        columns = [dist.new_group(ranks, timeout=PATIENCE) for ranks in grid.T.tolist()]
        rows = [dist.new_group(ranks, timeout=PATIENCE) for ranks in grid.tolist()]
        self.dp_group, self.tp_group = columns[self.tp], rows[self.dp]

        # Tensor parallelism: every matrix is cut into T parts, and I hold the part of my column.
        parts = []
        for n, (shape, cut) in enumerate(zip(MATRICES.values(), CUTS)):
            parts.append(initial(n, *shape).chunk(T, cut)[self.tp])

        # The bucket is one flat buffer in which my parts stand one after the other.
        self.places, end = [], 0  # where each part begins and ends in the bucket
        for part in parts:
            self.places.append((end, end + part.numel()))
            end += part.numel()
        shard_length = math.ceil(end / D)  # a shard is a D-th of the bucket
        bucket_length = shard_length * D  # with some unused numbers at the end if D does not divide it
        self.bucket = torch.zeros(bucket_length, dtype=torch.float64, device=device)
        self.weights = []
        for (a, b), part in zip(self.places, parts):
            self.weights.append(self.bucket[a:b].view(part.shape))  # it shares the bucket's memory
            self.weights[-1].copy_(part)

        # Data parallelism with shards (ZeRO-1): I keep momentum for one shard of the bucket only.
        start, stop = self.dp * shard_length, (self.dp + 1) * shard_length
        self.shard = slice(start, stop)
        self.momentum = torch.zeros(shard_length, dtype=torch.float64, device=device)
        # The piece of each matrix that lies in my shard. A range is empty where nothing of it does.
        self.pieces = [range(max(a, start), min(b, stop)) for a, b in self.places]

    def step(self, grads: list[Tensor]) -> None:
        """Take one step of Muon. grads: of my parts of the matrices, from my images alone."""
        # Lay the gradients out like the weights in the bucket.
        flat = torch.zeros_like(self.bucket)
        for (a, b), grad in zip(self.places, grads):
            flat[a:b] = grad.flatten()

        # Move 1, reduce_scatter: the ranks of my column had other images, so we average our
        # gradients. Each of us needs the average for its own shard only: G[N_dp].
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat, group=self.dp_group)  # shard d goes to rank d
        g, *others = received.chunk(self.D)  # my shard, once from every rank of my column
        for other in others:
            g += other
        g /= self.D

        # Move 2, momentum: every number has its own, so I need nothing but my shard: M[N_dp].
        self.momentum.mul_(MU).add_(g)
        update = g.add(self.momentum, alpha=MU)  # g + MU * momentum

        # Move 3, dp_gather: all shards of my column, one after the other, are the bucket again: M[N].
        bucket = torch.cat(all_gather(update, self.dp_group))

        for i, (a, b) in enumerate(self.places):
            piece = self.pieces[i]
            if not piece:
                continue  # nothing of this matrix is in my shard, so ranks of other rows step it
            part = bucket[a:b].view(self.weights[i].shape)
            # Move 4, tp_gather: the parts of my row, put together, are the whole matrix: M[I, J].
            whole = torch.cat(all_gather(part, self.tp_group), CUTS[i])
            # Move 5, newton_schulz: the one line that needs a whole matrix: O[I, J].
            o = newton_schulz(whole)
            # Move 6, tp_shard: take my column's part of the result: O[I_tp, J]. Nothing is sent.
            o = o.chunk(self.T, CUTS[i])[self.tp].flatten()
            # Move 7, dp_shard: of that, take the piece that lies in my shard: O[N_dp].
            o = o[piece.start - a : piece.stop - a]
            # Move 8, apply: weight decay and the step, for this piece of the weights: W[N_dp].
            w = self.bucket[piece.start : piece.stop]
            w.mul_(1 - LR * DECAY)
            w.add_(o, alpha=-length(list(MATRICES.values())[i]))

        # Move 9, all_gather: each of us has new weights for its shard, and all of us need all: W[N].
        self.bucket.copy_(torch.cat(all_gather(self.bucket[self.shard], self.dp_group)))


def train(rank: int, D: int, T: int, steps: int, backend: str, folder: str, images, digits) -> None:
    """What every process does: meet the others, train with them, and leave the result in a file."""
    torch.set_num_threads(1)
    # All ranks write their names into one file, and wait until everyone is there.
    dist.init_process_group(backend, f"file://{folder}/meet", PATIENCE, D * T, rank)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)  # otherwise all would send through the first GPU
    x, labels = torch.from_numpy(images).to(device), torch.from_numpy(digits).to(device)
    me = Rank(rank, D, T, device)
    losses = torch.zeros(steps, dtype=torch.float64, device=device)
    for n in range(steps):
        batch = torch.arange(n * BATCH, (n + 1) * BATCH) % len(x)
        rows = batch.chunk(D)[me.dp]  # my row's share of the batch: the same for all ranks of a row
        losses[n], grads = gradients(me.weights, x[rows], labels[rows], me.tp_group)
        me.step(grads)

    # Put the trained matrices together, once, for the comparison.
    trained = [torch.cat(all_gather(w, me.tp_group), cut) for w, cut in zip(me.weights, CUTS)]
    dist.all_reduce(losses)
    kept: list = [None] * (D * T)
    owned = [f"{len(piece):,} of {name}" for name, piece in zip(MATRICES, me.pieces) if piece]
    dist.all_gather_object(kept, " and ".join(owned))
    if rank == 0:
        torch.save((trained, losses / (D * T), kept), f"{folder}/trained.pt")
    dist.destroy_process_group()


def compare(trained: list[Tensor], alone: list[Tensor]) -> None:
    """Say whether the grid's weights are those of one process. More than rounding ends the program with an error."""
    moved = sum((w - initial(n, *w.shape)).square().sum() for n, w in enumerate(alone)) ** 0.5
    apart = sum((t - w).square().sum() for t, w in zip(trained, alone)) ** 0.5
    if not apart <= 1e-10 * moved:
        sys.exit(f"They end apart by {apart / moved:.2g} of the way that they moved: it is not the same optimizer.")
    print("They end with the same weights: apart by less than a ten-billionth of the way that they moved.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Distributed Muon on one page, compared with one process.", allow_abbrev=False
    )
    parser.add_argument("--dp", type=int, default=4, help="ranks that share a batch and the momentum (4)")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share every matrix (2)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="nccl: one GPU per rank")
    args = parser.parse_args()
    if min(args.dp, args.tp) < 1 or BATCH % args.dp or HIDDEN % args.tp:
        parser.error(f"--dp must divide {BATCH} images, and --tp {HIDDEN} neurons.")
    if not 1 <= args.steps <= 100:
        parser.error("--steps from 1 to 100: later, with a loss near 0, rounding alone drives runs apart.")
    world = args.dp * args.tp
    if args.backend == "nccl" and torch.cuda.device_count() < world:
        parser.error(f"nccl wants a GPU for each of {world} ranks; {torch.cuda.device_count()} are here.")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")  # stay on this machine
    from sklearn.datasets import load_digits  # here: every new process reads this file from the top

    images, digits = load_digits(return_X_y=True)
    images = images / 16  # from 0 to 1
    with tempfile.TemporaryDirectory() as folder:
        job = (args.dp, args.tp, args.steps, args.backend, folder, images, digits)
        mp.set_forkserver_preload(["torch"])  # it takes seconds to import, so one server does, and forks the ranks
        mp.start_processes(train, job, nprocs=world, start_method="forkserver")  # number r calls train(r, *job)
        trained, losses, kept = torch.load(f"{folder}/trained.pt", map_location="cpu")
    for r, pieces in enumerate(kept):
        print(f"rank {r} (dp {r // args.tp}, tp {r % args.tp}) keeps momentum for {pieces}")
    losses_alone, alone = one_process(args.steps, torch.from_numpy(images), torch.from_numpy(digits))
    print(f"{world} processes: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    print(f"1 process:   loss {losses_alone[0]:.2f} -> {losses_alone[-1]:.2f}")
    compare(trained, alone)
