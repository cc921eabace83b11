"""Wrong answers to the puzzle of chapter 10: above each stands what its reader must be told."""

import torch


# expect: times the right sum of squares
def counts_replicas_twice(grid, pieces):
    squares = sum(gradient.double().square().sum() for gradient, tp_split_dim in pieces)
    return grid.world.all_reduce(squares, "squares").sqrt().item()


# expect: rank 0 finds a norm of
def forgets_the_other_tp_column(grid, pieces):
    squares = sum(gradient.double().square().sum() for gradient, tp_split_dim in pieces)
    return grid.dp.all_reduce(squares, "squares").sqrt().item()


# expect: over budget: rank 0 made 2 collective(s) of 16 bytes in all
def one_call_per_group(grid, pieces):
    cut, whole = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for gradient, tp_split_dim in pieces:
        (whole if tp_split_dim is None else cut).add_(gradient.double().square().sum())
    squares = cut + whole / grid.tp.size
    grid.dp.all_reduce(squares, "squares")
    return grid.tp.all_reduce(squares, "squares").sqrt().item()
