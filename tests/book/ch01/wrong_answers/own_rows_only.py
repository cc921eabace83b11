# expect: for an ordinary gradient, X stretches some input 2.000 times
import torch


def direction(rows, add_up):
    u, _, vt = torch.linalg.svd(rows, full_matrices=False)
    return -u @ vt
