"""Words that readers stumbled over stay away from the pages, and from what workers print on them."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "book").glob("*.md"), ROOT / "README.md"])

# What is not to be said -> what to say. Patterns, in any case of letters.
RETIRED = {
    r"by the yard": "in equal shards, without regard to matrices",
    r"freight": "the bytes that a rank receives",
    r"to the bit": "bit for bit",
    r"likewise": "the same way, or also",
    r"hence": "so",
    r"in the mean": "on average",
    r"by turns": "in turn",
    r"some (?:twenty|thirty|forty|fifty|eighty|ninety)": "about eighty",
    r"dear (?:beside|for)": "expensive",
    r"sat down": "tested",
    r"nobody knows who": "no rank knows which",
    r"overheard": "observed",
    r"walks? (?:from|to) (?:TP|DP)": "depends on the batch",
    r"(?:say|says|said|told|tells) (?:it )?aloud": "say it in a sentence",
}
CODE = re.compile(r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|https?://\S+", re.DOTALL)


def _read(page: Path) -> str:
    """Return what people read on a page: its prose, and in a chapter what was printed and the words under pictures."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".md":
        return CODE.sub("", text)
    found = []
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "markdown":
            found.append(CODE.sub("", "".join(cell["source"])))
        for output in cell.get("outputs", []):
            printed = output.get("text") or output.get("data", {}).get("text/plain", "")
            found.append("".join(printed))
    return "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_word_that_was_retired(page: Path) -> None:
    text = _read(page)
    faults = [
        f"{match[0]!r} in {text[max(0, match.start() - 40) : match.end() + 30]!r}: say {instead}"
        for retired, instead in RETIRED.items()
        for match in re.finditer(rf"\b{retired}(?!\w)", text, re.IGNORECASE)
    ]
    assert not faults, "\n".join(faults)


def test_a_retired_word_is_found_in_prose_and_in_what_is_printed(tmp_path: Path) -> None:
    code = {"cell_type": "code", "source": ["likewise = 1"]}
    page = tmp_path / "page.ipynb"
    for prose, printed in (("The same, to the bit.", "3 MB"), ("The same bits.", "Freight: 3 MB")):
        cells = [{"cell_type": "markdown", "source": [prose]}, code | {"outputs": [{"text": [printed]}]}]
        page.write_text(json.dumps({"cells": cells}), encoding="utf-8")
        with pytest.raises(AssertionError, match="'to the bit'" if "MB" in printed[:4] else "'Freight'"):
            test_no_word_that_was_retired(page)
    cells = [{"cell_type": "markdown", "source": ["The same bits, and `to the bit` in code."]}, code]
    page.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    test_no_word_that_was_retired(page)
