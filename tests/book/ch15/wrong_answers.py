"""Wrong answers to the puzzle of chapter 15: above each stands what its reader must be told."""

from muonbook.planner.cost_model import LinkCost, hops, step_seconds


# expect: on cluster 2 your grid (4, 2) communicates 1.2 times as long as the best
def always_square(probe, grids):
    return min(grids, key=lambda grid: grid[0] - grid[1] if grid[0] >= grid[1] else 99)


# expect: on cluster 1 your grid (2, 4) communicates 1.3 times as long as the best
def counts_bytes_only(probe, grids):
    wires = {group: LinkCost(0.0, (1 << 23) / probe(group, 1 << 24)) for group in ("dp", "tp")}
    return min(grids, key=lambda shape: step_seconds(0.0, grids[shape], wires))


# expect: on cluster 2 your grid
def counts_messages_only(probe, grids):
    alpha = {group: probe(group, 2) for group in ("dp", "tp")}
    return min(grids, key=lambda g: sum(alpha[r.group] * r.calls * hops(r.op, r.group_size) for r in grids[g]))


# expect: choose_grid returned (3, 3), and one of
def names_no_grid(probe, grids):
    return 3, 3


# expect: over budget: 48 probes of cluster 1, and 4 are enough
def probes_every_collective(probe, grids):
    wires = {}
    for group in ("dp", "tp"):
        times = {2 << n: probe(group, 2 << n) for n in range(24)}
        rate = ((1 << 24) - 2) / 2 / (times[1 << 24] - times[2])
        wires[group] = LinkCost(times[2] - 1 / rate, rate)
    return min(grids, key=lambda shape: step_seconds(0.0, grids[shape], wires))
