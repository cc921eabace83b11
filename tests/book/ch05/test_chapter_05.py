"""Chapter 5: the worker's pages and arguments, what really leaves a process, the mistakes, and the pictures."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import stored_pages
import worlds
from figure_helpers import assert_readable, texts
from matplotlib.collections import LineCollection

from distmuon import launch
from distmuon.sharding.ledger import ring_bytes
from muonbook.ch05 import child_stderr, mistakes
from muonbook.ch05.figure_collectives import SAID, frames_of_collectives
from muonbook.ch05.figure_hang import describe_hang, draw_hang
from muonbook.ch05.figure_ring import MOST, frames_of_ring, ring_states, value

WORKER = str(worlds.ROOT / "scripts" / "05_processes_and_collectives.py")
MISMATCH = (
    "Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint("
    "SequenceNumber=0, OpType=ALLREDUCE, TensorShape=[8], TensorDtypes=Float), but Rank 1 is running collective: "
    "CollectiveFingerPrint(SequenceNumber=0, OpType=ALLREDUCE, TensorShape=[2, 2], TensorDtypes=Float)."
)


# ---- The worker -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [[], ["--start", "spawn"]])
def test_every_rank_writes_on_its_own_whiteboard_and_reads_what_rank_0_sent(start: list[str]) -> None:
    ending = worlds.finish(WORKER, "--show", "ranks", "--dp", "3", *start)
    wrote = [[10 * rank, 10 * rank + 1, 10 * rank + 2, 10 * rank + 3] for rank in range(3)]
    lines = [f"rank {rank} of 3 wrote {wrote[rank]}, now reads {wrote[0]}" for rank in range(3)]
    assert (ending.code, ending.err) == (0, "")
    assert ending.out.splitlines() == [*lines, "different processes: 3"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What 4 ranks saw of all collectives."""
    file = tmp_path_factory.mktemp("seen") / "new" / "05.json"
    ending = worlds.finish(WORKER, "--json", str(file))
    assert (ending.code, ending.err) == (0, "")
    assert "all_reduce, exactly and on every rank: True." in ending.out
    return json.loads(file.read_text())["ranks"]


def test_collectives_do_what_the_chapter_says_and_come_from_whom_it_says(seen: list[dict]) -> None:
    total = [60, 64, 68, 72]
    after = {
        "broadcast": [[0, 1, 2, 3]] * 4,
        "all_reduce": [total] * 4,
        "all_gather": [[0, 10, 20, 30]] * 4,
        "reduce_scatter": [[part] for part in total],
        "native reduce_scatter": [[part] for part in total],
        "all_to_all": [[r, 10 + r, 20 + r, 30 + r] for r in range(4)],
    }

    def terms(element: int) -> list[list[int]]:
        return [[rank, element] for rank in range(4)]

    origins = {
        "broadcast": [[[[0, n]] for n in range(4)]] * 4,
        "all_reduce": [[terms(n) for n in range(4)]] * 4,
        "all_gather": [[[[rank, 0]] for rank in range(4)]] * 4,
        "reduce_scatter": [[terms(rank)] for rank in range(4)],
        "native reduce_scatter": [[terms(rank)] for rank in range(4)],
        "all_to_all": [[[[source, rank]] for source in range(4)] for rank in range(4)],
    }
    assert {op: [rank["moves"][op]["after"] for rank in seen] for op in after} == after
    assert {op: [rank["moves"][op]["origins"] for rank in seen] for op in origins} == origins


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process has written")
def test_what_leaves_a_process_is_what_the_ring_formula_says(seen: list[dict]) -> None:
    payload = 4 * 1_200_000
    for op in seen[0]["moves"]:
        moves = [rank["moves"][op] for rank in seen]
        formula = ring_bytes(op.removeprefix("native "), payload, 4)
        assert {(move["payload"], move["ledger"]) for move in moves} == {(payload, formula)}
        shares = [move["socket"] / formula for move in moves]
        if op == "broadcast":  # a tree: right on average only
            assert sum(shares) / 4 == pytest.approx(1, rel=0.01)
            assert max(shares) > 2
        else:
            assert shares == pytest.approx([2 if op.startswith("native") else 1] * 4, rel=0.01)


