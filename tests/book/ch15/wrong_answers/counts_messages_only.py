# expect: on cluster 2 your grid
from muonbook.planner.cost_model import hops


def choose_grid(probe, grids):
    alpha = {group: probe(group, 2) for group in ("dp", "tp")}
    return min(grids, key=lambda g: sum(alpha[r.group] * r.calls * hops(r.op, r.group_size) for r in grids[g]))
