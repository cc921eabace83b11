"""Worlds for tests: worker functions at the top level of a module, and commands whose every trace is looked for.

And what becomes of a test on a machine that lacks what it needs.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pty
import re
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import pytest

from distmuon import launch
from distmuon.launch import World, rank, session
from muonbook import processes

ROOT = Path(__file__).resolve().parents[1]
MARK = "DISTMUON_TEST_MARK"  # an environment variable: whatever a command starts inherits it
PATIENCE = 1500.0  # seconds to wait for something that must come; a slow machine that is busy takes long
DEADLINE = 45.0  # seconds after which nothing may be left: fewer than a forgotten rank waits for its peers


# ---- What not every machine has ---------------------------------------------------------------------------

MUST_HAVE = "DISTMUON_TEST_MUST_HAVE"  # an environment variable: what a machine is known to have, "browser networks"


def without(what: str, why: str) -> NoReturn:
    """Skip a test because `what` is missing; fail it where the machine is known to have that: then it was lost."""
    if what in os.environ.get(MUST_HAVE, "").split():
        pytest.fail(why)
    pytest.skip(why)


# what the fork server of a command imports that makes no optimizer: a third of what all others need, torch._dynamo
WITHOUT_OPTIMIZERS = ["torch", "torch.distributed.device_mesh"]

# ---- Workers ----------------------------------------------------------------------------------------------


def who(world: World, *arguments: Any) -> dict[str, Any]:
    """Return what this rank knows about itself, after one sum over all ranks."""
    import torch
    import torch.distributed as dist

    total = torch.tensor([world.rank])
    if world.size > 1:
        dist.all_reduce(total)
    return {
        "world": world,
        "total": int(total),
        "pid": os.getpid(),
        "parent": os.getppid(),
        "threads": torch.get_num_threads(),
        "temporary": tempfile.gettempdir(),
        "probe": os.environ.get("DISTMUON_TEST_PROBE"),
        "arguments": arguments,
    }


def scheduling(world: World) -> dict[int, int]:
    """Return the scheduling policy of every thread of this rank, by its id, once gloo has made its own."""
    who(world)
    return {int(thread): os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}


def get_ready() -> None:
    """Leave a note of how far this rank has come, for `who`."""
    import torch.distributed as dist

    os.environ["DISTMUON_TEST_PROBE"] = f"joined: {dist.is_initialized()}"


def train_on_a_mesh(world: World) -> tuple[int, float]:
    """Take a step as a program for torch alone would; return the mesh's size, and how far a weight has moved."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from distmuon import DistributedMuon, MuonW

    mesh = init_device_mesh("cpu", (world.dp, world.tp), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Linear(4, 4)
    DistributedMuon(list(torch.nn.Linear(4, 4).parameters())[:1], mesh, lr=0.1)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = MuonW(model, lr=0.1)
    before: Any = model.weight.detach().clone()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    after: Any = model.weight.detach()
    return mesh.size(), (after - before).full_tensor().abs().max().item()


def leave_the_group(world: World) -> int:
    """End as programs for torchrun do."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    return world.rank


def tensor(world: World) -> Any:
    """Return what nobody can read without torch."""
    import torch

    return torch.tensor([world.size])


def report(found: Any, words: str, wrong: Exception | None = None) -> str:
    """Print what `tensor` returned; return where this is, and with how many threads."""
    import torch

    print(words, found.tolist())
    if wrong is not None:
        raise wrong
    return f"{multiprocessing.current_process().name}, {torch.get_num_threads()} threads"


def misbehave(world: World, how: str, culprits: tuple[int, ...]) -> bool:
    """Let the culprits misbehave while the other ranks wait for them in a collective, or compute."""
    import torch
    import torch.distributed as dist

    from distmuon.sharding.grid import Grid

    grid = Grid.of(world)
    guilty = world.rank in culprits
    if guilty and how in ("raise", "raise while others compute"):
        raise ValueError(f"rank {world.rank} has had enough")
    if guilty and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if guilty and how == "fill":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # as if a disk were full
        return True
    if guilty and how == "leave":
        os._exit(0)
    if guilty and how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if guilty and how == "absent":
        oversleep()
    if how == "raise while others compute":
        while True:
            torch.ones(64, 64) @ torch.ones(64, 64)
    if how == "different groups":
        (grid.dp if guilty else grid.tp).all_reduce(torch.ones(3), "never complete")
    if how == "shapes":
        dist.all_reduce(torch.ones(1000 if guilty else 10))
    elif how in ("dp", "tp"):
        if guilty:
            oversleep()
        getattr(grid, how).all_reduce(torch.ones(3), "never complete")
    grid.world.all_reduce(torch.ones(3), "never complete")
    return False  # a result like any other, and not the sign of a missing one


def complain(world: World, culprit: int, words: str) -> None:
    import torch
    import torch.distributed as dist

    if world.rank == culprit:
        raise RuntimeError(words)
    dist.all_reduce(torch.ones(3))


def unpicklable(world: World) -> Any:
    return lambda: None


def orphan(world: World, directory: str) -> None:
    """Let rank 0 kill the process that all ranks were forked from; leave their process ids in `directory`."""
    import torch
    import torch.distributed as dist

    Path(directory, str(os.getpid())).touch()
    dist.barrier()
    if world.rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    while True:
        torch.ones(64, 64) @ torch.ones(64, 64)


def oversleep() -> None:
    time.sleep(1000)


class Unpacks:
    """An argument that does something when the named rank unpacks it, before that rank joins the process group."""

    def __init__(self, rank: int, what: Callable[[], Any]) -> None:
        self.rank, self.what = rank, what

    def __setstate__(self, state: dict[str, Any]) -> None:
        if multiprocessing.current_process().name == f"rank {state['rank']}":
            state["what"]()


def refuse() -> None:
    raise ValueError("cannot be unpacked here")


def double(rank: int, directory: str, value: int) -> tuple[int, bool]:
    """A target for `supervise.run_local` that needs no torch."""
    return rank * value, os.path.isdir(directory)


# ---- What is left behind by worlds of this process --------------------------------------------------------


def assert_worlds_left_nothing() -> None:
    """Assert that every rank of this process's worlds is gone, and every file of theirs; the fork server may stay."""
    assert multiprocessing.active_children() == []
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    assert server is None or eventually(lambda: processes.children(server) == [])
    assert not list(Path(session.directory()).glob("world-*"))


def eventually(condition: Callable[[], object], seconds: float = DEADLINE) -> bool:
    """Wait until `condition()` is true; return whether it became so in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# ---- Commands ---------------------------------------------------------------------------------------------


# what gloo's C++ itself logs, now and then, when a peer is gone while it still connects
GLOO_LOG = re.compile(r"^\[rank\d+\]:\[[EW]\d{4} .*ProcessGroupGloo.*\n", re.MULTILINE)


def _usual_signals() -> None:
    """Undo what a job in the background inherits: there SIGINT is ignored, and Ctrl-C could not be tested."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Ending(NamedTuple):
    """code: exit code, or minus the signal's number. out, err: all that was printed (on a terminal, both are `out`)."""

    code: int
    out: str
    err: str


class Command:
    """A running command, with a temporary directory of its own that was empty at its start."""

    def __init__(
        self, home: Path, arguments: list[str], environment: dict[str, str], terminal: bool, name: str
    ) -> None:
        self.home, self.temporary, self.master = home, home / name, -1
        self.temporary.mkdir()
        self.mark = f"{MARK}={home.name}"
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT / 'tests'}", **environment}
        for name in ("PYTHONWARNINGS", "TORCHINDUCTOR_CACHE_DIR"):
            environment.pop(name, None)
        environment |= {MARK: home.name, "TMPDIR": str(self.temporary)}
        with open(home / "out", "wb") as out, open(home / "err", "wb") as err:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            if terminal:
                self.master, slave = pty.openpty()
                # the first process of a session that opens a terminal gets it as its own: Ctrl-C will find it
                arguments = ["/bin/sh", "-c", 'exec <"$0" >"$0" 2>&1; exec "$@"', os.ttyname(slave), *arguments]
            self.process = subprocess.Popen(
                arguments, env=environment, start_new_session=True, preexec_fn=_usual_signals, **streams
            )
            if terminal:
                os.set_blocking(self.master, False)
                self.slave = slave  # kept until the command has its own, or reading the master would fail

    def printed(self) -> str:
        """Return what the command has printed so far."""
        if self.master >= 0:
            with contextlib.suppress(OSError), open(self.home / "out", "ab") as file:
                while some := os.read(self.master, 65536):
                    file.write(some)
        return (self.home / "out").read_text()

    def wait_for(self, text: str) -> None:
        """Wait until the command has printed `text`."""
        assert eventually(lambda: text in self.printed() or self.process.poll() is not None, PATIENCE)
        assert text in self.printed(), (self.process.poll(), self.printed(), (self.home / "err").read_text())

    def wait_for_fork_server(self) -> None:
        """Wait until the fork server runs; it then needs a second or more to import torch."""
        assert eventually(lambda: any("multiprocessing.forkserver" in line for line in self.running()), PATIENCE)

    def running(self) -> list[str]:
        """Return the command lines of every process that carries the command's mark."""
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in environ.read_bytes().split(b"\0"):
                    found.append(
                        f"{environ.parent.name} " + (environ.parent / "cmdline").read_text().replace("\0", " ")
                    )
        return found

    def interrupt(self, number: int, group: bool = False) -> None:
        """Send a signal to the launching process, or to its whole process group as a terminal does."""
        (os.killpg if group else os.kill)(self.process.pid, number)

    def end(self) -> Ending:
        """Wait for the command to end; assert that soon after it has left no process and no file."""
        code = self.process.wait(PATIENCE)
        assert eventually(lambda: not self.running()), f"still running: {self.running()}"
        assert eventually(lambda: not self.files()), f"still there: {self.files()}"
        err = GLOO_LOG.sub("", (self.home / "err").read_text())
        return Ending(code, self.printed().replace("\r\n", "\n"), err)

    def files(self) -> list[str]:
        """Return what is in the temporary directory, torchrun's own log directory excepted: it never removes that."""
        found = [str(path.relative_to(self.temporary)) for path in self.temporary.rglob("*")]
        return [path for path in found if not path.startswith("torchelastic_")]

    def close(self) -> None:
        """Kill whatever a failed test has left."""
        for line in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
        self.process.wait()
        if self.master >= 0:
            os.close(self.slave)
            os.close(self.master)


