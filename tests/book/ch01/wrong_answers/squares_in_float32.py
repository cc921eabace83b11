# expect: for a gradient with entries near 1e-30, X gains 0.000 of what is possible
import torch


def direction(rows, add_up):
    squares, v = torch.linalg.eigh(add_up(rows.mT @ rows).double())
    inverse = torch.where(squares > 1e-6 * squares[-1], squares.rsqrt(), 0.0)
    return (-rows.double() @ v @ torch.diag(inverse) @ v.mT).float()