def test_groups_are_columns_and_rows(tmp_path: Path) -> None:
    ending = worlds.finish(WORKER, "--show", "groups", "--dp", "2", "--tp", "3")
    assert (ending.code, ending.err) == (0, "")
    assert ending.out.splitlines() == [
        f"rank {rank}: DP group {[rank % 3, rank % 3 + 3]}, TP group {[*range(rank // 3 * 3, rank // 3 * 3 + 3)]}"
        for rank in range(6)
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--show", "everything"], "--show everything is unknown; choose one of ranks, collectives, groups."),
        (["--show", "ranks", "--start", "fork"], "--start fork is unknown; choose one of launcher, spawn."),
        (["--start", "spawn"], "--start does nothing with --show collectives; it goes with --show ranks."),
        (["--mistake", "typo"], "--mistake typo is unknown; choose one of skip, shapes, order."),
        (["--mistake", "skip", "--dp", "2"], "--mistake skip is made by 4 ranks on gloo, without torchrun."),
        (["--mistake", "skip", "--timeout", "0"], "--timeout 0: must be from 0.1 to 3,600."),
        (["--show", "groups", "--dp", "1"], "one rank has nobody to talk to; choose --dp 2 or more."),
        (["--show", "ranks", "--json", "x.json"], "it goes with --show collectives or --show groups or --mistake."),
        (["--json", "."], "--json .: that is a folder; name a file in it."),
        (["--hint", "0"], "--hint 0: hints are counted from 1 to 3."),
    ],
)
def test_wrong_arguments_are_answered_in_one_sentence(given: list[str], words: str) -> None:
    ending = worlds.answer(WORKER, *given)
    assert (ending.code, ending.out) == (2, "")
    assert words in ending.err
    assert len(ending.err.splitlines()) == 1


# ---- Mistakes ---------------------------------------------------------------------------------------------


def test_those_who_wait_are_innocent() -> None:
    waited = "RuntimeError: I waited for the others in vain"
    assert launch.run(mistakes.make, ("skip", 3.0), dp=4) == [waited, waited, None, waited]
    told = launch.run(mistakes.make, ("shapes", 3.0), dp=4)
    assert [told[rank] for rank in (0, 2, 3)] == [waited] * 3
    wrong = re.fullmatch(r"no error; the gradients add up to \[(.*)\]", told[1])
    assert wrong is not None
    assert [int(value) for value in wrong[1].split(", ")] != [10] * 4


def test_the_order_mistake_is_silent_and_wrong() -> None:
    others, culprit = "no error; loss 208, gradient 802", "no error; loss 802, gradient 208"
    assert launch.run(mistakes.make, ("order", 3.0), dp=4) == [others, culprit, others, others]


def test_torchs_own_check_names_the_culprit_except_for_order() -> None:
    detail, make = "TORCH_DISTRIBUTED_DEBUG=DETAIL", "python {worker} --mistake"
    commands = (
        f"{detail} TORCH_CPP_LOG_LEVEL=FATAL {make} skip --timeout 3",
        f"{detail} {make} shapes --timeout 3",
        f"{detail} {make} order",
    )
    skip, shapes, order = (stored_pages.printed("05_processes_and_collectives", command) for command in commands)
    assert skip.splitlines()[0] == "rank 0: RuntimeError: rank 2 did not come"
    assert len(shapes.splitlines()) == 4
    for line in shapes.splitlines():
        assert re.search(r"rank \d ALLREDUCE \[[48]\], but rank [01] ALLREDUCE \[[48]\]$", line)
    assert order.count("no error") == 4


def test_a_digest_leaves_out_what_differs_from_run_to_run() -> None:
    assert mistakes.digest("[/a/b.cc:78] Timed out waiting 3000ms for recv") == "I waited for the others in vain"
    assert mistakes.digest("Connection closed by peer [127.0.0.1]:4529.") == "I waited for the others in vain"
    wanted = "rank 0 ALLREDUCE [8], but rank 1 ALLREDUCE [2, 2]"
    assert mistakes.digest(MISMATCH) == wanted
    assert mistakes.digest("[Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 9 ms") == "rank 2, 3 did not come"
    with pytest.raises(ValueError, match="not known as an error of a collective: out of memory"):
        mistakes.digest("out of memory")


# ---- A cell has no file -----------------------------------------------------------------------------------

TRACEBACK = """Traceback (most recent call last):
  File "/usr/lib/python3.13/multiprocessing/spawn.py", line 132, in _main
    self = reduction.pickle.load(from_parent)
           ~~~~~~~~~~~~~~~~~~~~~^^^^^^^^^^^^^
AttributeError: Can't get attribute 'hello' on <module '__main__' {described}>

"""


