"""Chapter 5: the worker's pages and arguments, what really leaves a process, the mistakes, the page, the pictures."""

import json
import re
import sys

import pytest
import stored_pages
import worlds
from torch.distributed.constants import default_pg_timeout

from distmuon.launch import DEFAULT_TIMEOUT
from distmuon.sharding.ledger import ring_bytes
from muonbook.ch05 import experiments, figures
from muonbook.planner import fabrics

CHAPTER = "05_processes_and_collectives"
WORKER = str(worlds.ROOT / "scripts" / f"{CHAPTER}.py")
MISMATCH = (
    "Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint("
    "SequenceNumber=0, OpType=ALLREDUCE, TensorShape=[8], TensorDtypes=Float), but Rank 1 is running collective: "
    "CollectiveFingerPrint(SequenceNumber=0, OpType=ALLREDUCE, TensorShape=[2, 2], TensorDtypes=Float)."
)


# ---- The worker -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What 4 ranks saw of all collectives."""
    file = tmp_path_factory.mktemp("seen") / "new" / "05.json"
    ending = worlds.perform(WORKER, "--json", str(file))
    assert (ending.code, ending.err) == (0, "")
    assert "equals all_reduce on every rank: True." in ending.out
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
            assert shares[0] > 1
            assert min(shares) < 0.01
        else:
            assert shares == pytest.approx([2 if op.startswith("native") else 1] * 4, rel=0.01)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--mistake", "typo"], f"--mistake typo is unknown; choose one of {', '.join(experiments.MISTAKES)}."),
        (["--mistake", "skip", "--dp", "2"], "--mistake skip is made by 4 ranks on gloo, without torchrun."),
        (["--show", "groups", "--dp", "1"], "one rank has no other to talk to; choose --dp 2 or more."),
        (["--mistake", "skip", "--device", "cpu"], "it goes with --show collectives or --show groups."),
    ],
)
def test_wrong_arguments_are_answered_in_one_sentence(given: list[str], words: str) -> None:
    ending = worlds.answer(WORKER, *given)
    assert (ending.code, ending.out) == (2, "")
    assert words in ending.err
    assert len(ending.err.splitlines()) == 1


# ---- Mistakes ---------------------------------------------------------------------------------------------


def test_the_ranks_that_wait_did_not_make_the_mistake_and_torchs_own_check_names_it_except_for_order() -> None:
    detail, make = "TORCH_DISTRIBUTED_DEBUG=DETAIL", "python {worker} --mistake"
    waited = [f"rank {rank}: RuntimeError: stopped waiting for the others" for rank in range(4)]
    skip = stored_pages.printed(CHAPTER, f"{detail} TORCH_CPP_LOG_LEVEL=FATAL {make} skip --timeout 3").splitlines()
    assert skip == ["rank 0: RuntimeError: rank 2 did not come", waited[1], waited[3]]
    zero, wrong, *others = stored_pages.printed(CHAPTER, f"{make} shapes --timeout 3").splitlines()
    assert [zero, *others] == [waited[0], *waited[2:]]
    assert re.fullmatch(r"rank 1: no error; the gradients add up to \[(?!10, 10, 10, 10\])[\d, ]+\]", wrong)
    shapes = stored_pages.printed(CHAPTER, f"{detail} {make} shapes --timeout 3").splitlines()
    assert len(shapes) == 4
    for line in shapes:
        assert re.search(r"rank \d ALLREDUCE \[[48]\], but rank [01] ALLREDUCE \[[48]\]$", line)
    right, wrong = "no error; loss 208, gradient 802", "no error; loss 802, gradient 208"
    assert stored_pages.printed(CHAPTER, f"{detail} {make} order").splitlines() == [
        f"rank {rank}: {wrong if rank == 1 else right}" for rank in range(4)
    ]


def test_a_digest_leaves_out_what_differs_from_run_to_run() -> None:
    assert experiments.digest("[/a/b.cc:78] Timed out waiting 3000ms for recv") == "stopped waiting for the others"
    assert experiments.digest("Connection closed by peer [127.0.0.1]:4529.") == "stopped waiting for the others"
    wanted = "rank 0 ALLREDUCE [8], but rank 1 ALLREDUCE [2, 2]"
    assert experiments.digest(MISMATCH) == wanted
    assert (
        experiments.digest("[Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 9 ms") == "rank 2, 3 did not come"
    )
    with pytest.raises(ValueError, match="not known as an error of a collective: out of memory"):
        experiments.digest("out of memory")


