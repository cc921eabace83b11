"""What another process writes to its error stream, heard in a notebook: the end of its traceback, and ours.

A new process writes to file descriptor 2, which a notebook's `sys.stderr` does not see. Of a traceback, file names are
left out, and how a module without a file is described: they differ between machines and between Pythons.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator

LAST = 2  # lines of the other process's traceback: where it stood, and why it ended


@contextlib.contextmanager
def last_words() -> Iterator[None]:
    """Catch the exception that the block raises, and print it after the last lines of the other process's traceback."""
    heard = ""
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        ours = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        except Exception as error:
            heard = f"{type(error).__name__}: {error}"
        finally:
            os.dup2(ours, 2)
            os.close(ours)
        file.seek(0)
        said = traceback_lines(file.read())
    print("in the new process:")
    print("\n".join(f"    {line}" for line in said[-LAST:]))
    print("in this notebook:")
    print(f"    {heard.strip() or 'no error'}")


def traceback_lines(text: str) -> list[str]:
    """Return a traceback's lines without those that name a file, mark a column, or are empty."""
    kept = [line.strip() for line in text.splitlines() if not re.match(r"\s*(File \".*|[\^~ ]*)$", line)]
    return [re.sub(r"(<module '\w+') \(.*\)>", r"\1>", line) for line in kept]
