# expect: over budget: 48 probes of cluster 1, and 4 are enough
from muonbook.planner.cost_model import LinkCost, step_seconds


def choose_grid(probe, grids):
    wires = {}
    for group in ("dp", "tp"):
        times = {2 << n: probe(group, 2 << n) for n in range(24)}
        rate = ((1 << 24) - 2) / 2 / (times[1 << 24] - times[2])
        wires[group] = LinkCost(times[2] - 1 / rate, rate)
    return min(grids, key=lambda shape: step_seconds(0.0, grids[shape], wires))
