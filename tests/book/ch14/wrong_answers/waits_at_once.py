# expect: while rank 0 was at work(0), wave 1 was not under way


def look_ahead(link, buffers, waves, work):
    link.start(0, buffers[0]).wait()
    for k in range(waves):
        if k + 1 < waves:
            link.start(k + 1, buffers[(k + 1) % 2]).wait()
        work(k, buffers[k % 2])
