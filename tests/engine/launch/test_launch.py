"""Launching: the same worker under three starts, results and output in rank order, surroundings left as they were."""

import argparse
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from helpers_math import message

from distmuon import launch
from distmuon.launch import UsageError, World, rank, session, supervise

linux = pytest.mark.skipif(sys.platform != "linux", reason="ranks are spawned here, not forked from a server")
FAULTY = str(Path(__file__).with_name("faulty_worker.py"))


# ---- Local worlds -----------------------------------------------------------------------------------------


@linux
def test_worlds_of_one_process_share_a_fork_server_and_return_results_in_rank_order(monkeypatch) -> None:
    first = launch.run(worlds.who, ("a", 1), dp=2, tp=2, timeout=300, threads=2)
    assert [found["world"].rank for found in first] == [0, 1, 2, 3]
    assert [found["total"] for found in first] == [6, 6, 6, 6]
    assert len({found["pid"] for found in first} | {os.getpid()}) == 5
    assert all(found["arguments"] == ("a", 1) for found in first)
    assert all(found["threads"] == 2 for found in first)
    expected = World(0, 4, 2, 2, "gloo", "cpu", 300, 2, first[0]["world"].started)
    assert first[0]["world"] == expected

    monkeypatch.setenv("DISTMUON_TEST_PROBE", "set after the fork server had started")
    second = launch.run(worlds.who, dp=1, tp=2)
    assert [found["world"].rank for found in second] == [0, 1]
    assert {found["parent"] for found in second} == {found["parent"] for found in first} != {os.getpid()}
    assert {found["probe"] for found in second} == {"set after the fork server had started"}
    assert {found["threads"] for found in second} == {1}
    worlds.assert_worlds_left_nothing()


def test_every_rank_does_what_it_is_told_before_it_joins() -> None:
    assert [found["probe"] for found in launch.run(worlds.who, dp=2, before_joining=worlds.get_ready)] == [
        "joined: False"
    ] * 2


@linux
def test_a_local_rank_and_the_threads_of_gloo_take_turns_with_other_ranks() -> None:
    for policies in launch.run(worlds.scheduling, dp=2):
        interrupting = [thread for thread, policy in policies.items() if policy != os.SCHED_BATCH]
        assert len(interrupting) == 1  # waits for the launcher's end
        assert len(policies) > 2  # gloo's threads are among those that take turns
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_world_of_one_runs_in_this_process_and_leaves_it_as_it_was() -> None:
    threads, before = torch.get_num_threads(), dict(os.environ)
    (found,) = launch.run(worlds.who, (lambda: "not picklable, and need not be",), threads=threads + 1)
    assert found["pid"] == os.getpid()
    assert (found["total"], found["world"].size, found["threads"]) == (0, 1, threads + 1)
    assert found["temporary"] == session.directory() != tempfile.gettempdir()
    assert torch.get_num_threads() == threads
    assert not torch.distributed.is_initialized()
    assert dict(os.environ) == before
    worlds.assert_worlds_left_nothing()


@pytest.mark.parametrize("spoiled", [False, True])
def test_a_local_world_leaves_environment_and_signal_handlers_as_they_were(monkeypatch, spoiled: bool) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    environment, handlers = dict(os.environ), [signal.getsignal(number) for number in session.STOPPING]
    if spoiled:
        with pytest.raises(supervise.WorldError):
            launch.run(worlds.misbehave, ("raise", (1,)), dp=2)
    else:
        (found, _) = launch.run(worlds.who, dp=2)
        assert found["temporary"] == session.directory()
    assert dict(os.environ) == environment
    assert tempfile.tempdir is None
    assert [signal.getsignal(number) for number in session.STOPPING] == handlers


def test_started_is_when_the_command_started_not_when_its_world_did() -> None:
    before = time.time()
    (found,) = launch.run(worlds.who)
    assert found["world"].started < before - 0.1  # pytest itself has taken longer than that
    assert found["world"].started == pytest.approx(session.process_start(), abs=0.05)
    assert launch.seconds_since(before) == pytest.approx(time.time() - before, abs=1)
    assert launch.seconds_since(found["world"].started) > launch.seconds_since(before)


