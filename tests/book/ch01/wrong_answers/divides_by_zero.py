# expect: X is not finite; at most 1 is allowed.
import torch


def direction(rows, add_up):
    g = rows.double()
    squares, v = torch.linalg.eigh(add_up(g.mT @ g))
    return (-g @ v @ torch.diag(squares.rsqrt()) @ v.mT).float()
