"""Distributed Muon on one page: DP x TP, ZeRO-1 shards, nine moves, Newton–Schulz. Read it from top to bottom.

Plain torch, nothing of this project. `mp.spawn` starts the processes, each of them runs `train`, and in the end the
same network is trained once more in one process and compared. The book opens this page line by line.

python 00_one_page.py                                   eight processes on this machine's CPU
python 00_one_page.py --dp 2 --tp 2 --backend nccl      four GPUs
"""

import argparse
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
PATIENCE = timedelta(seconds=60)  # for a rank that does not come; every group needs to be told
MATRICES = {"gate": (HIDDEN, PIXELS), "up": (HIDDEN, PIXELS), "down": (PIXELS, HIDDEN)}  # [I, J]
CUTS = (0, 0, 1)  # the dimension of each that TP cuts: rows, rows, columns

# ---- One process: a network, its gradients, Muon -----------------------------------------------------------


def initial(seed: int, *shape: int) -> Tensor:  # float64: a difference is then a mistake, not rounding
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64) / shape[-1] ** 0.5


READOUT = initial(9, PIXELS, 10)  # from pixels to ten digits; not trained


def gradients(weights, x: Tensor, labels: Tensor, tp_group=None) -> tuple[float, list]:
    """Return the loss of a gated MLP, and gradients of its matrices or of my part of each."""
    gate, up, down = (w.clone().requires_grad_() for w in weights)
    part = (F.silu(x @ gate.mT) * (x @ up.mT)) @ down.mT  # [n, PIXELS]; TP ranks hold summands of it
    y = part.detach().clone()
    if tp_group is not None:
        dist.all_reduce(y, group=tp_group)
    loss = F.cross_entropy((x + y.requires_grad_()) @ READOUT.to(x.device), labels)
    loss.backward()  # as far as y, alike on all TP ranks
    part.backward(y.grad)  # and on, to this rank's part of the matrices
    return loss.item(), [w.grad for w in (gate, up, down)]


def newton_schulz(m: Tensor) -> Tensor:  # M[I, J] -> O[I, J]: all directions equally loud
    x = m.mT if len(m) > m.shape[1] else m
    x = x * (1 / x.norm())  # all singular values at most 1; a matrix of zeros would become NaN
    for _ in range(5):
        a = x @ x.mT  # A
        a = torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315)  # b A + c A^2
        x = torch.addmm(x, a, x, beta=3.4445)  # X <- a X + (b A + c A^2) X
    return x.mT.contiguous() if len(m) > m.shape[1] else x


def length(shape: tuple[int, ...]) -> float:  # of a step: gives it an RMS of 0.2 LR, by convention
    return LR * (0.2 * max(shape) ** 0.5)


def one_process(steps: int, x: Tensor, labels: Tensor) -> tuple[list, list[Tensor]]:
    """Train without any distribution; return losses and weights. Muon: the last three lines."""
    weights = [initial(n, *shape) for n, shape in enumerate(MATRICES.values())]
    momenta, losses = [torch.zeros_like(w) for w in weights], []
    for n in range(steps):
        rows = torch.arange(n * BATCH, (n + 1) * BATCH) % len(x)
        loss, grads = gradients(weights, x[rows], labels[rows])
        losses.append(loss)
        for w, m, g in zip(weights, momenta, grads):
            m.mul_(MU).add_(g)
            o = newton_schulz(g + MU * m)
            w.mul_(1 - LR * DECAY).sub_(length(w.shape) * o)
    return losses, weights


# ---- Many processes ----------------------------------------------------------------------------------------


def all_gather(x: Tensor, group) -> list[Tensor]:  # what every rank of the group has, in order
    gathered = [torch.empty_like(x).contiguous() for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, x.contiguous(), group=group)
    return gathered


