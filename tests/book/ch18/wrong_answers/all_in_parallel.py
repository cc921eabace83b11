# expect: does not fit. Its fullest rank needs


def place(divisions, look, room):
    return max(divisions)  # as many copies of the data as there can be
