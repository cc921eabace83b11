# expect: it stays silent although the optimizer has the exhibit 'block-wise Newton–Schulz' in it


def alarm(update):
    return bool(update.isnan().any())
