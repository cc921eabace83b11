"""Chapter 7's worker: every rank draws the same map, and what it prints is what the map says."""

from math import prod
from typing import Any

import pytest
import stored_pages
import worlds

from distmuon.sharding.layout import ParamSpec, plan
from muonbook.ch07 import figures

PAGE = stored_pages.every_cell("07_virtual_map")
WORKER = str(worlds.ROOT / "scripts" / "07_virtual_map.py")


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (("--dp", "3", "--bucket-size", "1"), ["DP rank 0 owns   W1[0:16] b1[0:3] W2[0:16] b2[0:2]"]),
        (
            ("--dp", "1"),
            ["DP rank 0 owns   W1[0:48] b1[0:8] W2[0:48] b2[0:6]", "Each rank sent 0 bytes (all-gathers: 0)."],
        ),
    ],
)
def test_each_rank_owns_what_the_map_says_and_gets_its_pieces_back(
    arguments: tuple[str, ...], lines: list[str]
) -> None:
    ending = worlds.perform(WORKER, *arguments)
    assert (ending.code, ending.err) == (0, "")
    assert set(lines) <= set(ending.out.splitlines())
    assert ending.out.count(": True.") == 3


def test_a_bucket_of_nothing_is_refused() -> None:
    says = "error: --bucket-size 0: must be from 1 to 1,000,000,000.\n"
    assert worlds.answer(WORKER, "--bucket-size", "0") == (2, "", says)


@pytest.fixture(scope="module")
def visible() -> dict[str, Any]:
    """The functions that the chapter's reader writes."""
    space: dict[str, Any] = {"prod": prod}
    for cell in PAGE:
        for part in cell.source.split("\n\n\n"):
            if cell.kind == "code" and part.startswith("def ") and not part.startswith("def fetch"):
                exec(part, space)
    return space


def test_the_map_on_the_page_is_the_engines(visible: dict[str, Any]) -> None:
    """Also where a scalar is laid out, where shards hold padding alone, and where nothing is left for a last bucket."""
    shapes = {"a": (7, 5), "s": (), "b": (3,), "c": (2, 9), "d": (64,)}
    specs = [ParamSpec(name, shape, "float32") for name, shape in shapes.items()]
    for dp in (1, 2, 3, 7, 300):
        for bucket_size in (1, 35, 36, 121, 500):
            places, buckets = visible["lay_out"](shapes, dp, bucket_size)
            layout = plan(specs, dp, bucket_size)
            assert list(places.values()) == list(layout.global_ranges)
            assert buckets == [bucket.range for bucket in layout.buckets]
            shards = [[visible["shard_of"](bucket, rank, dp) for rank in range(dp)] for bucket in buckets]
            assert shards == [[bucket.shard(rank) for rank in range(dp)] for bucket in layout.buckets]
            owners = [len(layout.owners(bucket, i)) for bucket in layout.buckets for i in bucket.params]
            assert visible["count_straddling"](shapes, dp, bucket_size) == sum(number > 1 for number in owners)


def test_from_25_ranks_on_a_shard_is_shorter_than_the_smallest_matrix(visible: dict[str, Any]) -> None:
    model = visible["transformer"]()
    smallest = min(map(prod, model.values()))
    straddling = {ranks: visible["count_straddling"](model, ranks) for ranks in (2, 4, 20, *range(24, 65))}
    assert [straddling[ranks] for ranks in (2, 4, 20, 24)] == [0, 24, 96, 72]
    assert set(list(straddling.values())[4:]) == {96}
    assert figures.draw_straddling(straddling, 96)[1].startswith("From 25 ranks on, every matrix is cut.")
    for ranks, shorter in ((24, False), (25, True)):
        _, buckets = visible["lay_out"](model, ranks, 25_000_000)
        assert all(((end - start) // ranks < smallest) == shorter for start, end in buckets)


@pytest.mark.parametrize(
    ("said", "printed"),
    [
        ("The second bucket has 6 elements", "  6 elements of b2"),
        ("pad it to 8, and it ends at 112", "(104, 112)]"),
        ("the end of `W1`, half of `b1`, and 2 elements of `b2`", "rank 1 owns W1[26:48] b1[0:4] b2[2:4]"),
        ("We compare what a rank owns", "3,280 times compared, 3,280 times equal"),
        ("With 4 ranks we cut a quarter of them", "D =  4: 24 of 96 matrices straddle"),
        ("With 2 ranks all cuts fall between matrices", "D =  2: 0 of 96 matrices straddle"),
        ("From 25 ranks on", "D = 32: 96 of 96 matrices straddle"),
        ("`W1` lies on three ranks", "rank 2 owns 4 elements of W1 and 10 elements of W2"),
        ("the bytes are those of our own map", "each rank sends 352 bytes, by the ring formula"),
        ("the bytes are those of our own map", "Each rank sent 352 bytes (all-gathers: 1)."),
        ("its first row belongs to `W1`", "wrong: [12.0, 13.0"),
    ],
)
def test_what_the_prose_says_is_printed(said: str, printed: str) -> None:
    assert any(said in cell.source for cell in PAGE if cell.kind == "markdown")
    assert any(printed in cell.printed for cell in PAGE)


def test_matrices_of_the_page_are_whole_again() -> None:
    printed = [line for cell in PAGE for line in cell.printed.splitlines() if "whole again" in line]
    assert printed == ["W1 is whole again: True", "W2 is whole again: True"]
