"""Words that readers stumbled over stay away from the pages; those that they bring along are on the page of names."""

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
    page = tmp_path / "page.ipynb"

    def write(prose: str, printed: str) -> None:
        code = {"cell_type": "code", "source": ["likewise = 1"], "outputs": [{"text": [printed]}]}
        page.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": [prose]}, code]}), encoding="utf-8")

    write("The same, to the bit.", "3 MB")
    with pytest.raises(AssertionError, match="'to the bit'"):
        test_no_word_that_was_retired(page)
    write("The same bits.", "Freight: 3 MB")
    with pytest.raises(AssertionError, match="'Freight'"):
        test_no_word_that_was_retired(page)
    write("The same bits, and `to the bit` in code.", "3 MB")
    test_no_word_that_was_retired(page)


# what a reader of the originals types; each leads to a page, and the names of other code to the page of names
TYPED = """
    dist_group; tp_group; tensor_model_parallel; partition_dim; param_to_bucket; zeropower_via_newtonschulz5;
    _zeropower_via_newtonschulz; all_gather_into_tensor; reduce_scatter_tensor; MuonW; MuonWithAuxAdam; use_muon;
    MoE; mixture of experts; mixture-of-experts; PolarExpress; Polar Express; polar_express; bucket; buffer; shard;
    dist_meta; dist_metas; MuonDistMeta; global buffer; global_buffer_sizes; virtual map; virtual buffer; ns_steps;
    backend_steps; ns_coefficients; matched_adamw_rms; match_rms_adamw; matched adamw rms; adjust_lr_fn;
    normalize_range; enable_distributed_mode; buffer_idx; bucket_idx; muon_buffer; momentum_buffer; coalesced;
    distributed optimizer; fully_shard; FSDP2; reshard_after_forward; DeviceMesh; tp_split_dim; owned;
    LayerWiseDistributedOptimizer; muon_tp_mode; duplicated; blockwise; distributed_mesh; dion; DeepSpeed;
    reduce_bucket_size; expert parallelism; pipeline parallelism; context parallelism; aisles; pallets;
    Turtle Speed; No-BS glossary; MomentUm Orthogonalized by Newton-Schulz; gbuf; pad_batch; HSDP
"""


def test_whatever_a_reader_of_the_originals_types_is_on_the_page_of_names() -> None:
    page = (ROOT / "book" / "names.md").read_text(encoding="utf-8").lower()
    queries = " ".join(TYPED.split()).split("; ")
    assert [query for query in queries if not all(word.lower() in page for word in re.findall(r"\w+", query))] == []
