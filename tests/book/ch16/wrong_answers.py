"""Wrong answers to the puzzle of chapter 16: above each stands what its reader must be told."""


# expect: a matrix went to rank
def a_rank_too_many(costs, ranks):
    return dict.fromkeys(costs, ranks)


# expect: your slowest rank works
def in_order(costs, ranks):
    return {matrix: matrix % ranks for matrix in costs}


# expect: the ranks disagree
def like_cards(costs, ranks):
    return {matrix: place % ranks for place, matrix in enumerate(costs)}


# expect: the ranks disagree
def ties_as_they_come(costs, ranks):
    loads = [0] * ranks
    owner = {}
    for matrix in sorted(costs, key=costs.get, reverse=True):
        owner[matrix] = loads.index(min(loads))
        loads[owner[matrix]] += costs[matrix]
    return owner
