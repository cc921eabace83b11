"""The loop around torchrun: again until it has finished, no further where that is no use, and nothing is left."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
import worlds

KEEP_GOING = str(worlds.ROOT / "scripts" / "keep_going.py")
linux = pytest.mark.skipif(sys.platform != "linux", reason="orphans are followed on Linux")


def run(*words: str, shell: str) -> worlds.Ending:
    return worlds.finish(KEEP_GOING, "--name", "here", "--pause", "0", *words, "--", "sh", "-c", shell)


def test_it_starts_the_command_again_until_it_has_finished(tmp_path: Path) -> None:
    ending = run(shell=f"echo x >> {tmp_path}/starts; test $(wc -l < {tmp_path}/starts) = 3")
    assert ending.code == 0
    assert ending.err == "[here] the command ended with exit code 1; starting again.\n" * 2


def test_it_gives_up_after_failures_without_a_checkpoint_and_at_once_after_a_mistake_in_the_arguments() -> None:
    ending = run("--tries", "3", shell="kill -9 $$")
    assert ending.code == 1
    *again, last = ending.err.splitlines()
    assert again == ["[here] the command was killed by SIGKILL; starting again."] * 2
    assert last == "[here] the command was killed by SIGKILL; tries without a new checkpoint: 3 of 3. Given up."
    refused = "[here] the command was refused (exit code 2); starting it again would change nothing.\n"
    assert run(shell="exit 2") == (2, "", refused)


def test_a_new_checkpoint_sets_the_count_back_and_no_unfinished_or_refused_one_nor_one_saved_again(
    tmp_path: Path,
) -> None:
    starts, saved = tmp_path / "starts", tmp_path / "run"
    shell = f"echo x >> {starts}; n=$(wc -l < {starts}); mkdir {saved}/.unfinished-$n; "
    shell += f"mv {saved}/step-9 {saved}/refused-step-9-$n || mkdir {saved}/step-9; "
    shell += f"test $n -gt 3 || mkdir {saved}/step-$n; exit 1"
    (saved / "step-9").mkdir(parents=True)
    assert run("--tries", "2", "--progress", str(saved), shell=shell).code == 1
    assert len(starts.read_text().splitlines()) == 4  # the third, with a checkpoint, counts as the first


def test_it_understands_torchruns_report_of_ranks_that_were_refused() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    train = str(worlds.ROOT / "scripts" / "train.py")
    ending = worlds.finish(KEEP_GOING, "--name", "here", "--", *torchrun, train, "--lr", "nan", OMP_NUM_THREADS="1")
    assert ending.code == 2
    assert ending.err.count("error: --lr nan: must be from") == 1
    assert ending.err.endswith(
        "[here] the command was refused (exit code 2); starting it again would change nothing.\n"
    )


def test_it_says_which_rank_torchrun_takes_for_the_cause(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\ntime.sleep(1000)\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ending = worlds.finish(KEEP_GOING, "--name", "here", "--tries", "1", "--", *torchrun, str(program))
    assert ending.code == 1
    assert "[here] rank 1 was killed by SIGKILL; tries without a new checkpoint: 1 of 1. Given up.\n" in ending.err


def test_what_has_finished_is_not_started(tmp_path: Path) -> None:
    (tmp_path / "step-10").touch()
    assert run("--until", str(tmp_path / "step-10"), shell=f"touch {tmp_path}/started").code == 0
    assert not (tmp_path / "started").exists()
    ending = run("--until", str(tmp_path / "done"), shell=f"touch {tmp_path}/done; exit 1")
    assert (ending.code, ending.err) == (0, "")


@linux
def test_no_orphan_outlives_a_start() -> None:
    code = "import os, subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True); os.kill(os.getpid(), 9)"
    ending = worlds.finish(KEEP_GOING, "--tries", "2", "--pause", "0", "--", sys.executable, "-c", code)
    assert ending.code == 1  # and `finish` has found nothing that still runs


@linux
def test_a_command_that_stays_on_after_its_ranks_is_killed() -> None:
    code = "import subprocess, time; subprocess.Popen(['sleep', '1.5']).wait(); time.sleep(1000)"
    words = ["--name", "here", "--linger", "1", "--tries", "1"]
    ending = worlds.finish(KEEP_GOING, *words, "--", sys.executable, "-c", code)
    assert ending.code == 1
    assert ending.err.splitlines() == [
        "[here] a process of the command has ended, the command not within 1 s more: killed.",
        "[here] the command was killed by SIGKILL; tries without a new checkpoint: 1 of 1. Given up.",
    ]


def test_a_command_that_will_not_stop_is_killed(tmp_path: Path) -> None:
    shell = "trap '' TERM; echo ready; while true; do sleep 0.1; done"
    with worlds.command(KEEP_GOING, "--grace", "0.5", "--", "sh", "-c", shell) as running:
        running.wait_for("ready")
        running.interrupt(signal.SIGTERM)
        assert running.end().code == 143


def test_a_signal_while_the_command_is_being_started_leaves_nothing() -> None:
    program = """
import subprocess, sys
import keep_going
from distmuon import launch

class Interrupted(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        raise KeyboardInterrupt

subprocess.Popen = Interrupted
sys.argv[1:] = ["--grace", "0.5", "--", "sh", "-c", "trap '' TERM; while true; do sleep 0.1; done"]
launch.command(keep_going.main)
"""
    assert worlds.finish("-c", program).code == 130


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), pytest.param(signal.SIGKILL, -9, marks=linux)]
)
def test_asked_to_stop_or_killed_it_lets_the_command_save(tmp_path: Path, number: int, code: int) -> None:
    shell = f"trap 'touch {tmp_path}/saved; exit 0' TERM; echo ready; while true; do sleep 0.1; done"
    with worlds.command(KEEP_GOING, "--", "sh", "-c", shell) as running:
        running.wait_for("ready")
        running.interrupt(number)
        assert running.end().code == code
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "error: the following arguments are required: COMMAND; see --help."),
        (["--", "/no/such/program"], "error: /no/such/program: cannot be started (No such file or directory); name a"),
        (["--tries", "0", "--", "true"], "error: --tries 0: must be from 1 to 1,000,000."),
        (["--linger", "nan", "--", "true"], "error: --linger nan: must be from 1 to 86,400."),
        (["--until", "", "--", "true"], "error: --until '': an empty path; name one, or leave it out."),
        (["--progress", "", "--", "true"], "error: --progress '': an empty path; name one, or leave it out."),
        (["--progress", __file__, "--", "true"], f"error: --progress {__file__}: that is a file; name the folder of"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(words: list[str], says: str) -> None:
    ending = worlds.finish(KEEP_GOING, *words)
    assert (ending.code, ending.out) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", ending.err)
    assert says in ending.err
