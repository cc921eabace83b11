# expect: false alarm: it rings for columns, rows, whole, other of the healthy optimizer


def alarm(update):
    return True
