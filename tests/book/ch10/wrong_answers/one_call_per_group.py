# expect: over budget: rank 0 made 2 collective(s) of 16 bytes in all
import torch


def global_norm(grid, pieces):
    cut, whole = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for gradient, tp_split_dim in pieces:
        (whole if tp_split_dim is None else cut).add_(gradient.double().square().sum())
    squares = cut + whole / grid.tp.size
    grid.dp.all_reduce(squares, "squares")
    return grid.tp.all_reduce(squares, "squares").sqrt().item()