@contextlib.contextmanager
def command(*arguments: str, terminal: bool = False, name: str = "t", **environment: str) -> Iterator[Command]:
    """Start `python *arguments`. terminal: on one of its own, as a shell or a notebook would. name: of its TMPDIR."""
    # in /tmp whatever TMPDIR says, because a socket's path may not be long
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp", ignore_cleanup_errors=True) as home:
        running = Command(Path(home), [sys.executable, *arguments], environment, terminal, name)
        try:
            yield running
        finally:
            running.close()


def finish(*arguments: str, name: str = "t", **environment: str) -> Ending:
    """Run `python *arguments` to its end, and assert that it leaves nothing."""
    with command(*arguments, terminal=False, name=name, **environment) as running:
        return running.end()


def answer(script: str, *arguments: str) -> Ending:
    """Run `python script *arguments` in this process, which has imported torch, where the answer takes no ranks.

    That a refusal comes before torch is imported, and leaves nothing, test_launch asserts of `launch.command` for all.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", [script, *arguments]),
        mock.patch("atexit.register"),  # this process does not end with it
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_path(script, run_name="__main__")
    return Ending(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def perform(script: str, *arguments: str) -> Ending:
    """Do what `answer` does where ranks work as well: forked from this process's server, which has imported torch.

    Real commands, from a shell to the last process left, run in test_launch and in every chapter's own test.
    """
    import torch

    threads = torch.get_num_threads()
    with mock.patch.object(launch, "run", _overheard):
        ending = answer(script, *arguments)
    torch.set_num_threads(threads)
    return ending


_run = launch.run


def _overheard(worker: Any, given: Any = (), *, on_rank0_result: Any = None, **options: Any) -> list[Any]:
    """Run ranks as `launch.run` does, and print here what the report prints in a process of its own."""
    if on_rank0_result is None:
        return _run(worker, given, **options)
    (found,) = _run(worker, given, on_rank0_result=(_reported, on_rank0_result), **options)
    said, told = found or ("", None)
    print(said, end="")
    return [told]


def _reported(found: Any, report: Any, more: Any) -> tuple[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        told = rank.load(report)(found, *more)
    return said.getvalue(), told
