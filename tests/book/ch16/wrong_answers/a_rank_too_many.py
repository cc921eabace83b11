# expect: a matrix went to rank
def deal(costs, ranks):
    return dict.fromkeys(costs, ranks)