# ---- The page ---------------------------------------------------------------------------------------------


def page() -> str:
    return "\n".join(cell.source for cell in stored_pages.every_cell(CHAPTER))


def printed_by(begins: str) -> list[str]:
    """Return the lines that are stored below the cell with this line in it."""
    (cell,) = [cell for cell in stored_pages.cells(CHAPTER) if begins in cell.source.splitlines()]
    return cell.printed.splitlines()


def test_ranks_of_the_readers_own_file_read_what_rank_0_wrote() -> None:
    lines = printed_by("!python four_ranks.py")
    wrote = [[10 * rank + n for n in range(4)] for rank in range(4)]
    assert lines == [f"rank {rank} of 4 wrote {wrote[rank]}, now reads {wrote[0]}" for rank in range(4)]


def test_groups_that_the_page_prints_are_the_columns_and_rows_of_its_grid() -> None:
    (groups,) = [cell.printed for cell in stored_pages.cells(CHAPTER) if "--show groups" in cell.source]
    assert groups.splitlines()[:8] == [
        f"rank {r}: DP group {[*range(r % 2, 8, 2)]}, TP group {[r // 2 * 2, r // 2 * 2 + 1]}" for r in range(8)
    ]


def test_everything_that_the_page_compares_is_equal() -> None:
    output = "".join(cell.printed for cell in stored_pages.cells(CHAPTER))
    assert re.findall(r"\b(?:True|False)$", output, re.MULTILINE) == ["True"] * (5 + 1 + 1 + 1)
    assert "equals all_reduce on every rank: True." in output


def test_the_ring_on_the_page_moves_as_the_one_in_the_picture() -> None:
    moves = printed_by("sums, sent = ring_all_reduce(x, show=True)")[1:-1]
    for number, (line, state) in enumerate(zip(moves, figures.ring_states(4)[1:], strict=True), 1):
        held = [[figures.value(sources, chunk) for chunk, sources in enumerate(row)] for row in state.holds]
        assert line == f"{number} {' '.join(map(str, held))}"
    counted = printed_by("sums, sent = ring_all_reduce(large)")[2:]
    assert [line.split(":")[1].split() for line in counted] == [["7200000", "bytes"]] * 3


def test_seconds_on_the_page_follow_from_the_planners_links() -> None:
    links = {name: float(speed) for name, speed in re.findall(r'^    "(.+)": ([\d.e]+),$', page(), re.MULTILINE)}
    planned = (fabrics.NVLINK, fabrics.ADAPTER, fabrics.PCIE)
    assert list(links.values()) == [link.bytes_per_second for link in planned]
    table = printed_by("for link, speed in links.items():")[2:]
    for (name, speed), line in zip(links.items(), table, strict=True):
        numbers = [f"{1000 * ring_bytes('all_reduce', 10**8, n) / speed:.2f}" for n in (2, 8, 64, 1024)]
        assert line.split() == [*name.split(), *numbers]
    assert ring_bytes("all_reduce", 10**8, 8) == 175e6
    assert "A rank sends 175 MB at 50 GB/s, which takes 3.5 ms." in page()
    moves = 2 * (1024 - 1)
    added, on_nvlink = 1000 * moves * 5e-6, float(table[0].split()[-1])
    assert f"their {moves:,} moves come one after the other and add {added:.2f} ms in every row" in page()
    assert added / on_nvlink > 20


def test_a_group_without_a_timeout_of_its_own_waits_for_half_an_hour() -> None:
    assert (DEFAULT_TIMEOUT, default_pg_timeout.total_seconds()) == (60, 1800)
    assert "our workers give up after 60 seconds, while torch alone would let them wait for half an hour" in page()


# ---- Pictures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 5])
def test_a_ring_reduces_then_gathers_and_every_rank_passes_one_chunk_per_move(n: int) -> None:
    states, everyone = figures.ring_states(n), frozenset(range(n))
    assert len(states) == 2 * (n - 1) + 1
    assert all(sorted(state.passes) == list(range(n)) for state in states[:-1])
    finished = [[chunk for chunk in range(n) if held[chunk] == everyone] for held in states[n - 1].holds]
    assert finished == [[(rank + 1) % n] for rank in range(n)]  # one each, and no two the same
    assert all(chunk == everyone for held in states[-1].holds for chunk in held)
    assert ring_bytes("all_reduce", n * 8, n) == 8 * (len(states) - 1)
