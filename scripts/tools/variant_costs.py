"""Count what a variant of Muon costs: bytes that four ranks send, numbers that they keep, and time on one process."""

from distmuon import launch
from muonbook.measure import interleaved_timing, results

GRIDS = {"gather_all": (2, 2), "owner": (2, 2), "muonw": (4, 1)}  # DP, TP; MuonW is on FSDP2 over all four
SHAPE, QUICK_SHAPE = (512, 2048), (48, 96)


def variants():
    """Return name -> what it changes of Muon."""
    from muonbook.ch04.search_space import VARIANT_OPTIONS

    return {
        "muon": {},
        **{name: options for name, (_, options) in VARIANT_OPTIONS.items()},
        "unit_rms": {"scale": "unit_rms"},
    }


def count(world, way):
    """Return {variant: what this rank sends in a step, and the elements of what it keeps for Muon}."""
    from distmuon.sharding.grid import Grid
    from distmuon.sharding.local_views import local
    from distmuon.verify.counter import CollectiveCounter
    from muonbook.measure.workload import Workload, batches, pixels
    from muonbook.planner.measured.timed_worlds import make

    grid, workload, found = Grid.of(world), Workload(), dict[str, dict[str, int]]()
    batch = next(batches(workload, pixels(grid, workload.context), grid.dp.size, grid.dp.rank))
    for name, options in variants().items():
        trainer = make(way, workload, grid)
        optimizer = trainer.optimizers[0]
        groups = [group for group in optimizer.param_groups if group["algorithm"] == "muon"]
        for group in groups:
            group.update(options)
        with CollectiveCounter() as counter:
            trainer.step(batch)
        weights = [p for group in groups for p in group["params"]]
        states = [local(kept) for p in weights for kept in optimizer.state.get(p, {}).values()]
        found[name] = {
            "sent_bytes": counter.ledger.total().sent_bytes,
            "collectives": counter.ledger.total().calls,
            "state_elements": sum(kept.numel() for kept in states),
        }
    return found


def counted():
    """Return {way: {variant: {quantity: its sum over the ranks}}}."""
    found = {}
    for way, (dp, tp) in GRIDS.items():
        ranks = launch.run(count, (way,), dp=dp, tp=tp)
        found[way] = {
            name: {key: sum(rank[name][key] for rank in ranks) for key in ranks[0][name]} for name in ranks[0]
        }
    return found


def times(shape, rounds):
    """Return {variant: the time of what stands between momentum and weight, over Muon's}, in float32, in turns."""
    import torch

    from distmuon.optim.muon import MUON_DEFAULTS, WeightPart, decay_and_apply_, orthogonalize

    u, weight = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))

    def act(options):
        group = MUON_DEFAULTS | {"compute_dtype": torch.float32, "ns_form": "standard", "lr": 0.0} | options

        moments = [] if group["normuon_beta2"] is None else [torch.zeros(shape[0])]

        def once():
            (update,) = orthogonalize([u.clone()], group, moments=moments)
            decay_and_apply_([weight], [group], [[WeightPart(weight, update, group["lr"], 1.0)]])

        return once

    seconds = interleaved_timing.take_turns({name: act(options) for name, options in variants().items()}, rounds)
    return {name: results.spread(interleaved_timing.ratios(taken, seconds["muon"])) for name, taken in seconds.items()}


def measure(quick):
    """Return everything that book/results/variant_costs.json holds. quick: a small matrix, and few rounds."""
    over_muons = times(QUICK_SHAPE, 3) if quick else times(SHAPE, 30)
    return {"grids": GRIDS, "counted": counted(), "time_over_muons": over_muons}
