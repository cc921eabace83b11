"""What several test files share: worlds and books that are made once per session, and as many threads as a rank has."""

import functools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import built_book
import certificate_workers as workers
import pytest
import set_address
import torch

from distmuon import launch

# a job in the background inherits an ignored SIGINT, and the launcher respects that: Ctrl-C could not be tested
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def witnesses() -> Callable[[int, int], list[workers.Witness]]:
    """Return what every rank of a dp x tp grid hands over; each grid is started once, when first asked for."""

    @functools.cache
    def start(dp: int, tp: int) -> list[workers.Witness]:
        large = (dp, tp) in workers.LARGE_GRIDS
        return launch.run(workers.bear_witness, (workers.TINY if large else workers.RECIPES, not large), dp=dp, tp=tp)

    return start


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute here with as many threads as a rank, or the last bits may differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built book. Any warning fails the build, and so does any look at the network."""
    return built_book.build(built_book.ROOT, tmp_path_factory.mktemp("book"))


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small book with all that a page may hold, built with the settings, extensions and style of the real one."""
    here = set_address.current(built_book.ROOT)
    source = built_book.write_sample(tmp_path_factory.mktemp("sample"), f"{here.owner}/{here.name}")
    return built_book.build(source, tmp_path_factory.mktemp("sample-book"))
