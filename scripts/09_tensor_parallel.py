"""Chapter 9: Muon over tensor parallelism. Train it and certify it, look at small layers and gathers, or time gathers.

python scripts/09_tensor_parallel.py --tp 2
python scripts/09_tensor_parallel.py --small --tp 2 --json out/small.json
python scripts/09_tensor_parallel.py --time
"""

import copy
from functools import partial

from distmuon import launch
from distmuon.models.recipe import DTYPES, Recipe
from muonbook.ch09 import puzzle as column_gram
from muonbook.puzzles import add_arguments, handle

ROWS, INPUTS, HIDDEN, OUTPUTS = 2, 4, 4, 3  # of the small pair of layers, and whole numbers in it
GATHERED = {"dim 0": (0, 0), "dim 1": (1, 1), "cut along 0, put together along 1": (0, 1)}  # cut, put together
TIMED = ((96, 32), (24, 256), (6, 1024))  # so many matrices, each so wide and high
ROUNDS = 9
SEED = 392  # of the small layers: their sums stay small, and each rank meets a zero of the ReLU


def train(world, recipe):
    """Train on 1 x T ranks, keep the ledger, and feed made-up gradients for the certificate."""
    from distmuon.models.digits import digits
    from distmuon.sharding.grid import Grid
    from distmuon.verify.certificate import exact_on_grid, replicas_agree
    from distmuon.verify.training import train_on_grid

    grid = Grid.of(world)
    data, _ = digits(grid, recipe.seed)
    grid.ledger.clear()
    run = train_on_grid(recipe, grid, data)
    ledgers = world.gather(copy.deepcopy(grid.ledger))
    exact, alike = exact_on_grid(recipe, grid), replicas_agree(run.parameters, grid)
    return ledgers and {"ledgers": ledgers, "losses": run.losses, "exact": exact, "alike": alike, "device": grid.device}


