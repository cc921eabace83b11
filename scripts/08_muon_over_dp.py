"""Chapter 8: Muon over data parallelism. Train it and certify it, follow one matrix, or compare ways to gather many.

python scripts/08_muon_over_dp.py --dp 4
python scripts/08_muon_over_dp.py --follow --json out/follow.json
python scripts/08_muon_over_dp.py --ways
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from distmuon import launch
from distmuon.models.recipe import DTYPES, Recipe
from distmuon.sharding.layout import ParamSpec, plan
from muonbook.ch08 import puzzle as gather_cut
from muonbook.puzzles import add_arguments, handle

SMALL = (ParamSpec("A", (3, 4), "float32"), ParamSpec("B", (4, 5), "float32"), ParamSpec("b", (4,), "float32"))
B = 1  # the matrix to follow
SHAPES = ((64, 96), (31, 45), (128, 32), (50, 50), (17, 90), (80, 64), (33, 33), (96, 96))
MANY = tuple(ParamSpec(str(n), SHAPES[n % len(SHAPES)], "float32") for n in range(40))
KINDS = ("gradients", "norms and loss", "momentum", "parameters")


def train(world, recipe):
    """Train with AdamW and with Muon on one map, keep both ledgers, and feed made-up gradients for the certificate."""
    from distmuon.models.digits import digits
    from distmuon.sharding.grid import Grid
    from distmuon.verify.certificate import exact_on_grid, replicas_agree
    from distmuon.verify.training import train_on_grid

    grid, ledgers = Grid.of(world), {}
    data, _ = digits(grid, recipe.seed)
    for optimizer in ("adamw", "muon"):
        grid.ledger.clear()
        run = train_on_grid(replace(recipe, optimizer=optimizer), grid, data)
        ledgers[optimizer] = copy.deepcopy(grid.ledger)
    ledgers = world.gather(ledgers)
    exact, alike = exact_on_grid(recipe, grid), replicas_agree(run.parameters, grid)
    return ledgers and {"ledgers": ledgers, "losses": run.losses, "exact": exact, "alike": alike, "device": grid.device}


def report_training(recipe, dp, found, threads):
    """Make the exact certificate's single-process side, print verdicts and bytes; return whether all is well."""
    from distmuon.verify.certificate import exact_verdict
    from distmuon.verify.training import predict_run

    names = ("adamw", "muon")
    exact = exact_verdict(found["exact"], recipe, dp, found["device"], threads)
    predicted = [
        {name: predict_run(replace(recipe, optimizer=name), dp, 1, rank) for name in names} for rank in range(dp)
    ]
    as_predicted = predicted == found["ledgers"]
    falling = found["losses"][-1] < found["losses"][0]
    print(f"Muon on {dp} DP ranks, {recipe.dtype}, {recipe.steps} steps: the loss has fallen: {falling}.")
    print(f"Same gradients, sharded and in one process, bitwise equal parameters: {exact}.")
    print(f"Every rank ends with the same parameters: {found['alike']}.\n")
    sent = {name: dict.fromkeys((*KINDS, "all"), 0) for name in names}
    for name, rows in sent.items():
        for entry, traffic in found["ledgers"][0][name]:
            kind = entry.label.partition(",")[0]
            for row in (kind if kind in KINDS else "norms and loss", "all"):
                rows[row] += traffic.sent_bytes // recipe.steps
    print("Bytes that a rank sends per step    ZeRO-1 AdamW        Muon")
    for row in (*KINDS, "all"):
        print(f"  {row:<30}{sent['adamw'][row]:>16,}{sent['muon'][row]:>12,}")
    if sent["adamw"]["all"]:
        print(f"  Muon / ZeRO-1 AdamW{sent['muon']['all'] / sent['adamw']['all']:>39.3f}")
    print(f"Every rank, bucket and collective, counted = predicted: {as_predicted}.")
    return exact and found["alike"] and as_predicted


def follow(world):
    """Take one matrix through dp_gather, Newton–Schulz and dp_shard; return what this rank held, and whose it was."""
    import torch

    from distmuon.optim.muon import MUON_DEFAULTS
    from distmuon.optim.newton_schulz import newton_schulz
    from distmuon.optim.strategies.gather_all import GatherAll
    from distmuon.optim.strategies.strategy import Task
    from distmuon.sharding.grid import Grid
    from muonbook.provenance import trace

    grid = Grid.of(world)
    layout = plan(SMALL, grid.dp.size)
    metas, wave = layout.view(grid.dp.rank), layout.buckets[:1]
    whole = torch.randint(-9, 10, SMALL[B].shape, generator=torch.Generator().manual_seed(8)).float()
    mine = metas[B].range_in_param
    piece = whole.flatten()[mine.as_slice]
    moves = GatherAll(Task(layout, metas, grid, {0: MUON_DEFAULTS, B: MUON_DEFAULTS}, None, torch.float32, False))

    def dp_gather(piece):
        return moves.dp_gather(wave, {B: piece} if mine.size else {})

    gathered = dp_gather(piece)
    sent = grid.ledger.total().sent_bytes
    updates = moves.newton_schulz(moves.tp_gather(wave, gathered))
    kept = moves.dp_shard(wave, updates)
    alone = newton_schulz(whole.to(torch.bfloat16), compute_dtype=torch.float32)
    right = not mine.size or torch.equal(kept[B], alone.flatten()[mine.as_slice])

    after, sources = trace(lambda piece: dp_gather(piece).get(B), piece, grid.dp.rank, grid.dp.size)
    before = [x if mine.start <= i < mine.end else None for i, x in enumerate(whole.flatten().tolist())]
    columns = SMALL[B].shape[1]
    rows = [before[i : i + columns] for i in range(0, len(before), columns)] if mine.size else None
    count = [mine.size, *(sum(t.numel() for t in have.values()) for have in (gathered, updates, kept))]
    return world.gather(
        {"before": rows, "after": after, "sources": sources, "count": count, "right": right, "sent": sent}
    )


