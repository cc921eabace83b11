"""What chapter 14 reads from its stored race of schedules."""

from __future__ import annotations

from typing import NamedTuple

from muonbook.measure import results


class LinkRace(NamedTuple):
    """Schedules raced over one link, and what a model needs to tell how it ends.

    work, sending: of one bucket, in a recorded synchronous step; rest: of that step, all else. Milliseconds.
    asleep, at_work: schedule -> its step over the synchronous one, median; of ranks that sleep in place of the work,
    and of ranks that do it.
    """

    buckets: int
    work: float
    sending: float
    rest: float
    asleep: dict[str, float]
    at_work: dict[str, float]


def stored_races() -> dict[str, LinkRace]:
    """Return the races of book/results/traces.json, by link: Mbit/s, and "no limit"."""
    found, races = results.load("traces"), dict[str, LinkRace]()
    working, sleeping = (found[f"links{how}"] | {"no limit": found[f"loopback{how}"]} for how in ("", "_asleep"))
    for link, race in working.items():
        step, buckets = race["recorded"]["synchronous"], race["waves"]
        work, sending = step["computation"], step["hideable"]
        asleep, at_work = (
            {name: ratio["median"] for name, ratio in one["ratio_to_synchronous"].items()}
            for one in (sleeping[link], race)
        )
        rest = step["span"] - work - sending
        races[link] = LinkRace(buckets, work / buckets, sending / buckets, rest, asleep, at_work)
    return races
