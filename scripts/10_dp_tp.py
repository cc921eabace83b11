"""Chapter 10: train the digits with distributed Muon over DP x TP, and certify the result, byte by byte.

python scripts/10_dp_tp.py --dp 4 --tp 2
torchrun --nproc-per-node 8 scripts/10_dp_tp.py --dp 4 --tp 2 --backend nccl
"""

import argparse
import copy
import os

from distmuon import launch
from distmuon.recipe import Recipe

# torch is imported inside the functions: a wrong argument is answered at once, and ranks start while nobody waits.


def work(world, recipe):
    """Run on every rank: train, keep the ledger, and hand over what the certificate needs."""
    import torch

    from distmuon.certificate import gather_evidence
    from distmuon.data import digits
    from distmuon.grid import Grid
    from distmuon.report import progress
    from distmuon.training import train_on_grid

    grid = Grid.of(world)
    grid.world.all_reduce(torch.zeros(1, device=grid.device), "first collective")
    start_seconds = launch.seconds_since(world.started)
    data, _ = digits(grid, recipe.seed)
    grid.ledger.clear()
    with progress(recipe.steps, world.rank) as tick:
        run = train_on_grid(recipe, grid, data, tick)
    ledgers = world.gather(copy.deepcopy(grid.ledger))
    evidence = gather_evidence(recipe, grid, data, run)
    if world.rank != 0:
        return None
    return {"evidence": evidence, "ledgers": ledgers, "start_seconds": start_seconds, "world": world}


def parse():
    defaults = Recipe()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    launch.add_arguments(parser, dp=4, tp=2)
    parser.add_argument("--steps", type=int, default=defaults.steps, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--batch", type=int, default=defaults.batch, help="rows per step, over all ranks (default: %(default)s)"
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        default=defaults.micro_batches,
        help="pieces of a batch, over all ranks (default: %(default)s)",
    )
    parser.add_argument("--optimizer", default=defaults.optimizer, metavar="{muon,adamw}", help="default: %(default)s")
    parser.add_argument(
        "--strategy", default=defaults.strategy, help="how Muon sees whole matrices (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", default=defaults.dtype, metavar="{float32,bfloat16,float64}", help="default: %(default)s"
    )
    parser.add_argument("--lr", type=float, default=defaults.lr, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write all results here")
    parser.add_argument("--figure", metavar="FILE", help="draw the map, the losses and the bytes here (.png or .svg)")
    parser.add_argument("--quiet", action="store_true", help="print the verdict alone")
    return parser.parse_args()


def summarize(recipe, handed_over, threads):
    """Run the single-process reference here, where no other rank waits, and put everything into one result."""
    import torch

    from distmuon import certificate, report, training
    from distmuon.data import digits
    from distmuon.grid import Grid

    world, evidence = handed_over["world"], handed_over["evidence"]
    torch.set_num_threads(threads)  # as many as a rank had, or the last bits may differ
    device = torch.device(world.device)
    judged = certificate.judge(recipe, evidence, world.dp, device)
    predicted = [training.predict_run(recipe, world.dp, world.tp, rank // world.tp) for rank in range(world.size)]
    _, held_out = digits(Grid.alone(world.device), recipe.seed)
    result = {
        "grid": {"dp": world.dp, "tp": world.tp},
        "backend": world.backend,
        "device": world.device,
        "dtype": recipe.dtype,
        "optimizer": recipe.optimizer,
        "strategy": recipe.strategy,
        "steps": recipe.steps,
        "seed": recipe.seed,
        "machine": report.machine(),
        "losses": evidence.run.losses,
        "reference_losses": judged.reference.losses,
        "accuracy": training.accuracy(recipe, evidence.run.parameters, held_out),
        "reference_accuracy": training.accuracy(recipe, judged.reference.parameters, held_out),
        "exact": judged.exact,
        "float64_relative_difference": judged.float64_relative_difference,
        "relative_difference": judged.relative_difference,
        "control_relative_difference": judged.control_relative_difference,
        "replicas_agree": judged.replicas_agree,
        "ledger": report.ledger_rows(handed_over["ledgers"], predicted),
        "ledger_differences": [
            f"rank {rank}: {line}"
            for rank, (counted, expected) in enumerate(zip(handed_over["ledgers"], predicted, strict=True))
            for line in counted.differences(expected)
        ],
        "seconds_per_step": evidence.run.seconds_per_step,
        "reference_seconds_per_step": judged.reference.seconds_per_step,
        "start_seconds": handed_over["start_seconds"],
    }
    passed = all(judged.verdicts.values()) and not result["ledger_differences"]
    return result | {"passed": passed}, judged


def page(recipe, result, judged, layout):
    """Return the printed page, line by line."""
    from distmuon import report

    dp, tp = result["grid"]["dp"], result["grid"]["tp"]
    losses, reference = result["losses"], result["reference_losses"]
    different = result["ledger_differences"]
    return [
        f"Grid: {dp} DP x {tp} TP = {dp * tp} rank(s), {result['backend']} on {result['device']}, {recipe.dtype}, {recipe.optimizer}.",
        f"Virtual map: {report.map_in_words(layout, tp)}",
        "",
        f"Training: {recipe.steps} steps of {recipe.batch} handwritten digits.",
        f"  on the grid      loss {losses[0]:.2f} -> {losses[-1]:.2f}, held-out accuracy {result['accuracy']:.0%}",
        f"  in one process   loss {reference[0]:.2f} -> {reference[-1]:.2f}, held-out accuracy {result['reference_accuracy']:.0%}",
        "",
        "Certificates: is it the same training?",
        *report.certificate_lines(judged, recipe.steps, dp * tp),
        "",
        "Bytes that a rank sends per step, mean over ranks:",
        *report.byte_lines(result["ledger"], dp * tp, recipe.steps),
        *([f"  FAIL {line}" for line in different[:10]] or ["  every rank, bucket and collective: counted = predicted"]),
        "",
        f"Time: a step takes {result['seconds_per_step'] / result['reference_seconds_per_step']:.1f} x as long as in one process.",
    ]  # fmt: skip


def main():
    arguments = parse()
    chosen = {name: value for name, value in vars(arguments).items() if name in Recipe.__dataclass_fields__}
    recipe = Recipe(**chosen).check(arguments.dp, arguments.tp)
    handed_over = launch.run(work, (recipe,), **launch.options(arguments))[0]
    if int(os.environ.get("RANK", "0")):
        return 0  # under torchrun, rank 0 alone goes on

    from distmuon.report import write_json
    from distmuon.training import plan_run

    layout, _, _ = plan_run(recipe, arguments.dp, arguments.tp)
    result, judged = summarize(recipe, handed_over, arguments.threads)
    if not arguments.quiet:
        print("\n".join(page(recipe, result, judged, layout)))
    if arguments.json:
        write_json(arguments.json, result)
    if arguments.figure:
        from distmuon import figures

        figures.save(figures.draw_run(result, layout, arguments.tp), arguments.figure, figures.describe_run(result))
        print(f"Picture: {arguments.figure}")
    print(
        "Verified: the sharded run is the single-process run." if result["passed"] else "NOT verified: see FAIL above."
    )
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    launch.command(main)
