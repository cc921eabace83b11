# expect: (1, 8, 8, 1) fits, and takes 2.23 times as long as the quickest that does.


def place(divisions, look, room):
    return max(divisions, key=lambda d: (d[1] * d[2], d[1]))  # cut as often as possible
