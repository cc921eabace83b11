"""Peaks of planned steps: what the page says of its table, and of an 8B in every layout, against AdamW's."""

import re

import pytest
import stored_pages

from muonbook.ch13.memory_tables import PLANNED, planned_peaks, share_of_matrices
from muonbook.planner.model_shapes import MODELS, local_specs
from muonbook.planner.owned_worlds import plan_part
from muonbook.planner.parts.activations import StageActivations
from muonbook.planner.planned_worlds import BUCKET_RULES
from muonbook.planner.stages import Degrees, stages
from muonbook.planner.world_plan import WorldPlan, WorldSetting

EIGHT, ON_8 = MODELS["llama3_8b"], Degrees(8)
FLAT = "gather all, flat"


def test_what_the_page_says_of_80_gb() -> None:
    """In its own table, which comes out again whenever the page is run."""
    lines = stored_pages.cell_with("13_memory", "done = {").printed.splitlines()[1:]
    cells = {line[:24].strip(): re.findall(r"([\d.]+) \((\d+)\)", line) for line in lines}
    assert list(cells) == ["AdamW", *PLANNED]
    tops = [{layout: float(row[n][0]) for layout, row in cells.items()} for n in range(5)]
    assert [[layout for layout, top in of.items() if top > 80] for of in tops] == [[], [FLAT], [FLAT], [], []]
    for of in tops:
        assert min(of.values()) == of["gather all, per matrix"]
        assert max(of.values()) == of[FLAT]
    on_70b = dict(zip((16, 32, 64, 256), tops[1:], strict=True))
    above = {layout: [dp for dp, of in on_70b.items() if of[layout] > of["AdamW"]] for layout in PLANNED}
    assert above == {
        "gather all, per matrix": [], "gather all, bucketed": [64, 256], FLAT: [16, 32, 64, 256],
        "gather cut": [64, 256],
        "owner": [32, 64, 256],  # padding, of weights and gradients, is more than a moment saves
    }  # fmt: skip
    assert all(tops[0][layout] <= tops[0]["AdamW"] for layout in PLANNED if layout != FLAT)
    assert tops[0]["gather cut"] == tops[0]["AdamW"]
    assert round(tops[-1]["owner"] - tops[-1]["AdamW"]) == 7
    done = {layout: [int(row[n][1]) for n in range(5)] for layout, row in cells.items()}
    assert done["owner"] == [1] * 5
    assert done["gather all, per matrix"] == [8, 128, 256, 512, 2048]
    assert done["gather cut"] == done[FLAT]


def test_the_padding_of_owners_and_what_muon_saves_are_the_last_table_s() -> None:
    model = MODELS["llama3_70b"]
    (stage,), saved, padded = stages(model, 1, 1), [], []
    for dp in (16, 32):
        specs, muon = local_specs(stage.dense, 8)
        buckets = plan_part(specs, muon, dp, 8, BUCKET_RULES["megatron"](dp), "owner").layout.buckets
        padded.append(6 * sum(bucket.padded - bucket.numel for bucket in buckets) / 1e9)
        saved.append(4 * share_of_matrices(model) * model.parameters / dp / 8 / 1e9)
        assert padded[-1] < 0.03 * 6 * sum(bucket.numel for bucket in buckets) / 1e9
    told = "that is {:.1f} GB on 16 DP ranks and {:.1f} GB on 32, where Muon saves {:.1f} and {:.1f} GB"
    assert any(told.format(*padded, *saved) in cell.source for cell in stored_pages.cells("13_memory"))


def test_what_a_layer_of_the_8b_keeps_is_what_the_page_adds_up() -> None:
    (stage,) = stages(EIGHT, 1, 1)
    kept = {size / EIGHT.width for size in StageActivations(EIGHT, stage, ON_8, True, False)._by_layer().values()}
    assert kept == {17} == {4 + 1.5 + 1 + 3 * EIGHT.mlp / EIGHT.width}


def test_bytes_of_buckets_over_tp_are_chapter_12_s() -> None:
    (cell,) = (cell for cell in stored_pages.cells("12_bytes") if cell.printed.startswith("Llama 3 70B, 8 TP ranks"))
    rows = [line.split() for line in cell.printed.splitlines()[2:5]]
    assert [row[0] for row in rows] == ["4", "16", "64"]
    assert [f"{extreme(float(row[1]) for row in rows):.1f}" for extreme in (min, max)] == ["1.9", "2.5"]
    in_bf16 = [1 + 8 / 6 * (extreme(float(row[1]) for row in rows) - 1) for extreme in (min, max)]  # 6 bytes, not 8
    said = "it is 1.9 to 2.5 times as many as AdamW with float32 weights, and with bf16 weights {:.1f} to {:.1f} times"
    assert any(said.format(*in_bf16) in cell.source for cell in stored_pages.cells("13_memory"))


def test_peaks_of_the_8b_are_those_of_the_planner_and_of_what_is_saved() -> None:
    """Where the passes hide both updates; the planner counts AdamW's step counters, too."""
    found = planned_peaks(EIGHT, ON_8)
    adamw, muon = (
        WorldPlan(WorldSetting(EIGHT, ON_8, optimizer, "gather_all", "megatron", recompute=True))
        for optimizer in ("adamw", "muon")
    )
    assert "while stepping" not in {**adamw.held_at_worst, **muon.held_at_worst}
    assert found["AdamW"].highest.top == adamw.fullest[2]
    beyond = {column: found[column].highest.top - adamw.fullest[2] for column in PLANNED}
    assert beyond["gather all, bucketed"] == pytest.approx(muon.fullest[2] - adamw.fullest[2], rel=1e-6)
    saved = found["AdamW"].passes.kept - found["gather all, per matrix"].passes.kept
    assert saved == pytest.approx(4 * share_of_matrices(EIGHT) * EIGHT.parameters / 8, rel=1e-3)  # one moment
    assert beyond["gather all, bucketed"] == pytest.approx(-saved, rel=1e-3)
    assert abs(beyond["gather cut"]) < 0.001 * saved  # embeddings and head, AdamW's, fill one of eight flat shards


def test_where_the_update_is_the_peak_both_peaks_are_its_rank_s() -> None:
    found = planned_peaks(EIGHT, ON_8)
    flat, cut = found[FLAT], found["gather cut"]
    assert flat.highest is flat.update
    assert flat.passes.kept == flat.update.kept < found["AdamW"].passes.kept - 4e9
    assert cut.highest is cut.passes
    assert cut.passes.kept > cut.update.kept  # it holds embeddings, which stay AdamW's


@pytest.mark.parametrize(
    ("model", "degrees", "words"),
    [("llama3_8b", Degrees(4, pp=2), "not of PP 2, EP 1"), ("gpt2", Degrees(4), "GPT-2: AdamW's update may borrow")],
)
def test_where_the_passes_are_not_one_ranks_peak_there_is_no_answer(model: str, degrees: Degrees, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        planned_peaks(MODELS[model], degrees)
