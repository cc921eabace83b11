"""A download is checked by its SHA-256, kept whole or not at all, and asked of the next mirror when one fails."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distmuon.launch.cli import UsageError
from muonbook import download

CONTENT = bytes(range(256)) * 1024  # 256 KiB: more than one piece
SHA256 = hashlib.sha256(CONTENT).hexdigest()
CLOSED = "http://127.0.0.1:9/data.bin"  # nobody listens there


class Handler(http.server.BaseHTTPRequestHandler):
    """Sends the server's content, or as much of it as the server is told to."""

    server: Server

    def do_GET(self) -> None:
        server = self.server
        server.asked += 1
        if server.status != 200:
            self.send_error(server.status)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(server.content)))
        self.end_headers()
        self.wfile.write(server.content[: server.cut])
        self.wfile.flush()
        if server.stalls is not None:
            server.stalls.wait()

    def log_message(self, *_: Any) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    """One file at http://127.0.0.1:PORT/data.bin. cut: bytes after which it ends. stalls: it goes silent there."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.status, self.asked = CONTENT, 200, 0
        self.cut: int | None = None
        self.stalls: threading.Event | None = None
        self.address = f"http://127.0.0.1:{self.server_port}/data.bin"


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    with Server() as one:
        threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield one
        if one.stalls is not None:
            one.stalls.set()
        one.shutdown()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving() as one:
        yield one


@pytest.fixture
def mirror(server: Server) -> Iterator[Server]:
    with serving() as one:
        yield one


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "data.bin"


def left(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir())


def leave(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


def test_a_file_comes_once_whole_and_alone(server: Server, path: Path, capfd: Any) -> None:
    assert download.fetch([server.address], path, SHA256) is True
    assert path.read_bytes() == CONTENT
    assert left(path) == ["data.bin"]
    assert download.fetch([server.address], path, SHA256) is False
    assert server.asked == 1
    assert tuple(capfd.readouterr()) == ("", "")  # no terminal, no progress bar


def test_a_cut_connection_leaves_nothing(server: Server, path: Path) -> None:
    server.cut = 1000
    with pytest.raises(UsageError, match=r"data.bin did not come"):
        download.fetch([server.address], path, SHA256)
    assert left(path) == []


def test_mirrors_are_tried_in_order_and_a_silent_server_is_left(
    server: Server, mirror: Server, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "LIMIT", 0.3)
    server.stalls, server.cut = threading.Event(), 1000
    download.fetch([CLOSED, server.address, mirror.address, CLOSED], path, SHA256)
    assert (server.asked, mirror.asked) == (1, 1)
    assert path.read_bytes() == CONTENT
    assert left(path) == ["data.bin"]
    assert socket.getdefaulttimeout() is None


def test_wrong_bytes_are_never_kept(server: Server, path: Path) -> None:
    server.content = CONTENT[::-1]
    with pytest.raises(UsageError, match=r"is not the file known, its SHA-256.*put the file at .* by hand\.$"):
        download.fetch([server.address], path, SHA256)
    assert left(path) == []
    assert server.asked == 1


def test_an_altered_file_is_named_and_fetched_again(server: Server, path: Path, capsys: Any) -> None:
    leave(path, CONTENT[:1000])
    with pytest.raises(UsageError, match="did not come"):
        download.fetch([CLOSED], path, SHA256)
    assert path.read_bytes() == CONTENT[:1000]  # the old one is not touched before the new one is whole
    assert download.fetch([server.address], path, SHA256)
    assert path.read_bytes() == CONTENT
    assert capsys.readouterr().out.count("data.bin: here, but not the file known (its SHA-256 differs)") == 2


def test_when_nothing_comes_one_sentence_names_every_address_and_the_remedy(server: Server, path: Path) -> None:
    server.status = 404
    with pytest.raises(UsageError) as raised:
        download.fetch([server.address, CLOSED, "nonsense"], path, SHA256)
    said = str(raised.value)
    assert said.startswith(f"data.bin did not come ({server.address}: HTTP 404 ")
    assert f"; {CLOSED}: [Errno " in said
    assert said.endswith(f"; try again, or put the file at {path} by hand.")
    assert "\n" not in said
    assert left(path) == []