class Rank:
    """One process of the grid: what it holds, and how it takes a step with the others."""

    def __init__(self, rank: int, D: int, T: int, device: torch.device) -> None:
        self.D, self.T, self.dp, self.tp = D, T, rank // T, rank % T
        grid = torch.arange(D * T).view(D, T)
        columns = [dist.new_group(ranks, timeout=PATIENCE) for ranks in grid.T.tolist()]
        rows = [dist.new_group(ranks, timeout=PATIENCE) for ranks in grid.tolist()]
        self.dp_group, self.tp_group = columns[self.tp], rows[self.dp]  # all make all, to get these

        # TP cuts matrices. My part of each stands in one flat bucket, padded until D divides it.
        whole = [initial(n, *shape) for n, shape in enumerate(MATRICES.values())]
        parts = [w.chunk(T, cut)[self.tp] for w, cut in zip(whole, CUTS)]  # W[I_tp, J], or W[I, J_tp]
        ends = torch.tensor([part.numel() for part in parts]).cumsum(0).tolist()
        self.places = list(zip([0, *ends], ends))  # where each part begins and ends
        self.bucket = torch.zeros(-(-ends[-1] // D) * D, dtype=torch.float64, device=device)  # W[N]
        self.weights = [self.bucket[a:b].view(p.shape) for (a, b), p in zip(self.places, parts)]
        for weight, part in zip(self.weights, parts):
            weight.copy_(part)

        # ZeRO-1 cuts the bucket into D equal shards, wherever that falls. I keep momentum for one.
        n = len(self.bucket) // D
        self.shard = slice(self.dp * n, (self.dp + 1) * n)
        self.momentum = torch.zeros(n, dtype=torch.float64, device=device)  # M[N_dp]
        mine = self.shard.start, self.shard.stop
        self.pieces = [range(max(a, mine[0]), min(b, mine[1])) for a, b in self.places]

    def step(self, grads: list[Tensor]) -> None:
        """Move all weights. grads: of my parts of the matrices, and for my images alone."""
        flat = torch.zeros_like(self.bucket)
        for (a, b), grad in zip(self.places, grads):
            flat[a:b] = grad.flatten()

        # 1 reduce_scatter -> G[N_dp]: my column's gradients for my shard come to me; their mean.
        #   As an all-to-all and a sum, which gloo does faster, and always in the same order
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat, group=self.dp_group)
        g, *others = received.chunk(self.D)
        for other in others:
            g += other
        g /= self.D

        # 2 momentum -> M[N_dp]: with Nesterov's look ahead; number by number, so a shard will do
        self.momentum.mul_(MU).add_(g)
        u = g.add(self.momentum, alpha=MU)

        # 3 dp_gather -> M[I_tp, J]: the shards of my column make the bucket whole
        bucket = torch.cat(all_gather(u, self.dp_group))
        for i, (a, b) in enumerate(self.places):
            piece, shape = self.pieces[i], list(MATRICES.values())[i]
            if not piece:
                continue  # nothing of this matrix is mine, nor my row's: other rows see to it
            part = bucket[a:b].view(self.weights[i].shape)
            # 4 tp_gather -> M[I, J]: the parts of my row make the matrix whole
            whole = torch.cat(all_gather(part, self.tp_group), CUTS[i])
            # 5 newton_schulz -> O[I, J]: what the other eight moves are for
            o = newton_schulz(whole)
            # 6 tp_shard -> O[I_tp, J]: my part of it
            o = o.chunk(self.T, CUTS[i])[self.tp].flatten()
            # 7 dp_shard -> O[N_dp]: and my piece of that
            o = o[piece.start - a : piece.stop - a]
            # 8 apply -> W[N_dp]: decay and step, for the weights that are mine
            mine = self.bucket[piece.start : piece.stop]
            mine.mul_(1 - LR * DECAY).add_(o, alpha=-length(shape))

        # 9 all_gather -> W[I_tp, J]: my column's new weights, for the next batch
        self.bucket.copy_(torch.cat(all_gather(self.bucket[self.shard], self.dp_group)))


def train(rank: int, D: int, T: int, steps: int, backend: str, folder: str, images, digits) -> None:
    """What every process does: meet the others, train with them; rank 0 leaves the result."""
    torch.set_num_threads(1)
    dist.init_process_group(backend, f"file://{folder}/meet", PATIENCE, D * T, rank)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)  # else all ranks would send objects by way of the first GPU
    x, labels = torch.from_numpy(images).to(device), torch.from_numpy(digits).to(device)
    me, losses = Rank(rank, D, T, device), torch.zeros(steps, dtype=torch.float64, device=device)
    for n in range(steps):
        batch = torch.arange(n * BATCH, (n + 1) * BATCH) % len(x)
        rows = batch.chunk(D)[me.dp]  # DP cuts the batch
        losses[n], grads = gradients(me.weights, x[rows], labels[rows], me.tp_group)
        me.step(grads)

    trained = [torch.cat(all_gather(w, me.tp_group), cut) for w, cut in zip(me.weights, CUTS)]
    dist.all_reduce(losses)
    kept: list = [None] * (D * T)
    mine = [f"{len(piece):,} of {name}" for name, piece in zip(MATRICES, me.pieces) if piece]
    dist.all_gather_object(kept, " and ".join(mine))
    if rank == 0:
        torch.save((trained, losses / (D * T), kept), f"{folder}/trained.pt")
    dist.destroy_process_group()


def compare(trained: list[Tensor], alone: list[Tensor]) -> None:
    """Say whether the grid's weights are those of one process. Anything beyond rounding is an error."""
    moved = sum((w - initial(n, *w.shape)).square().sum() for n, w in enumerate(alone)) ** 0.5
    apart = sum((t - w).square().sum() for t, w in zip(trained, alone)) ** 0.5
    if not apart <= 1e-10 * moved:
        sys.exit(f"They end apart by {apart / moved:.2g} of the way that they moved: it is not the same optimizer.")
    print("They end with the same weights: apart by less than a ten-billionth of the way that they moved.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Distributed Muon on one page, compared with one process.", allow_abbrev=False
    )
    parser.add_argument("--dp", type=int, default=4, help="ranks among which batch and momentum are cut (4)")
    parser.add_argument("--tp", type=int, default=2, help="ranks among which every matrix is cut (2)")
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
    images = images / 16  # to 0 ... 1
    with tempfile.TemporaryDirectory() as folder:
        job = (args.dp, args.tp, args.steps, args.backend, folder, images, digits)
        mp.spawn(train, job, nprocs=world)  # as many new processes; number r calls train(r, *job)
        trained, losses, kept = torch.load(f"{folder}/trained.pt", map_location="cpu")
    for r, pieces in enumerate(kept):
        print(f"rank {r} (dp {r // args.tp}, tp {r % args.tp}) keeps momentum for {pieces}")
    losses_alone, alone = one_process(args.steps, torch.from_numpy(images), torch.from_numpy(digits))
    print(f"{world} processes: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    print(f"1 process:   loss {losses_alone[0]:.2f} -> {losses_alone[-1]:.2f}")
    compare(trained, alone)
