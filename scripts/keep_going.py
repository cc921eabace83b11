"""Run a training again and again until it has finished: the loop around torchrun, one on every machine.

A rank dies, an agent dies, a machine goes away, a link is cut: sooner or later torchrun ends with an error on every
machine, and somebody must start it again. This does, until the command ends well. The training must by itself begin
from its newest checkpoint, as train.py does.

It stops for good at a mistake in the arguments (exit code 2, of the command or of a rank that torchrun reports), after
--tries failures without a new checkpoint, and on SIGTERM or Ctrl-C: the command gets SIGTERM, and time to save. No
process of the command outlives it, and before another start whatever the last one has left is killed (on Linux; macOS
does not tell whose child an orphan was).

python scripts/keep_going.py --progress out/run -- torchrun --standalone --nproc-per-node 4 scripts/train.py
python scripts/keep_going.py --until out/run/step-200 -- torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 0 ...
"""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path

from distmuon import launch
from muonbook import processes

MISTAKE = 2  # the exit code of a wrong argument, everywhere: the next start would be told the same
POLL = 0.2  # seconds


# ---- What torchrun says of its ranks ----------------------------------------------------------------------


class Report:
    """The command's errors, passed on line by line, and what they say of ranks: torchrun itself always exits with 1."""

    RANK = re.compile(rb"^\s*rank\s*:\s*(\d+) \(local_rank")
    CODE = re.compile(rb"^\s*exitcode\s*:\s*(-?\d+)\b")
    ERROR = re.compile(rb"^\[rank(\d+)\]: (\w[\w.]*(?:Error|Exception)\b.*)")

    def __init__(self):
        self.rank, self.ended, self.errors = None, [], {}

    def read(self, stream):
        for line in stream:
            if found := self.RANK.match(line):
                self.rank = int(found[1])
            elif found := self.CODE.match(line):
                self.ended.append((self.rank, int(found[1])))
            elif found := self.ERROR.match(line):
                self.errors[int(found[1])] = found[2].decode(errors="replace")
            with suppress(OSError):
                sys.stderr.buffer.write(line)
                sys.stderr.flush()

    def refused(self):
        return any(code == MISTAKE for _, code in self.ended)

    def cause(self):
        """Return in a few words what torchrun takes for the cause, which it names last; None if it said nothing."""
        if not self.ended:
            return None
        rank, code = self.ended[-1]
        error = textwrap.shorten(self.errors.get(rank, ""), 120, placeholder=" …")
        return f"rank {rank} {ending(code)}" + (f" ({error})" if error else "")


def ending(code):
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


# ---- One start --------------------------------------------------------------------------------------------


def begin(command):
    """Start the command, which ends with this process, and gets no Ctrl-C but through it."""
    try:
        return subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: processes.end_with_parent(signal.SIGTERM),
        )
    except OSError as error:
        raise launch.UsageError(f"{command[0]}: cannot be started ({error.strerror}); name a program.") from error


def run(arguments, say):
    """Run the command to its end; return its exit code and what it reported."""
    report = Report()
    try:
        child = begin(arguments.command)
        reader = threading.Thread(target=report.read, args=(child.stderr,), daemon=True)
        reader.start()
        wait(child, arguments.linger, say)
    except BaseException:  # a signal may come before Popen has returned: the command is what runs, not what we know
        ask_to_end(arguments.grace)
        raise
    finally:
        kill_what_is_left()
    reader.join()
    return child.returncode, report


def wait(child, linger, say):
    """Wait until the command has ended; kill it where it stays on after its ranks.

    torchrun waits up to 30 s for a rank that is stopped, and minutes for agents of machines that are gone.
    """
    seen: set[int] = set()
    since = None
    while child.poll() is None:
        ranks = set(processes.children(child.pid))
        if ranks - seen:  # the first ones, or others in their place
            seen, since = ranks, None
        elif ranks != seen:
            since = since or time.monotonic()
            if time.monotonic() - since > linger:
                say(f"a process of the command has ended, the command not within {linger:g} s more: killed.")
                child.kill()
                child.wait()
        time.sleep(POLL)


def ask_to_end(grace):
    """Ask the command to save and end, and give it `grace` seconds."""
    for pid in processes.children(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + grace
    while processes.children(os.getpid()) and time.monotonic() < end:
        time.sleep(0.05)


def kill_what_is_left():
    """Kill the command, if it runs yet, and whatever it has left behind."""
    while left := processes.descendants(os.getpid()):  # orphans too: on Linux they have become our children
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


# ---- Again and again --------------------------------------------------------------------------------------


def keep_going(arguments):
    """Start the command until it has finished; return the exit code."""
    name = arguments.name or socket.gethostname()

    def say(words):
        print(f"[{name}] {words}", file=sys.stderr, flush=True)

    processes.adopt_orphans()
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # or ranks started again meet dead ones' addresses
    failures, seen = 0, checkpoints(arguments.progress)
    while not finished(arguments.until):
        code, report = run(arguments, say)
        if code == 0 or finished(arguments.until):
            break
        if code == MISTAKE or report.refused():
            say("the command was refused (exit code 2); starting it again would change nothing.")
            return MISTAKE
        now = checkpoints(arguments.progress)
        failures, seen = 1 if now - seen else failures + 1, seen | now
        cause = report.cause() or f"the command {ending(code)}"
        if failures >= arguments.tries:
            say(f"{cause}; tries without a new checkpoint: {failures} of {arguments.tries}. Given up.")
            return 1
        say(f"{cause}; starting again.")
        time.sleep(arguments.pause)
    return 0


def finished(until):
    return until is not None and Path(until).exists()


def checkpoints(folder):
    """Return the names of the checkpoints in a folder: not of what is being written there, nor of what was refused."""
    found = Path(folder).iterdir() if folder is not None and Path(folder).is_dir() else ()
    return {path.name for path in found if not path.name.startswith((".", "refused-"))}


def parse():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("command", nargs="+", metavar="COMMAND", help="what to run, after --, with its own arguments")
    add("--until", metavar="PATH", help="what exists once training has finished: then nothing is started any more")
    add("--progress", metavar="FOLDER", help="where checkpoints appear: a new one sets the count of failures back")
    add("--tries", type=int, default=5, metavar="N", help="give up after N failures in a row (default: %(default)s)")
    add("--pause", type=float, default=1, metavar="SECONDS", help="before another start (default: %(default)g)")
    add(
        "--linger",
        type=float,
        default=60,
        metavar="SECONDS",
        help="how long the command may go on after one of its ranks has ended (default: %(default)g)",
    )
    add(
        "--grace",
        type=float,
        default=60,
        metavar="SECONDS",
        help="how long it has to save after SIGTERM, before it is killed (default: %(default)g)",
    )
    add("--name", help="what messages call this machine (default: its host name)")
    return parser.parse_args()


def check_paths(arguments):
    """Raise UsageError for what would be taken for a finished training, or never show a checkpoint."""
    for option, path in (("--until", arguments.until), ("--progress", arguments.progress)):
        if path == "":  # a variable of the shell that is not set: it would be this folder, which is always there
            raise launch.UsageError(f"{option} '': an empty path; name one, or leave it out.")
    if arguments.progress is not None and Path(arguments.progress).is_file():
        raise launch.UsageError(f"--progress {arguments.progress}: that is a file; name the folder of checkpoints.")


def main():
    arguments = parse()
    launch.check_range(arguments, tries=(1, 1_000_000), pause=(0, 3600), linger=(1, 86_400), grace=(0, 86_400))
    check_paths(arguments)
    return keep_going(arguments)


if __name__ == "__main__":
    launch.command(main)
