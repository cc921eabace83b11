# expect: work(0) was called before the wait for wave 0


def look_ahead(link, buffers, waves, work):
    started = []
    for k in range(waves):
        started.append(link.start(k, buffers[k % 2]))
        if k > 0:
            work(k - 1, buffers[(k - 1) % 2])
            started[k - 1].wait()
    started[-1].wait()
    work(waves - 1, buffers[(waves - 1) % 2])
