"""What several test files share: books that are built once per session, and as many threads as a rank has.

And how tests are dealt out to processes, where `make test` runs them side by side.
"""

import multiprocessing.process
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import built_book
import chromium
import pytest
import torch
import worlds
from playwright.sync_api import Browser
from xdist.scheduler import LoadScopeScheduling

from muonbook import network_emulation
from tools import run_in_colab, set_address

# a job in the background inherits an ignored SIGINT, and the launcher respects that: Ctrl-C could not be tested
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute here with as many threads as a rank, or the last bits may differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def permitted() -> None:
    """Skip where ranks cannot have networks of their own."""
    if why := network_emulation.why_unavailable():
        worlds.without("networks", why)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built book. Any warning fails the build, and so does any look at the network."""
    return built_book.build(built_book.ROOT, tmp_path_factory.mktemp("book"))


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small book with all that a page may hold, built with the settings, extensions and style of the real one."""
    link = set_address.current(built_book.ROOT).colab("notebooks/07_virtual_map.ipynb", branch="published")
    source = built_book.write_sample(tmp_path_factory.mktemp("sample"), link)
    return built_book.build(source, tmp_path_factory.mktemp("sample-book"))


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a repository that holds the working tree as it stands."""
    return run_in_colab.publish(tmp_path_factory.mktemp("published")).as_uri()


@pytest.fixture(scope="module")  # no longer: while it runs, so does an event loop, and kernels want one of their own
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    if request.config.getoption("quick"):
        pytest.skip(NOT_QUICK)  # here, for Playwright does not end if it is stopped in the middle of its start
    with chromium.started() as started:
        yield started


# ---- Only what is quick -----------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="skip every test as soon as it starts a process")


NOT_QUICK = "it starts a process, so it is not among the quick ones"
STARTS = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Let whatever would start a process skip its test, so that nobody has to say which tests do."""
    if not item.config.getoption("quick"):
        return (yield)

    def skip_instead(*_: Any, **__: Any) -> None:
        item.stash[STARTS] = True
        pytest.skip(NOT_QUICK)

    with (
        mock.patch.object(subprocess.Popen, "__init__", skip_instead),
        mock.patch.object(multiprocessing.process.BaseProcess, "start", skip_instead),
    ):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    """Count a test as skipped also where something that it calls has taken the skip for a failure."""
    report = yield
    if STARTS in item.stash and report.failed:
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1], NOT_QUICK)
    return report


# ---- Side by side -----------------------------------------------------------------------------------------

TOGETHER = {
    "test_browser": "test_book",
    "test_certificate": "test_prediction",
}  # they look at the same books, and worlds
APART = (  # these take long and share nothing
    "test_a_chapter_prints_in_colab_what_it_shows",
    "test_a_drill_on_machines_ends_as_it_is_stored",
)
FIRST = (  # a long one dealt last is alone
    "test_notebooks",
    "test_browser",
    "test_book",
    "test_drills",
    "test_examples",
    "test_puzzles",
    "test_machines",
    "test_baselines",
    "test_certificate",
    "test_prediction",
    "test_train",
    "test_checkpoint",
    "test_main_job",
    "test_muonw",
    "test_several_matrices",
    "test_distributed_muon",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the files that take longest begin, so that all processes end at about the same time."""
    items.sort(key=lambda item: item.path.stem not in FIRST)


class ByFile(LoadScopeScheduling):
    """Deals out tests to processes file by file, because a file's tests share worlds, which are then made once."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        return nodeid if test.startswith(APART) else TOGETHER.get(Path(file).stem, Path(file).stem)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one process more than cores, for drills and timeouts wait without computing; but one per 2.6 GB of memory.

    That is what a world of 32 ranks takes at 80 MB each; with two cores and 8 GB there are three.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min((os.cpu_count() or 1) + 1, memory // 2_600_000_000))
