"""Point every link of this repository at its public address: `make address URL=https://github.com/me/muon-at-scale`.

The address stands in one place, `repository.url` of _config.yml. It has to be repeated where nothing can look it up:
in the README's clone command and badges, in CITATION.cff, on pages of the book and in the first cell of notebooks,
which Colab opens without the rest of the clone. This file rewrites all of them together; test_project.py holds them
equal. Standard library only, so it runs before anything is installed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "_config.yml"
PLACES = (CONFIG, "README.md", "CITATION.cff", "book/**/*.md", "notebooks/**/*.ipynb")

ADDRESS = re.compile(r"https://github\.com/([A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)/([\w.-]+?)(?:\.git)?/?", re.ASCII)
IN_CONFIG = re.compile(r"^repository:\n(?:[ \t]+.*\n)*?[ \t]+url:[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE)


class Repository(NamedTuple):
    """A repository on GitHub."""

    owner: str
    name: str

    @property
    def url(self) -> str:
        return f"https://github.com/{self.owner}/{self.name}"

    @property
    def pages(self) -> str:
        """Return where GitHub Pages publishes the book, without the scheme."""
        return f"{self.owner}.github.io/{self.name}"

    @property
    def patterns(self) -> dict[re.Pattern[str], str]:
        """Return what this address looks like in a file, each with the template that writes another one there.

        GitHub itself (https or ssh), raw files, Colab's /github/ and Binder's /gh/ spell it owner/name; Pages does not.
        """
        owner, name, end = re.escape(self.owner), re.escape(self.name), r"(?![\w-]|\.(?!git\b)\w)"
        hosts = r"(github\.com[/:]|raw\.githubusercontent\.com/|/github/|/gh/)"
        return {
            re.compile(rf"{hosts}{owner}/{name}{end}"): r"\g<1>{owner}/{name}",
            re.compile(rf"(//){owner}\.github\.io/{name}{end}", re.IGNORECASE): r"\g<1>{owner}.github.io/{name}",
        }


def parse(url: str) -> Repository:
    """Read an address such as https://github.com/me/muon-at-scale. Raises ValueError with one sentence."""
    match = ADDRESS.fullmatch(url)
    if match is None or match[2] in {".", ".."}:
        raise ValueError(f"the address must look like https://github.com/me/muon-at-scale, got {url!r}.")
    return Repository(match[1], match[2])


def current(root: Path) -> Repository:
    """Return the address that _config.yml holds."""
    match = IN_CONFIG.search((root / CONFIG).read_text(encoding="utf-8"))
    if match is None:
        raise ValueError(f"{CONFIG} has no repository.url.")
    return parse(match[1])


def places(root: Path) -> list[Path]:
    """Return the files that may repeat the address."""
    return sorted(path for place in PLACES for path in root.glob(place) if ".ipynb_checkpoints" not in path.parts)


def rewrite(text: str, old: Repository, new: Repository) -> tuple[str, int]:
    """Return `text` with every link to `old` pointing at `new`, and how many there were."""
    count = 0
    for pattern, template in old.patterns.items():
        text, found = pattern.subn(template.format(owner=new.owner, name=new.name), text)
        count += found
    return text, count


def set_address(root: Path, url: str) -> list[str]:
    """Rewrite every copy below `root`; return one line per file that changed."""
    old, new = current(root), parse(url)
    if old == new:
        return []
    changed = []
    for path in places(root):
        with path.open(encoding="utf-8", newline="") as file:  # newline="": keep line ends as they are
            text, count = rewrite(file.read(), old, new)
        if count:
            with path.open("w", encoding="utf-8", newline="") as file:
                file.write(text)
            changed.append(f"{path.relative_to(root)}: {count}")
    return changed


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Do what the command line says; return the exit code."""
    try:
        changed = set_address(root, " ".join(sys.argv[1:] if arguments is None else arguments))
    except ValueError as error:
        print(f"set_address: {error}", file=sys.stderr)
        return 2
    print("\n".join(changed) or "Every link points there already.")
    return 0