@pytest.mark.parametrize("described", ["(built-in)", "(<class '_frozen_importlib.BuiltinImporter'>)"])
def test_last_words_are_those_of_the_other_process_without_what_differs_between_machines(
    described: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with child_stderr.last_words():
        os.write(2, TRACEBACK.replace("{described}", described).encode())
        raise RuntimeError("process 0 terminated with exit code 1\n")
    os.write(2, b"heard again")
    assert capfd.readouterr() == (
        "in the new process:\n"
        "    self = reduction.pickle.load(from_parent)\n"
        "    AttributeError: Can't get attribute 'hello' on <module '__main__'>\n"
        "in this notebook:\n"
        "    RuntimeError: process 0 terminated with exit code 1\n",
        "heard again",
    )


def test_an_interrupt_is_not_taken_for_last_words(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), child_stderr.last_words():
        raise KeyboardInterrupt
    assert capfd.readouterr() == ("", "")


# ---- Pictures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(2, 9))
def test_a_ring_reduces_then_gathers_and_every_rank_passes_one_chunk_per_move(n: int) -> None:
    states, everyone = ring_states(n), frozenset(range(n))
    assert len(states) == 2 * (n - 1) + 1
    assert all(sorted(state.passes) == list(range(n)) for state in states[:-1])
    finished = [[chunk for chunk in range(n) if held[chunk] == everyone] for held in states[n - 1].holds]
    assert finished == [[(rank + 1) % n] for rank in range(n)]  # one each, and no two the same
    assert all(chunk == everyone for held in states[-1].holds for chunk in held)
    assert ring_bytes("all_reduce", n * 8, n) == 8 * (len(states) - 1)


@pytest.mark.parametrize("n", range(2, MOST + 1))
def test_a_frame_for_every_move_of_the_ring_and_a_rest_before_between_and_after(n: int) -> None:
    frames, states = frames_of_ring(n, 1_200_000 * n), ring_states(n)
    resting = {0: 0, n: n - 1, len(frames) - 1: 2 * (n - 1)}  # frame -> state
    assert len(frames) == len(states) + 2
    for number, frame in enumerate(frames):
        moves = number - (number > n)
        holds, passes = states[resting.get(number, moves - 1)]
        painted = [patch.get_gid() for patch in frame.figure.axes[0].patches]
        underway = [] if number in resting else [holds[rank][chunk] for rank, chunk in enumerate(passes)]
        for rank in range(n):
            wanted = sum(rank in chunk for chunk in (*(chunk for held in holds for chunk in held), *underway))
            assert painted.count(f"source-{rank}") == wanted
        assert [painted.count(gid) for gid in ("passed on", "on its way", "comes next")] == [len(underway)] * 3
        assert_readable(frame.figure)
        for rank, chunks in enumerate(holds):
            assert f"Rank {rank} holds {', '.join(str(value(c, n)) for n, c in enumerate(chunks))}" in frame.alt
    assert f"{2 * (n - 1)} chunks of 1.2 MB = {1.2 * 2 * (n - 1):.1f} MB." in frames[-1].caption


@pytest.mark.parametrize("n", [1, MOST + 1])
def test_a_ring_that_does_not_fit_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=f"a ring of {n} ranks"):
        frames_of_ring(n, 100)


def test_a_line_for_every_term_of_every_value(seen: list[dict]) -> None:
    frames = frames_of_collectives([rank["moves"] for rank in seen])
    assert len(frames) == 1 + 2 * len(SAID)
    wires = [[drawn for drawn in frame.figure.axes[0].collections if drawn.get_gid()] for frame in frames]
    assert all(isinstance(wire, LineCollection) for each in wires for wire in each)
    lines = [sum(len(wire.get_paths()) for wire in each) for each in wires]
    assert lines == [0, 16, 16, 64, 64, 16, 16, 16, 16, 16, 16]
    for frame in frames:
        assert_readable(frame.figure)
    assert frames[4].alt.endswith("Every rank holds 60, 64, 68, 72.")
    assert "Lines lead to rank 3 from element 3 of rank 0, 1, 2, 3." in frames[5].alt


def test_who_has_left_is_the_one_without_a_word() -> None:
    told = ["waited", None, "waited"]
    figure = draw_hang(told)
    assert_readable(figure)
    assert [patch.get_gid() for patch in figure.axes[0].patches if patch.get_gid()] == ["waits", "left", "waits"]
    assert texts(figure).count("complains") == 2
    assert "Ranks 0, 2 reach" in describe_hang(told)
    assert "Rank 1 has left" in describe_hang(told)