def test_spawn_works_too_with_and_without_torch(monkeypatch) -> None:
    assert supervise.run_local(worlds.double, (21,), 2, "spawn", 60) == [(0, True), (21, True)]
    world = World(0, 2, 2, 1, "gloo", "cpu", 60, 1, 0.0)
    found = supervise.run_local(rank.run_local, (world, pickle.dumps((worlds.who, ()))), 2, "spawn", 60)
    assert [one["total"] for one in found] == [1, 1]
    assert [one["parent"] for one in found] == [os.getpid()] * 2
    worlds.assert_worlds_left_nothing()


def test_a_temporary_directory_whose_path_is_too_long_for_a_socket_is_no_obstacle() -> None:
    run = "supervise.run_local(worlds.double, (21,), 2, 'forkserver', 9)"
    ending = worlds.finish("-c", f"from distmuon.launch import supervise; import worlds; print({run})", name="t" * 80)
    assert ending == (0, "[(0, True), (21, True)]\n", "")


def test_a_program_without_a_guard_is_told_in_one_sentence_what_to_add(tmp_path: Path) -> None:
    code = "from distmuon import launch\ndef work(world): ...\nprint(launch.run(work, dp=2))\n"
    (tmp_path / "mine.py").write_text(code)
    assert worlds.finish(str(tmp_path / "mine.py")) == (
        2,
        "",
        "error: mine.py calls launch.run whenever it is imported, and every rank imports it; put the call, and "
        'whatever else only the command is to do, under `if __name__ == "__main__":`.\n',
    )


@pytest.mark.parametrize("dp", [1, 2])
def test_one_rank_has_a_process_group_as_two_have(dp: int) -> None:
    before = dict(os.environ)
    found = launch.run(worlds.train_on_a_mesh, dp=dp)
    assert [size for size, _ in found] == [dp] * dp
    assert all(moved > 0 for _, moved in found)
    assert launch.run(worlds.leave_the_group, dp=dp) == list(range(dp))  # a worker may leave it by itself
    assert not torch.distributed.is_initialized()
    assert dict(os.environ) == before


def test_a_world_of_one_takes_the_process_group_that_its_program_has() -> None:
    with session.environment(session.directory(), GLOO_SOCKET_IFNAME=rank.LOOPBACK):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            assert launch.run(worlds.train_on_a_mesh)[0][0] == 1
            assert torch.distributed.is_initialized()
        finally:
            torch.distributed.destroy_process_group()


# ---- The command line and torchrun ------------------------------------------------------------------------

GREETINGS = "rank 0 of 4\nrank 1 of 4\nrank 2 of 4\nrank 3 of 4\n"


def test_a_worker_prints_in_rank_order_whatever_its_file_is_called(tmp_path: Path) -> None:
    worker = str(shutil.copy(FAULTY, tmp_path / "07_no_module_name.py"))
    ending = worlds.finish(worker, "greet", "--dp", "2", "--tp", "2")
    answers = "".join(f"Answer(rank={number}, total=6)\n" for number in range(4))
    assert ending == (0, f"hello from one rank\n{GREETINGS}{answers}", "")


def test_torchrun_starts_the_same_worker_with_the_same_results() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    ending = worlds.finish(*torchrun, FAULTY, "greet", "--dp", "2", "--tp", "2", OMP_NUM_THREADS="1")
    assert ending.code == 0, ending.err
    assert ending.out.startswith(f"hello from one rank\n{GREETINGS}")
    assert all(f"Answer(rank={number}, total=6)" in ending.out for number in range(4))  # each printed by its rank
    # where no name server answers, torch's own store says that it does not know what its client is called
    said = [line for line in ending.err.splitlines() if "hostname of the client socket cannot be retrieved" not in line]
    assert said == []


def test_the_shared_arguments_have_defaults_and_reach_run(monkeypatch) -> None:
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser, dp=4, tp=2)
    assert launch.options(parser.parse_args([])) == {
        "dp": 4,
        "tp": 2,
        "backend": "gloo",
        "device": None,
        "timeout": 60.0,
        "threads": 1,
    }
    given = parser.parse_args(["--dp=1", "--tp=1", "--backend=auto", "--device=cpu", "--timeout=2.5", "--threads=3"])
    (found,) = launch.run(worlds.who, **launch.options(given))
    assert found["world"] == World(0, 1, 1, 1, "gloo", "cpu", 2.5, 3, found["world"].started)


# ---- Wrong arguments: one sentence, exit code 2, nothing started ------------------------------------------


