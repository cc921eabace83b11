# expect: while rank 0 was at work(0), wave 1 was not under way


def look_ahead(link, buffers, waves, work):
    for k in range(waves):
        started = link.start(k, buffers[0])
        started.wait()
        work(k, buffers[0])
