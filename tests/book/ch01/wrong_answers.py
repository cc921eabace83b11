"""Wrong answers to the puzzle of chapter 1: above each stands what its reader must be told."""

import torch

from muonbook.ch01 import puzzle as steepest_step


# expect: over budget: add_up may be called once for each gradient
def asks_twice(rows, add_up):
    largest = add_up(rows.square().sum()).sqrt().clamp_min(1e-30)
    return steepest_step.direction(rows / largest, add_up)


# expect: X holds an infinity or a NaN: is something divided by a singular value of 0?
def divides_by_zero(rows, add_up):
    g = rows.double()
    squares, v = torch.linalg.eigh(add_up(g.mT @ g))
    return (-g @ v @ torch.diag(squares.rsqrt()) @ v.mT).float()


# expect: times; at most 1 is allowed.
def entry_ruler(rows, add_up):
    return -rows.sign()


# expect: over budget: 300 numbers to add up; 36 are enough
def everything_for_everyone(rows, add_up):
    counts = {10: (0, 50), 13: (10, 50), 7: (23, 50), 20: (30, 50), 25: (0, 40), 0: (25, 40), 5: (25, 40)}
    start, total = counts[len(rows)]
    whole = torch.zeros(total, rows.shape[1])
    whole[start : start + len(rows)] = rows
    u, _, vt = torch.linalg.svd(add_up(whole), full_matrices=False)
    return (-u @ vt)[start : start + len(rows)]


# expect: for an ordinary gradient, X gains -1.000 of what is possible; there is a steeper one.
def forgets_the_minus(rows, add_up):
    return -steepest_step.direction(rows, add_up)


# expect: of what is possible; there is a steeper one.
def frobenius_ruler(rows, add_up):
    squares = add_up(rows.double().square().sum())
    return (-rows / squares.sqrt().clamp_min(1e-100)).float()


# expect: for an ordinary gradient, X stretches some input 2.000 times
def own_rows_only(rows, add_up):
    u, _, vt = torch.linalg.svd(rows, full_matrices=False)
    return -u @ vt


# expect: for a gradient with entries near 1e-30, X gains 0.000 of what is possible
def squares_in_float32(rows, add_up):
    squares, v = torch.linalg.eigh(add_up(rows.mT @ rows).double())
    inverse = torch.where(squares > 1e-6 * squares[-1], squares.rsqrt(), 0.0)
    return (-rows.double() @ v @ torch.diag(inverse) @ v.mT).float()


# expect: direction's result has shape (6, 10), and (10, 6) is wanted.
def transposed(rows, add_up):
    return steepest_step.direction(rows, add_up).mT
