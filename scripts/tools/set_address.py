"""Point every link of this repository at its public address: `make address URL=https://github.com/me/muon-at-scale`.

The address stands in one place, `repository.url` of _config.yml. It has to be repeated where nothing can look it up:
in the README's clone command and badges, in CITATION.cff, on pages of the book and in the first cell of notebooks,
which Colab opens without the rest of the clone. This file rewrites all of them together; test_project.py holds them
equal. Standard library only, so it runs before anything is installed.

A repository may also lie on Hugging Face, as a model, a dataset or a Space. All three are Git, Colab opens notebooks
from there, and files have links of the same form. What GitHub does besides is missing: nothing tests a change, and
nothing builds or publishes the book.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "_config.yml"
PLACES = (
    CONFIG,
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CITATION.cff",
    "pyproject.toml",
    ".github/**/*.yml",
    ".github/**/*.md",
    "book/**/*.md",
    "notebooks/**/*.ipynb",
)

# Stands where the owner's name will be. Nobody can register it, or a reader's machine would run that stranger's code:
# GitHub allows letters, digits and hyphens, and in the name of a company's member one underscore between two words.
PLACEHOLDER = "_OWNER_"
BRANCH = "main"  # to which links lead, and which the first cell of notebooks fetches

GITHUB = "https://github.com/"
HUGGING_FACE = "https://huggingface.co/"
OWNER, NAME = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?", r"([\w.-]+?)(?:\.git)?/?"
ADDRESS = re.compile(rf"({GITHUB})({OWNER}|{PLACEHOLDER})/{NAME}", re.ASCII)
ELSEWHERE = re.compile(rf"({HUGGING_FACE}(?:spaces/|datasets/|(?!spaces/|datasets/)))([\w.-]*\w)/{NAME}", re.ASCII)
IN_CONFIG = re.compile(r"^repository:\n(?:[ \t]+.*\n)*?[ \t]+url:[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE)

ABOUT_HUGGING_FACE = (
    "Hugging Face runs no workflow: test with `make test`, build the book with `make book`, put _build/html where you "
    "publish it, and name that place in _config.yml as html.baseurl. Colab opens the notebooks from Hugging Face."
)


class Repository(NamedTuple):
    """A repository. host: all of its address that precedes owner/name."""

    owner: str
    name: str
    host: str = GITHUB

    @property
    def url(self) -> str:
        return f"{self.host}{self.owner}/{self.name}"

    @property
    def pages(self) -> str | None:
        """Return where GitHub Pages publishes the book, without the scheme; None on Hugging Face."""
        return f"{self.owner}.github.io/{self.name}" if self.host == GITHUB else None

    def colab(self, notebook: str, branch: str = BRANCH) -> str:
        """Return the link that opens a notebook of this repository in Colab. notebook: its path from the root."""
        return f"{self.forms['colab']}/blob/{branch}/{notebook}"

    @property
    def forms(self) -> dict[str, str]:
        """Return what kind of link -> how links of this kind to this repository begin, as far as what all have alike.

        The longer of two that fit stands first.
        """
        place = f"{self.owner}/{self.name}"
        if self.host == GITHUB:
            return {
                "colab": f"https://colab.research.google.com/github/{place}",
                "raw": f"raw.githubusercontent.com/{place}",
                "ssh": f"git@github.com:{place}",
                "pages": f"//{self.pages}",
                "page": f"github.com/{place}",
            }
        below = self.url.removeprefix(HUGGING_FACE)
        return {
            "colab": f"https://colab.research.google.com/#fileId=https%3A//huggingface.co/{below}",
            "raw": f"huggingface.co/{below}/resolve",
            "ssh": f"git@hf.co:{below}",
            "page": f"huggingface.co/{below}",
        }


NOWHERE = Repository(PLACEHOLDER, "muon-at-scale")  # what links point at until there is an address


def parse(url: str) -> Repository:
    """Read an address such as https://github.com/me/muon-at-scale. Raises ValueError with one sentence."""
    match = ADDRESS.fullmatch(url) or ELSEWHERE.fullmatch(url)
    if match is None or match[3] in {".", ".."}:
        raise ValueError(
            "the address must look like https://github.com/me/muon-at-scale, or on Hugging Face like "
            f"https://huggingface.co/spaces/me/muon-at-scale (or datasets/me/..., or me/... for a model), got {url!r}."
        )
    return Repository(match[2], match[3], match[1])


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
    """Return `text` with every link to `old` pointing at `new`, and how many there were.

    Where `new` has no published pages, links to those of `old` lead to the repository.
    """
    there = {"pages": new.url.removeprefix("https:"), **new.forms}
    instead = {form.lower(): there[kind] for kind, form in old.forms.items()}
    end = r"(?![\w-]|\.(?!git\b)\w)"  # of the name: neither a longer one, nor one that goes on after a point
    links = re.compile(f"(?:{'|'.join(map(re.escape, old.forms.values()))}){end}", re.IGNORECASE)
    return links.subn(lambda found: instead[found[0].lower()], text)


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
    if current(root).host != GITHUB:
        print(ABOUT_HUGGING_FACE)
    return 0
