# expect: on cluster 2 your grid (4, 2) communicates 1.2 times as long as the best
def choose_grid(probe, grids):
    return min(grids, key=lambda grid: grid[0] - grid[1] if grid[0] >= grid[1] else 99)
