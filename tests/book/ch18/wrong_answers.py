"""Wrong answers to the puzzle of chapter 18: above each stands what its reader must be told."""


# expect: does not fit. Its fullest rank needs
def all_in_parallel(divisions, look, room):
    return max(divisions)  # as many copies of the data as there can be


# expect: over budget: 70 looks at Moonlight on 64 ranks, and 16 are enough.
def looks_at_all(divisions, look, room):
    seen = {division: look(division) for division in divisions}
    return min((d for d in seen if seen[d][0] <= room), key=lambda d: seen[d][1])


# expect: (1, 8, 8, 1) fits, and takes 2.23 times as long as the quickest that does.
def safe_and_slow(divisions, look, room):
    return max(divisions, key=lambda d: (d[1] * d[2], d[1]))  # cut as often as possible
