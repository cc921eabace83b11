# expect: the ranks disagree
def deal(costs, ranks):
    loads = [0] * ranks
    owner = {}
    for matrix in sorted(costs, key=costs.get, reverse=True):
        owner[matrix] = loads.index(min(loads))
        loads[owner[matrix]] += costs[matrix]
    return owner
