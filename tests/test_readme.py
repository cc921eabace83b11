"""The README: what it shows of `make demo` is what the demo prints, and the files it names exist."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\w*\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
DIFFERENCE = re.compile(r"\de-\d\d")  # the last digits depend on the processor, and the README says so


def test_the_page_in_the_readme_is_what_the_demo_prints():
    command = [sys.executable, str(ROOT / "scripts" / "10_dp_tp.py"), "--dp", "4", "--tp", "2"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (shown,) = (block for block in BLOCKS if block.startswith("Grid:"))
    page = [DIFFERENCE.sub("?", line.rstrip()) for line in printed.splitlines()]
    for line in filter(None, shown.splitlines()):
        assert DIFFERENCE.sub("?", line.rstrip()) in page


def test_every_module_is_on_the_readme_map():
    (tree,) = (block for block in BLOCKS if block.startswith("scripts/"))
    for path in (ROOT / "scripts" / "distmuon").glob("[!_]*.py"):
        assert re.search(rf"\b{path.stem}\b", tree), f"{path.name} is missing from the README's map of folders"
    for path in (ROOT / "scripts").glob("[!_]*.py"):
        assert path.name in tree, path.name
