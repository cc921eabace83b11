# expect: over budget: 70 looks at Moonlight on 64 ranks, and 16 are enough.


def place(divisions, look, room):
    seen = {division: look(division) for division in divisions}
    return min((d for d in seen if seen[d][0] <= room), key=lambda d: seen[d][1])
