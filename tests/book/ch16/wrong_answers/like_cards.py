# expect: the ranks disagree
def deal(costs, ranks):
    return {matrix: place % ranks for place, matrix in enumerate(costs)}
