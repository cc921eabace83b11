"""A download is resumed where it broke off, checked by its SHA-256, and kept whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distmuon.launch.arguments import UsageError
from muonbook.ch04 import download

ROOT = Path(__file__).resolve().parents[3]
CONTENT = bytes(range(256)) * 1024  # 256 KiB: more than one piece
SHA256 = hashlib.sha256(CONTENT).hexdigest()
CLOSED = "http://127.0.0.1:9/data.bin"  # nobody listens there


class Handler(http.server.BaseHTTPRequestHandler):
    """Sends the server's content, or as much of it as the server is told to, and notes what it sent."""

    server: Server

    def do_GET(self) -> None:
        server, start = self.server, 0
        asked = self.headers["Range"]
        server.asked.append(asked)
        if server.status != 200:
            self.send_error(server.status)
            return
        if asked and server.ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(server.content):
                self.send_error(416)
                return
            self.send_response(206)
            first = start + server.shift
            self.send_header("Content-Range", f"bytes {first}-{len(server.content) - 1}/{len(server.content)}")
        else:
            self.send_response(200)
        body = server.content[start:]
        if server.says_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        sent = body[: server.cuts.pop(0)] if server.cuts else body
        server.sent.append(len(sent))
        self.wfile.write(sent)
        self.wfile.flush()
        if len(sent) < len(body) and server.stalls is not None:
            server.stalls.wait()

    def log_message(self, *_: Any) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    """One file at http://127.0.0.1:PORT/data.bin.

    cuts: bytes after which each of the next answers breaks off. stalls: if set, it goes silent there instead of closing
    the connection. shift: by how much the part that comes is misplaced.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.status, self.ranges, self.says_length, self.shift = CONTENT, 200, True, True, 0
        self.cuts: list[int] = []
        self.asked: list[str | None] = []
        self.sent: list[int] = []
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


def part_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def left(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir())


def leave(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


@pytest.mark.parametrize("size", [None, len(CONTENT)])
def test_a_file_comes_once_whole_and_alone(server: Server, path: Path, size: int | None, capfd: Any) -> None:
    assert download.fetch(server.address, path, SHA256, size) is True
    assert path.read_bytes() == CONTENT
    assert left(path) == ["data.bin"]
    assert download.fetch(server.address, path, SHA256, size) is False
    assert server.asked == [None]
    assert tuple(capfd.readouterr()) == ("", "")  # no terminal, no progress bar


def test_a_progress_bar_shows_on_a_terminal_and_begins_where_the_draft_ends(
    server: Server, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    leave(part_of(path), CONTENT[: len(CONTENT) // 2])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    download.fetch(server.address, path, SHA256)
    shown = capsys.readouterr().err
    assert "data.bin:" in shown
    assert " 50%" in shown
    assert "  0%" not in shown


def test_a_cut_connection_is_resumed_where_it_broke_off(server: Server, path: Path) -> None:
    server.cuts = [1000, 70_000]
    download.fetch(server.address, path, SHA256)
    assert path.read_bytes() == CONTENT
    assert server.asked == [None, "bytes=1000-", "bytes=71000-"]
    assert server.sent == [1000, 70_000, len(CONTENT) - 71_000]  # no byte was sent twice


def test_the_next_call_goes_on_where_the_last_one_ended(server: Server, path: Path) -> None:
    server.cuts = [1000, 0]
    with pytest.raises(UsageError, match=r"data.bin did not come .*broke off after 1,000 of 262,144 bytes"):
        download.fetch(server.address, path, SHA256)
    assert left(path) == ["data.bin.part"]
    download.fetch(server.address, path, SHA256)
    assert server.asked == [None, "bytes=1000-", "bytes=1000-"]
    assert sum(server.sent) == len(CONTENT)
    assert left(path) == ["data.bin"]


def test_a_silent_server_is_left_and_what_it_sent_is_kept(
    server: Server, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "LIMIT", 0.3)
    server.stalls, server.cuts = threading.Event(), [1000]
    download.fetch(server.address, path, SHA256)
    assert server.asked == [None, "bytes=1000-"]
    assert path.read_bytes() == CONTENT


def test_a_server_that_cuts_every_answer_is_given_up(server: Server, path: Path) -> None:
    server.cuts = [10] * 9
    with pytest.raises(UsageError, match="broke off after 30 of"):
        download.fetch(server.address, path, SHA256)
    assert len(server.asked) == download.TRIES
    assert part_of(path).read_bytes() == CONTENT[:30]


def test_a_server_without_range_starts_again(server: Server, path: Path) -> None:
    server.ranges, server.cuts = False, [1000]
    download.fetch(server.address, path, SHA256)
    assert path.read_bytes() == CONTENT
    assert server.sent == [1000, len(CONTENT)]


@pytest.mark.parametrize("size", [None, len(CONTENT)])
def test_wrong_bytes_are_never_kept(server: Server, path: Path, size: int | None) -> None:
    server.content = CONTENT[::-1]
    with pytest.raises(UsageError, match=r"262,144 bytes that are not the file known.*put the file at .* by hand\.$"):
        download.fetch(server.address, path, SHA256, size)
    assert left(path) == []
    assert len(server.asked) == 1


def test_another_length_is_refused_before_a_byte_of_it_is_kept(server: Server, mirror: Server, path: Path) -> None:
    leave(part_of(path), CONTENT[:1000])
    server.content, server.ranges = b"<html>please log in</html>", False
    download.fetch([server.address, mirror.address], path, SHA256, len(CONTENT))
    assert mirror.asked == ["bytes=1000-"]  # what was there had been kept
    server.says_length = False
    server.content = CONTENT + b"more"
    with pytest.raises(UsageError, match="more than 262,144 bytes came"):
        download.fetch(server.address, path.with_name("second"), SHA256, len(CONTENT))
    assert left(path) == ["data.bin"]


@pytest.mark.parametrize("size", [None, len(CONTENT)])
@pytest.mark.parametrize("draft", [b"x" * 1000, b"x" * len(CONTENT), CONTENT + b"more"], ids=["short", "full", "long"])
def test_a_damaged_draft_is_fetched_again_from_the_start(
    server: Server, path: Path, draft: bytes, size: int | None
) -> None:
    leave(part_of(path), draft)
    download.fetch(server.address, path, SHA256, size)
    assert path.read_bytes() == CONTENT
    assert server.asked[-1] is None
    assert left(path) == ["data.bin"]


def test_a_finished_draft_needs_no_network(path: Path) -> None:
    leave(part_of(path), CONTENT)
    assert download.fetch(CLOSED, path, SHA256)
    assert left(path) == ["data.bin"]


def test_a_part_from_elsewhere_is_refused(server: Server, path: Path) -> None:
    leave(part_of(path), CONTENT[:1000])
    server.shift = 5
    with pytest.raises(UsageError, match="another part came than the one asked for"):
        download.fetch(server.address, path, SHA256)
    assert part_of(path).read_bytes() == CONTENT[:1000]


def test_an_altered_file_is_named_and_fetched_again(server: Server, path: Path, capsys: Any) -> None:
    leave(path, CONTENT[:1000])
    with pytest.raises(UsageError, match="did not come"):
        download.fetch(CLOSED, path, SHA256)
    assert path.read_bytes() == CONTENT[:1000]  # the old one is not touched before the new one is whole
    assert download.fetch(server.address, path, SHA256)
    assert path.read_bytes() == CONTENT
    assert capsys.readouterr().out.count("data.bin: here, but not the file known (its SHA-256 differs)") == 2


def test_mirrors_are_tried_in_order(server: Server, mirror: Server, path: Path) -> None:
    server.status = 404
    download.fetch([CLOSED, server.address, mirror.address], path, SHA256)
    assert (server.asked, mirror.asked) == ([None], [None])
    assert path.read_bytes() == CONTENT


def test_a_mirror_goes_on_where_another_broke_off(server: Server, mirror: Server, path: Path) -> None:
    server.cuts = [1000, 0]
    download.fetch([server.address, mirror.address], path, SHA256)
    assert mirror.asked == ["bytes=1000-"]
    assert path.read_bytes() == CONTENT


def test_when_nothing_comes_one_sentence_names_every_address_and_the_remedy(server: Server, path: Path) -> None:
    server.status = 404
    with pytest.raises(UsageError) as raised:
        download.fetch([server.address, CLOSED, "nonsense"], path, SHA256)
    said = str(raised.value)
    assert said.startswith(f"data.bin did not come ({server.address}: HTTP 404 ")
    assert f"; {CLOSED}: [Errno " in said
    assert said.endswith(f"; try again, or put the file at {path} by hand.")
    assert "\n" not in said
    with pytest.raises(UsageError, match=r"\); ask your library\.$"):
        download.fetch(CLOSED, path, SHA256, remedy="ask your library")
    assert left(path) == []


def test_without_resume_nothing_is_left_and_nothing_old_is_used(server: Server, path: Path) -> None:
    leave(part_of(path), CONTENT[:500])
    server.cuts = [1000]
    with pytest.raises(UsageError, match="broke off after 1,000"):
        download.fetch(server.address, path, SHA256, resume=False)
    assert (server.asked, left(path)) == ([None], [])


def test_a_place_that_cannot_be_written_is_not_the_networks_fault(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UsageError, match=r"cannot be written"):
        download.fetch(server.address, tmp_path / "file" / "data.bin", SHA256)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=r"folder cannot be written"):
        download.fetch(server.address, tmp_path / "folder", SHA256)


def test_a_second_process_keeps_its_hands_off(server: Server, path: Path) -> None:
    """Another process has the draft open and locked, as in the middle of its download."""
    leave(part_of(path), CONTENT[:1000])
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from muonbook.ch04 import download
        with download._alone(Path(sys.argv[1]), True):
            print("locked", flush=True)
            sys.stdin.read()
    """)
    line = [sys.executable, "-c", code, str(part_of(path))]
    with subprocess.Popen(
        line, cwd=ROOT / "scripts", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(UsageError, match=r"\.part is being written by another process"):
            download.fetch(server.address, path, SHA256)
        other.communicate(timeout=60)
    assert part_of(path).read_bytes() == CONTENT[:1000]
    download.fetch(server.address, path, SHA256)
    assert server.asked == ["bytes=1000-"]


def test_a_draft_that_another_process_finished_a_moment_ago_is_let_alone(path: Path) -> None:
    part = part_of(path)
    leave(part, CONTENT)
    with part.open("a+b") as draft:
        part.rename(path)
        assert not download._locked(draft, part)
        leave(part, b"a third process's")
        assert not download._locked(draft, part)