@pytest.fixture
def nothing_starts(monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something was started")

    for module, name in ((supervise, "run_local"), (session, "directory"), (rank, "run")):
        monkeypatch.setattr(module, name, refuse)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("gpus", "options", "says"),
    [
        (0, {"dp": 0}, "--dp 0 --tp 1: both must be at least 1."),
        (0, {"dp": 2, "tp": -1}, "--dp 2 --tp -1: both must be at least 1."),
        (0, {"timeout": 0.0}, "--timeout 0 --threads 1: both must be positive."),
        (0, {"timeout": float("nan")}, "--timeout nan --threads 1: both must be positive."),
        (0, {"timeout": float("inf")}, "--timeout inf: a collective waits 1,000,000,000 seconds at most."),
        (0, {"timeout": 1e20}, "--timeout 1e+20: a collective waits 1,000,000,000 seconds at most."),
        (0, {"threads": 0}, "--timeout 60 --threads 0: both must be positive."),
        (0, {"threads": 10**11}, "--threads 100000000000: a rank gets at most 1024; choose about one per core."),
        (0, {"dp": 10**6}, "--dp 1000000 --tp 1: one machine gets at most 256 ranks; choose fewer, or start them on"),
        (0, {"backend": "mpi"}, "--backend mpi is unknown; choose one of gloo, nccl, auto."),
        (0, {"device": "tpu"}, "--device tpu is unknown; choose one of cpu, cuda."),
        (0, {"backend": "nccl"}, "--backend nccl on GPUs needs CUDA, and torch sees no GPU here; use --backend gloo."),
        (0, {"device": "cuda"}, "--backend gloo on GPUs needs CUDA, and torch sees no GPU here; leave out --device"),
        (
            2,
            {"backend": "nccl", "dp": 3},
            "nccl needs one GPU per rank: 3 ranks, 2 GPU(s); use fewer ranks or --backend gloo.",
        ),
        (
            2,
            {"backend": "nccl", "dp": 2, "device": "cpu"},
            "--backend nccl runs on GPUs only; drop --device cpu or use --backend gloo.",
        ),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_starts_nothing(monkeypatch, gpus: int, options: dict, says: str) -> None:
    shown(monkeypatch, gpus)
    with pytest.raises(UsageError) as error:
        launch.run(worlds.who, **options)
    assert says in message(error)


def shown(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """Let torch see as many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


@pytest.fixture
def as_one_of_four(monkeypatch) -> None:
    """Stand where somebody has started four ranks, of which this process is the last."""
    for name in ("LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("as_one_of_four")
@pytest.mark.parametrize("backend", ["nccl", "auto"])
@pytest.mark.parametrize(
    ("gpus", "surroundings", "fits"),
    [
        (4, {"LOCAL_WORLD_SIZE": "4"}, True),
        (2, {"LOCAL_WORLD_SIZE": "4"}, False),
        (1, {"LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "3"}, True),  # SLURM: each task is shown its own
        (2, {"LOCAL_RANK": "1"}, True),  # srun: two on each of two machines, and nobody says how many are here
        (2, {"LOCAL_RANK": "2"}, False),
    ],
)
def test_a_rank_among_others_needs_a_gpu_that_no_other_rank_uses(
    monkeypatch, backend: str, gpus: int, surroundings: dict, fits: bool
) -> None:
    shown(monkeypatch, gpus)
    monkeypatch.setattr(rank, "run", lambda world, *_: world)
    for name, value in surroundings.items():
        monkeypatch.setenv(name, value)
    if backend == "nccl" and not fits:
        with pytest.raises(UsageError, match="nccl needs one GPU per rank"):
            launch.run(worlds.who, dp=4, backend=backend)
    else:
        (world,) = launch.run(worlds.who, dp=4, backend=backend)
        assert (world.backend, world.device) == (("nccl", "cuda") if fits else ("gloo", "cpu"))


@pytest.mark.usefixtures("nothing_starts")
def test_processes_that_srun_started_and_that_do_not_know_their_rank_are_told_what_to_export(monkeypatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(UsageError) as error:
        launch.run(worlds.who, dp=4)
    assert message(error) == (
        "srun started 4 processes that do not know their rank; let it start one torchrun per node, or export "
        "RANK=$SLURM_PROCID, WORLD_SIZE=$SLURM_NTASKS, LOCAL_RANK=$SLURM_LOCALID, MASTER_ADDR and MASTER_PORT in each."
    )


@pytest.mark.usefixtures("as_one_of_four")
def test_srun_may_start_ranks_that_know_their_place_and_a_batch_script_a_local_world(monkeypatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setattr(rank, "run", lambda world, *_: world)
    monkeypatch.setattr(supervise, "run_local", lambda target, given, *_: [given[0]])
    with monkeypatch.context() as step:
        step.setenv("SLURM_STEP_NUM_TASKS", "4")
        assert launch.run(worlds.who, dp=4)[0].rank == 3
    monkeypatch.delenv("RANK")  # in a batch script SLURM_NTASKS and SLURM_PROCID are set, too, but there is no step
    assert launch.run(worlds.who, dp=4)[0].size == 4


@linux
@pytest.mark.parametrize(
    ("options", "becomes"),
    [
        ({"dp": 2, "backend": "auto"}, ("nccl", "cuda", "spawn")),
        ({"dp": 4, "backend": "auto"}, ("gloo", "cpu", "forkserver")),
        ({"dp": 2, "backend": "auto", "device": "cpu"}, ("gloo", "cpu", "forkserver")),
        ({"dp": 4, "backend": "gloo", "device": "cuda"}, ("gloo", "cuda", "spawn")),
    ],
)
def test_backend_device_and_start_method_follow_from_the_gpus(monkeypatch, options: dict, becomes: tuple) -> None:
    shown(monkeypatch, 2)
    monkeypatch.setattr(supervise, "run_local", lambda target, given, size, start, *_: [given[0], start])
    world, start = launch.run(worlds.who, **options)
    assert (world.backend, world.device, start) == becomes


@pytest.mark.parametrize(("gpus", "mine"), [(8, 5), (1, 0)])  # a node's GPUs, and one that a scheduler gave this rank
@pytest.mark.parametrize(("backend", "told"), [("nccl", True), ("gloo", False)])
def test_a_rank_takes_its_gpu_and_tells_nccl(monkeypatch, gpus: int, mine: int, backend: str, told: bool) -> None:
    class Joined(Exception):
        pass

    def join(*given: Any, **options: Any) -> None:
        raise Joined(*given, options.get("device_id"), options["timeout"].total_seconds())

    chosen: list[torch.device] = []
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # as some containers have it
    try:
        with pytest.raises(Joined) as joined:
            rank.run(World(5, 8, 8, 1, backend, "cuda", 9.0, threads, 0.0), None, worlds.who, ())
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(precision)
    assert chosen == [torch.device("cuda", mine)]
    assert joined.value.args == (backend, chosen[0] if told else None, 9.0)


def test_a_single_rank_on_a_gpu_leaves_the_precision_of_products_as_it_was(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        world = World(0, 1, 1, 1, "gloo", "cuda", 9.0, torch.get_num_threads(), 0.0)
        assert rank.run_alone(world, lambda world: torch.get_float32_matmul_precision(), ()) == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("nothing_starts")
def test_a_worker_that_no_other_process_can_find_is_refused(monkeypatch) -> None:
    def local(world: World) -> None: ...

    with pytest.raises(UsageError, match="cannot be sent to other processes") as error:
        launch.run(local, dp=2)
    assert "use a function at the top level of a module" in message(error)
    with pytest.raises(UsageError, match="who and its arguments cannot be sent"):
        launch.run(worlds.who, (lambda: None,), dp=2)
    with pytest.raises(UsageError, match=r"<lambda> and its arguments cannot be sent"):
        launch.run(worlds.who, dp=2, before_joining=lambda: None)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # as in a notebook
    monkeypatch.setattr(worlds.who, "__module__", "__main__")
    with pytest.raises(UsageError, match="who was defined in a notebook cell"):
        launch.run(worlds.who, dp=2)


def test_a_parser_describes_a_worker_and_shows_its_commands() -> None:
    parser = launch.parser("What it does,\nin two lines.\n\npython one.py --dp 2\ntorchrun one.py\n\nAnd why.\n")
    assert parser.description == "What it does, in two lines.\n\nAnd why."
    assert parser.format_help().endswith("\n\nexamples:\n  python one.py --dp 2\n  torchrun one.py\n")
    assert launch.parser(None).epilog is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--nonesuch"], "unrecognized arguments: --nonesuch; see --help."),
        (["--dp", "two"], "argument --dp: invalid int value: 'two'; see --help."),
        (["--thread=2"], "unrecognized arguments: --thread=2; see --help."),
    ],
)
def test_what_argparse_refuses_is_one_sentence_too(given: list[str], says: str, capsys) -> None:
    parser = launch.parser("A worker.")
    launch.add_arguments(parser, dp=2, tp=1)
    with pytest.raises(UsageError) as error:
        parser.parse_args(given)
    assert message(error) == says
    assert capsys.readouterr() == ("", "")


def test_a_file_that_can_be_written_is_left_as_it_was_or_not_made_yet(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("kept")
    for path in (None, str(tmp_path / "old"), str(tmp_path / "new"), str(tmp_path / "some/new/folders/run.json")):
        launch.check_writable("--json", path)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "kept"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("", "--json {0}/: that is a folder; name a file in it."),
        ("file/x.json", "--json {0}/file/x.json: cannot be written (Not a directory); name a file in a folder that"),
        ("n" * 300, "cannot be written (File name too long); name a file"),
        ("read-only/x.json", "cannot be written (Read-only file system); name a file"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch, path: str, says: str) -> None:
    def refuse(dir: Path) -> None:  # as a read-only disk does; permission bits do not stop the root user
        assert dir == tmp_path
        raise OSError(30, "Read-only file system")

    (tmp_path / "file").touch()
    if path.startswith("read-only"):
        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(UsageError) as error:
        launch.check_writable("--json", f"{tmp_path}/{path}")
    assert says.format(tmp_path) in message(error)


@pytest.mark.parametrize(("rank", "is_main_process"), [(None, True), ("0", True), ("3", False)])
def test_under_torchrun_rank_0_alone_speaks(monkeypatch, rank: str | None, is_main_process: bool) -> None:
    monkeypatch.setenv("RANK", "5")  # alone it means nothing: other schedulers set it too
    if rank is not None:
        for name, value in {"RANK": rank, "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
    assert launch.is_main_process() == is_main_process
    assert launch.under_torchrun() == (rank is not None)


@pytest.mark.parametrize("wrong", [["--dp", "0"], ["--dp", "two"]])
def test_a_command_with_a_wrong_argument_answers_without_importing_torch(wrong: list[str]) -> None:
    ending = worlds.finish(FAULTY, "imports", *wrong)
    assert ending.code == 2
    assert ending.err.count("error: ") == 1
    assert "Traceback" not in ending.err
    assert ending.out == ("" if wrong[1] == "two" else "torch imported: False\n")


def test_a_worker_may_be_named_and_is_then_imported_by_the_ranks_alone() -> None:
    code = "import sys; from distmuon import launch; {} ; print([r['total'] for r in found], 'torch' in sys.modules)"
    found = worlds.finish("-c", code.format("found = launch.run('worlds:who', dp=2)"))
    assert found == (0, "[1, 1] False\n", "")


@pytest.mark.parametrize("name", ["worlds", "worlds:", "no_such_module:who", "..:x"])
def test_a_name_that_leads_nowhere_is_refused_before_anything_starts(name: str) -> None:
    with pytest.raises(UsageError) as error:
        launch.run(name)
    assert message(error) == f"worker is {name!r}; give a function, or the name of one, 'package.module:function'."


# ---- What is made of a result -----------------------------------------------------------------------------


@linux
def test_what_is_made_of_local_ranks_results_is_made_in_a_process_that_has_torch() -> None:
    code = "import sys; from distmuon import launch; "
    code += "found = launch.run('worlds:tensor', dp=2, threads=2, on_rank0_result=('worlds:report', ('ranks:',))); "
    code += "print(found, 'torch' in sys.modules)"
    assert worlds.finish("-c", code) == (0, "ranks: [2]\n['rank 0, 2 threads'] False\n", "")


def test_what_is_made_of_one_ranks_result_is_made_here(one_thread, capsys) -> None:
    assert launch.run(worlds.tensor, on_rank0_result=(worlds.report, ("alone:",))) == ["MainProcess, 1 threads"]
    assert capsys.readouterr().out == "alone: [1]\n"


def test_its_error_is_raised_here_as_a_sentence_for_the_reader_or_with_its_traceback() -> None:
    for wrong in (UsageError("choose another."), launch.OutputError("the disk is full.")):
        with pytest.raises(type(wrong), match=f"^{wrong}$"):
            launch.run(worlds.tensor, dp=2, on_rank0_result=(worlds.report, ("ranks:", wrong)))
    with pytest.raises(launch.WorldError, match=r"(?s)in report\n.*KeyError: 'lost'$"):
        launch.run(worlds.tensor, dp=2, on_rank0_result=(worlds.report, ("ranks:", KeyError("lost"))))
    worlds.assert_worlds_left_nothing()
