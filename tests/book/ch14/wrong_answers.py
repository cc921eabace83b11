"""Wrong answers to the puzzle of chapter 14: above each stands what its reader must be told."""

import torch


# expect: a tensor that is not one of the two buffers
def a_buffer_for_every_wave(link, buffers, waves, work):
    places = [torch.empty_like(buffers[0]) for _ in range(waves)]
    started = [link.start(k, places[k]) for k in range(waves)]
    for k in range(waves):
        started[k].wait()
        work(k, places[k])


# expect: with 1 wave(s), work(0) was never called
def forgets_the_last(link, buffers, waves, work):
    started = link.start(0, buffers[0])
    for k in range(waves - 1):
        started.wait()
        started = link.start(k + 1, buffers[(k + 1) % 2])
        work(k, buffers[k % 2])
    started.wait()


# expect: while rank 0 was at work(0), wave 1 was not under way
def one_after_the_other(link, buffers, waves, work):
    for k in range(waves):
        started = link.start(k, buffers[0])
        started.wait()
        work(k, buffers[0])


# expect: wave 1 was started into the buffer of wave 0, which work has not read yet
def one_buffer(link, buffers, waves, work):
    started = link.start(0, buffers[0])
    for k in range(waves):
        started.wait()
        if k + 1 < waves:
            started = link.start(k + 1, buffers[0])
        work(k, buffers[0])


# expect: all ranks must start waves in one order
def own_wave_first(link, buffers, waves, work):
    order = [(link.rank + k) % waves for k in range(waves)]
    started = link.start(order[0], buffers[0])
    for i, k in enumerate(order):
        started.wait()
        if i + 1 < waves:
            started = link.start(order[i + 1], buffers[(i + 1) % 2])
        work(k, buffers[i % 2])


# expect: work(0) was called before the wait for wave 0
def reads_too_early(link, buffers, waves, work):
    started = []
    for k in range(waves):
        started.append(link.start(k, buffers[k % 2]))
        if k > 0:
            work(k - 1, buffers[(k - 1) % 2])
            started[k - 1].wait()
    started[-1].wait()
    work(waves - 1, buffers[(waves - 1) % 2])


# expect: wave 2 was started into the buffer of wave 0, which is still being filled
def two_waves_ahead(link, buffers, waves, work):
    started = [link.start(k, buffers[k % 2]) for k in range(waves)]
    for k in range(waves):
        started[k].wait()
        work(k, buffers[k % 2])


# expect: while rank 0 was at work(0), wave 1 was not under way
def waits_at_once(link, buffers, waves, work):
    link.start(0, buffers[0]).wait()
    for k in range(waves):
        if k + 1 < waves:
            link.start(k + 1, buffers[(k + 1) % 2]).wait()
        work(k, buffers[k % 2])
