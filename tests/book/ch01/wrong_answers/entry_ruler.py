# expect: times; at most 1 is allowed.


def direction(rows, add_up):
    return -rows.sign()
