# expect: over budget: add_up may be called once for each gradient
from muonbook.ch01 import puzzle as steepest_step


def direction(rows, add_up):
    largest = add_up(rows.square().sum()).sqrt().clamp_min(1e-30)
    return steepest_step.direction(rows / largest, add_up)
