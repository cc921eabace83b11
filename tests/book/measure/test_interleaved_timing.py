"""Taking turns: every act once a round, in an order that favours nobody and is the same on every rank."""

from collections import Counter

import pytest
import torch

from muonbook.measure import interleaved_timing

NAMES = ("one", "two", "three")


def test_every_second_round_runs_backwards_and_orders_differ():
    orders = [interleaved_timing.shuffled(NAMES, number) for number in range(40)]
    assert all(sorted(order) == sorted(NAMES) for order in orders)
    assert all(first == second[::-1] for first, second in zip(orders[::2], orders[1::2], strict=True))
    assert len({tuple(order) for order in orders}) == 6, "every order comes up"
    places = Counter(order.index("one") for order in orders)
    assert places[0] == places[2], "as often first as last"
    assert orders == [interleaved_timing.shuffled(list(NAMES), number) for number in range(40)], (
        "the same on every rank"
    )


def test_acts_take_turns_and_the_warm_up_is_forgotten():
    told: list[str] = []
    acts = {name: (lambda name=name: told.append(name)) for name in NAMES}
    seconds = interleaved_timing.take_turns(
        acts, rounds=3, warm_up=2, before=lambda name: told.append(f"before {name}")
    )
    assert {name: len(taken) for name, taken in seconds.items()} == dict.fromkeys(NAMES, 3)
    assert told == [
        word
        for number in range(5)
        for name in interleaved_timing.shuffled(NAMES, number)
        for word in (f"before {name}", name)
    ]


def test_the_clock_stands_while_an_act_is_prepared(monkeypatch):
    now = [0]

    def spend(seconds: int) -> None:
        now[0] += seconds

    monkeypatch.setattr(interleaved_timing.time, "perf_counter", lambda: now[0])
    seconds = interleaved_timing.take_turns({"one": lambda: spend(2)}, rounds=3, before=lambda _: spend(5))
    assert seconds == {"one": [2, 2, 2]}


def test_on_a_gpu_the_clock_stops_when_the_work_is_done(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("done"))
    interleaved_timing.ended(lambda: told.append("asked"), "cuda")()
    assert told == ["asked", "done"]
    interleaved_timing.ended(lambda: told.append("on a CPU"), "cpu")()
    assert told[2:] == ["on a CPU"]


def test_ratios_are_taken_within_a_round():
    assert interleaved_timing.ratios([2, 9], [1, 3]) == [2, 3]
    with pytest.raises(ValueError, match="argument 2 is"):
        interleaved_timing.ratios([1, 2], [1])