def report_following(ranks):
    """Print who held how much of the matrix, and whether its update is right."""
    print("Elements of B    momentum   dp_gather   newton_schulz   dp_shard")
    for number, rank in enumerate(ranks):
        before, gathered, update, kept = rank["count"]
        print(f"  DP rank {number}{before:>14}{gathered:>12}{update:>16}{kept:>11}")
    right = all(rank["right"] for rank in ranks)
    print(f"Pieces kept are those of Newton–Schulz on the whole, bit for bit: {right}.")
    print(f"Sent by each rank: {ranks[0]['sent']} bytes, for the whole bucket.")
    return right


def ways(world, timed):
    """Gather many matrices in every way, and count; or take the time."""
    from distmuon.sharding.grid import Grid
    from muonbook.measure.coalescing import compare

    return world.gather(compare(Grid.of(world), MANY, timed))


def report_ways(dp, found, timed):
    """Print calls and bytes of each way, or its time beside the quickest; return whether all is well."""
    known = {name: row for name, row in found.items() if row is not None}
    if timed:
        for name, row in known.items():
            print(f"{name:<34}{row.seconds / min(row.seconds for row in known.values()):>6.1f} x the quickest")
        return True
    needed = 2 * sum(spec.numel for spec in MANY) * (dp - 1) / dp  # bf16; no ring sends less
    print(f"{len(MANY)} matrices, {dp} ranks             asked  made  bytes sent  padding")
    for name, row in found.items():
        if row is None:
            print(f"{name:<34}skipped: this torch has none")
            continue
        sent = row.made.sent_bytes
        print(f"{name:<32}{row.asked.calls:>6}{row.made.calls:>6}{sent:>12,}{1 - needed / sent:>9.2%}")
    right = all(row.right for row in known.values())
    same = all(row.asked.sent_bytes == row.made.sent_bytes for row in known.values())
    print(f"All ways gave the same {len(MANY)} matrices, bit for bit: {right}.")
    print(f"Ledger and torch count the same bytes: {same}.")
    return right and same


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=4, tp=1)
    job = parser.add_argument_group("the job").add_mutually_exclusive_group()
    job.add_argument("--follow", action="store_true", help="follow one matrix of a small model")
    job.add_argument("--ways", action="store_true", help=f"gather {len(MANY)} matrices in four ways, and count")
    job.add_argument("--time", action="store_true", help="the same, and compare times, which differ from run to run")
    parser.add_argument("--json", metavar="FILE", help="with --follow: write what every rank held")
    training = parser.add_argument_group("the training, without --follow, --ways and --time")
    training.add_argument("--steps", type=int, metavar="N", default=10, help="training steps (default: 10)")
    training.add_argument("--dtype", metavar=launch.choices(DTYPES), default="float32", help="(default: float32)")
    training.add_argument("--bucket-size", type=int, metavar="N", default=50_000, help="elements (default: 50000)")
    add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := handle(arguments, gather_cut.PUZZLE)) is not None:
        return code
    if arguments.tp != 1:
        raise launch.UsageError(f"--tp {arguments.tp}: this chapter has DP ranks only; chapter 9 adds TP.")
    if (arguments.ways or arguments.time) and arguments.dp == 1:
        raise launch.UsageError("--dp 1: one rank has nothing to gather; choose 2 or more.")
    if launch.speaks():
        launch.check_writable("--json", arguments.json if arguments.follow else None)
    recipe = Recipe(steps=arguments.steps, dtype=arguments.dtype, bucket_size=arguments.bucket_size)
    recipe = recipe.shared_by(arguments.dp)
    job: Callable[..., Any]
    given: tuple[Any, ...]
    if arguments.follow:
        job, given = follow, ()
    elif arguments.ways or arguments.time:
        job, given = ways, (arguments.time,)
    else:
        job, given = train, (recipe.check(arguments.dp, arguments.tp),)
    found = launch.run(job, given, **launch.options(arguments))[0]
    if found is None:
        return 0  # under torchrun, rank 0 alone goes on
    if job is follow:
        from muonbook.report import write_json

        well = report_following(found)
        if arguments.json:
            write_json(arguments.json, found)
    elif job is ways:
        well = report_ways(arguments.dp, found[0], arguments.time)
    else:
        well = report_training(recipe, arguments.dp, found, arguments.threads)
    return 0 if well else 1


if __name__ == "__main__":
    launch.command(main)
