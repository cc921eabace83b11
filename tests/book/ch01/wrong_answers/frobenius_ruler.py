# expect: of what is possible; there is a steeper one.


def direction(rows, add_up):
    squares = add_up(rows.double().square().sum())
    return (-rows / squares.sqrt().clamp_min(1e-100)).float()
