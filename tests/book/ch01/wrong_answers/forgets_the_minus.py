# expect: for an ordinary gradient, X gains -1.000 of what is possible; there is a steeper one.
from muonbook.ch01 import puzzle as steepest_step


def direction(rows, add_up):
    return -steepest_step.direction(rows, add_up)