def report_training(recipe, tp, found, threads):
    """Make the single-process side of the certificate, print verdicts and bytes; return whether all is well."""
    from distmuon.verify.certificate import exact_verdict
    from distmuon.verify.training import predict_run

    exact = exact_verdict(found["exact"], recipe, 1, found["device"], threads)
    predicted = predict_run(recipe, 1, tp, 0)
    as_predicted = all(ledger == predicted for ledger in found["ledgers"])
    print(f"Muon on {tp} TP ranks, {recipe.dtype}: loss {found['losses'][0]:.2f} -> {found['losses'][-1]:.2f}.")
    print(f"Same gradients, cut over TP and in one process, bitwise equal parameters: {exact}.")
    print(f"Every rank sees the same whole parameters: {found['alike']}.\n")
    print("A rank sends, per step                          calls   predicted     counted")
    counted = dict(found["ledgers"][0])
    for entry, traffic in predicted:
        calls, _, sent = (total // recipe.steps for total in traffic)
        what = entry.label if entry.op == "all_gather" else entry.label.replace("layers.", "activations, layers.")
        mine = counted[entry].sent_bytes // recipe.steps if entry in counted else 0
        print(f"  {entry.op:<12}{what:<34}{calls:>5}{sent:>12,}{mine:>12,}")
    print(f"Every rank and collective, counted = predicted: {as_predicted}.")
    return exact and found["alike"] and as_predicted


def whole_numbers(*shape, seed):
    """Return a float32 tensor of whole numbers from -3 to 3 without 0: their sums are exact in any order."""
    import torch

    random = torch.Generator().manual_seed(seed)
    return torch.randint(1, 4, shape, generator=random) * (2.0 * torch.randint(0, 2, shape, generator=random) - 1)


def small(world):
    """Run a pair of layers and three gathers on whole numbers; return what this rank held, and whether it is right."""
    import torch
    from torch.nn import functional as F

    from distmuon.optim.distributed_muon import DistributedMuon
    from distmuon.sharding.grid import Grid
    from distmuon.sharding.tensor_parallel import ColumnParallelLinear, RowParallelLinear, load_slices
    from muonbook.provenance import trace

    grid = Grid.of(world)
    tp = grid.tp
    shapes = ((HIDDEN, INPUTS), (OUTPUTS, HIDDEN), (ROWS, INPUTS), (ROWS, OUTPUTS))
    W1, W2, X, dY = (whole_numbers(*shape, seed=n).to(grid.device) for n, shape in enumerate(shapes, SEED))

    def passed(first, second):
        """Take X forward through two layers and dY back; return X, H, Y and the number of calls so far, forward."""
        x = X.clone().requires_grad_()
        h = F.relu(first(x))
        y = second(h)
        calls = grid.ledger.total().calls
        y.backward(dY)
        return x, h, y, calls

    ones = [torch.nn.Linear(INPUTS, HIDDEN, bias=False), torch.nn.Linear(HIDDEN, OUTPUTS, bias=False)]
    column = ColumnParallelLinear(INPUTS, HIDDEN, tp, bias=False, name="column")
    row = RowParallelLinear(HIDDEN, OUTPUTS, tp, bias=False, name="row")
    for layer, one, whole in ((column, ones[0], W1), (row, ones[1], W2)):
        load_slices(layer.to(grid.device), {"weight": whole}, tp)
        one.to(grid.device).weight.data.copy_(whole)
    x, h, y, forward = passed(column, row)
    sent = {entry.label: traffic.sent_bytes for entry, traffic in grid.ledger}
    calls = (forward, grid.ledger.total().calls - forward)
    x1, _, y1, _ = passed(*ones)
    cuts = ((column, ones[0], 0), (row, ones[1], 1))

    def same_slice(mine, one, dim):
        return torch.equal(mine.weight.grad, one.weight.grad.chunk(tp.size, dim)[tp.rank])

    right = {
        "Y": torch.equal(y, y1),
        "the gradient of X": torch.equal(x.grad, x1.grad),
        "the gradients of this rank's W1 and W2": all(same_slice(*cut) for cut in cuts),
    }
    part = F.linear(h.detach(), row.weight.detach())
    summed = trace(lambda y: tp.all_reduce(y, "look"), part, tp.rank, tp.size)

    M = torch.arange(1.0, 17, device=grid.device).view(4, 4)
    gathers = {}
    for name, (cut, along) in GATHERED.items():
        block = M.chunk(tp.size, cut)[tp.rank].contiguous()
        gather = partial(tp.all_gather_blocks, dim=along, label="look")
        gathers[name] = (block.tolist(), *trace(gather, block, tp.rank, tp.size))
    try:
        DistributedMuon([("copied.weight", copy.deepcopy(column.weight))], grid)
        refused = "not at all"
    except ValueError as error:
        refused = str(error)
    slices = {
        "X": X.tolist(),
        "W1": column.weight.tolist(),
        "H": h.tolist(),
        "W2": row.weight.tolist(),
        "partial Y": part.tolist(),
    }
    return world.gather(
        {"slices": slices, "Y": summed, "gathers": gathers, "refused": refused, "right": right}
        | {"calls": calls, "sent": sent}
    )


def report_small(ranks, tp):
    """Print what each rank held, what was sent, and whether the pair is the whole pair; return whether it is."""
    from distmuon.sharding.ledger import ring_bytes

    for number, rank in enumerate(ranks):
        shapes = [f"{name} {len(value)} x {len(value[0])}" for name, value in rank["slices"].items() if name != "X"]
        print(f"TP rank {number} holds {', '.join(shapes)}")
    print("Beside the whole layers in one process, to the last bit:")
    for what in ranks[0]["right"]:
        print(f"  {what} equal on every rank: {all(rank['right'][what] for rank in ranks)}")
    forward, backward = ranks[0]["calls"]
    print(f"All-reduces: {forward} forward, {backward} backward. Bytes that a rank sends:")
    expected = {"row": 4 * ROWS * OUTPUTS, "column": 4 * ROWS * INPUTS}
    for label, what in (("row", "forward, the sum of Y"), ("column", "backward, the sum of X's gradient")):
        predicted = ring_bytes("all_reduce", expected[label], tp)
        print(f"  {what:<36} predicted {predicted:>3}, counted {ranks[0]['sent'].get(label, 0):>3}")
    return all(all(rank["right"].values()) for rank in ranks)


def take_time(world):
    """Gather matrices one by one and in one bucket, in turns; return whether both agree, and the times."""
    from distmuon.sharding.grid import Grid
    from muonbook.measure.coalescing import compare_blocks

    grid = Grid.of(world)
    return world.gather([compare_blocks(grid, count, width, dim, ROUNDS) for count, width in TIMED for dim in (0, 1)])


def report_time(found):
    """Print one bucket's time beside that of single calls; return whether both gave the same matrices."""
    print("matrices, bf16            cut along   one bucket / one by one")
    for row in found[0]:
        ratio = row.in_one_bucket / row.one_by_one
        print(f"{row.matrices:>3} of {row.width:>5} x {row.width:<5}{row.dim:>16}{ratio:>22.2f}")
    right = all(row.right for rank in found for row in rank)
    print(f"Both ways gave the same matrices, bit for bit: {right}.")
    return right


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=1, tp=2)
    job = parser.add_argument_group("the job").add_mutually_exclusive_group()
    job.add_argument("--small", action="store_true", help="a pair of layers and three gathers, in whole numbers")
    job.add_argument("--time", action="store_true", help="compare ways to gather, by times that differ from run to run")
    parser.add_argument("--json", metavar="FILE", help="with --small: write what every rank held")
    training = parser.add_argument_group("the training, without --small and --time")
    training.add_argument("--steps", type=int, metavar="N", default=10, help="training steps (default: 10)")
    training.add_argument("--dtype", metavar=launch.choices(DTYPES), default="float32", help="(default: float32)")
    add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := handle(arguments, column_gram.PUZZLE)) is not None:
        return code
    if arguments.dp != 1:
        raise launch.UsageError(f"--dp {arguments.dp}: this chapter has TP ranks only; chapter 10 has both.")
    if (arguments.small or arguments.time) and arguments.tp not in (2, 4):
        raise launch.UsageError(f"--tp {arguments.tp}: these small matrices are cut in 2 or 4; choose one of them.")
    if launch.speaks():
        launch.check_writable("--json", arguments.json if arguments.small else None)
    recipe = Recipe(steps=arguments.steps, dtype=arguments.dtype).check(1, arguments.tp)
    job, given = (small, ()) if arguments.small else (take_time, ()) if arguments.time else (train, (recipe,))
    found = launch.run(job, given, **launch.options(arguments))[0]
    if found is None:
        return 0  # under torchrun, rank 0 alone goes on
    if job is train:
        well = report_training(recipe, arguments.tp, found, arguments.threads)
    elif job is take_time:
        well = report_time(found)
    else:
        from muonbook.report import write_json

        well = report_small(found, arguments.tp)
        if arguments.json:
            write_json(arguments.json, found)
    return 0 if well else 1


if __name__ == "__main__":
    launch.command(main)
