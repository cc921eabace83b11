"""Chapter 7's worker: every rank draws the same map, and what it prints is what the map says."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from distmuon.sharding.layout import plan
from muonbook.ch07 import moving_map
from muonbook.ch07.roundtrip import MODEL
from muonbook.figures import player, style

WORKER = Path(__file__).resolve().parents[3] / "scripts" / "07_virtual_map.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, WORKER, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (("--dp", "4"), ["DP rank 1 owns   W1[26:48] b1[0:4] b2[2:4]", "Each rank sent 312 bytes (all-gathers: 1)."]),
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
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(lines) <= set(done.stdout.splitlines())
    assert done.stdout.count(": True.") == 3


def test_a_bucket_of_nothing_is_refused() -> None:
    done = run("--bucket-size", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --bucket-size 0: must be from 1 to 1,000,000,000.\n"


SPLIT = {"W1": 0, "b1": 0, "W2": 1}  # over TP, b2 alone is not


def test_the_moving_map_gives_every_element_to_its_owner_above_and_below() -> None:
    frames = moving_map.frames_of_map(MODEL, 4, (64, 50, 1000), SPLIT)
    assert 6 <= len(frames) <= 14
    colours = {to_hex(style.dp_colour(rank)): rank for rank in range(4)}
    for number, (dp, size) in {4: (4, 64), 5: (4, 64), 6: (2, 64), 7: (4, 50), 8: (4, 1000)}.items():
        layout = plan(MODEL, dp, size)
        owned = {rank: sum(meta.local_range.size for meta in layout.view(rank)) for rank in range(dp)}
        above, below = Counter[int](), Counter[int]()
        longest = 112  # the longest strip: 110 elements and 2 of padding
        scale = (style.WIDTH - style.MARGIN - moving_map.STRIPS_LEFT) / longest
        boxes = [patch for patch in frames[number].figure.axes[0].patches if isinstance(patch, Rectangle)]
        for box in boxes:
            owner = colours.get(to_hex(box.get_facecolor()))
            if owner is not None and box.get_height() == moving_map.SQUARE:
                above[owner] += round(box.get_width() / moving_map.SQUARE)
            elif owner is not None and box.get_height() == moving_map.HIGH:
                below[owner] += round(box.get_width() / scale)
        assert above == below == owned


def test_captions_of_the_moving_map_are_the_layouts() -> None:
    captions = [frame.caption for frame in moving_map.frames_of_map(MODEL, 4, (64, 50, 1000), SPLIT)]
    assert captions[0] == "4 parameters, 110 elements, 4 ranks, equal shares. Who keeps what?"
    assert captions[6] == "D = 2: longer shards, fewer cuts. Only b1 and b2 straddle."
    assert captions[7] == "Bucket size 50: shorter shards. W1 has 4 owners instead of 2."
    assert captions[10] == "Back to the first map. Rank 1 keeps W1[26:48], b1[0:4], b2[2:4]."


def test_the_moving_map_is_a_player_and_light() -> None:
    frames = moving_map.frames_of_map(MODEL, 4, (64, 50, 1000), SPLIT)
    assert len(player.html("map", frames)) < 100_000
    assert "On every TP rank, DP 0: W1[0:15]" in player.words(frames)
