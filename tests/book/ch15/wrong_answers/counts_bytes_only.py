# expect: on cluster 1 your grid (2, 4) communicates 1.3 times as long as the best
from muonbook.planner.cost_model import LinkCost, step_seconds


def choose_grid(probe, grids):
    wires = {group: LinkCost(0.0, (1 << 23) / probe(group, 1 << 24)) for group in ("dp", "tp")}
    return min(grids, key=lambda shape: step_seconds(0.0, grids[shape], wires))
