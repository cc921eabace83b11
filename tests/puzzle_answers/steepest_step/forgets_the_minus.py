# expect: for an ordinary gradient, X gains -1.000 of what is possible; there is a steeper one.
from distmuon.puzzles import steepest_step


def direction(rows, add_up):
    return -steepest_step.direction(rows, add_up)
