"""Peaks of planned steps: of two published models in every layout, against AdamW's."""

import pytest
import stored_pages

from muonbook.ch13.memory_tables import PLANNED, _weighed, planned_peaks, repeats, share_of_matrices
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.parts.activations import StageActivations
from muonbook.planner.stages import Degrees, stages
from muonbook.planner.world_plan import WorldPlan, WorldSetting

LLAMAS = {"8B": (MODELS["llama3_8b"], Degrees(8)), "70B": (MODELS["llama3_70b"], Degrees(128, 8))}


def beyond(model: str, degrees: Degrees) -> dict[str, float]:
    """Return {column of PLANNED: bytes by which Muon's peak is higher than AdamW's}."""
    found = planned_peaks(MODELS[model], degrees)
    return {column: found[column].highest.top - found["AdamW"].highest.top for column in PLANNED}


def test_what_the_page_says_of_80_gb() -> None:
    places = [("llama3_8b", Degrees(8)), *(("llama3_70b", Degrees(dp, 8)) for dp in (16, 32, 64, 256))]
    worlds = [planned_peaks(MODELS[model], degrees) for model, degrees in places]
    tops = [{layout: peaks.highest.top / 1e9 for layout, peaks in of.items()} for of in worlds]
    flat = ["gather all, flat"]
    assert [[layout for layout, top in of.items() if top > 80] for of in tops] == [[], flat, flat, [], []]
    assert all(min(of.values()) == of["gather all, per matrix"] for of in tops)
    assert all(max(of, key=lambda layout: of[layout]) == "gather all, flat" for of in tops)
    for of in tops[:2]:
        assert all(top < of["AdamW"] + 0.05 for layout, top in of.items() if layout != "gather all, flat")
    assert round(tops[-1]["owner"] - tops[-1]["AdamW"]) == 7
    many = worlds[-1]
    owner, whole = many["owner"].passes.kept, many["gather all, per matrix"].passes.kept
    assert owner - many["AdamW"].passes.kept > 6e9 > many["AdamW"].passes.kept - whole > 0  # padding, and what is saved


def test_newton_schulz_is_done_once_by_owners_and_by_every_rank_where_matrices_have_buckets_of_their_own() -> None:
    for name, dp, tp in (("llama3_8b", 8, 1), ("llama3_70b", 16, 8)):
        done = repeats(MODELS[name], Degrees(dp, tp))
        assert (done["owner"], done["gather all, per matrix"]) == (1, dp * tp)
        assert tp < done["gather cut"] < 2 * tp < done["gather all, bucketed"] < dp * tp
        assert done["gather all, flat"] == done["gather cut"]


def test_where_the_update_is_the_peak_both_peaks_are_its_rank_s() -> None:
    found = planned_peaks(*LLAMAS["8B"])
    assert found["gather all, flat"].highest is found["gather all, flat"].update
    assert (
        found["gather all, flat"].passes.kept
        == found["gather all, flat"].update.kept
        < found["AdamW"].passes.kept - 4e9
    )
    assert found["gather cut"].highest is found["gather cut"].passes
    assert found["gather cut"].passes.kept > found["gather cut"].update.kept  # it holds embeddings, which stay AdamW's


def test_as_dp_grows_every_layout_but_one_passes_adamw_s_peak_sooner_or_later() -> None:
    ranks = (8, 16, 32, 64, 128)
    worlds = {dp: beyond("llama3_70b", Degrees(dp, 8)) for dp in ranks}
    above = {layout: [dp for dp in ranks if worlds[dp][layout] > 0] for layout in PLANNED}
    assert above == {
        "gather all, per matrix": [], "gather all, bucketed": [64, 128], "gather all, flat": list(ranks),
        "gather cut": [64, 128],
        "owner": [32, 64, 128],  # padding, of weights and gradients, is more than a moment saves
    }  # fmt: skip


def test_the_padding_of_owners_and_what_muon_saves_are_the_last_table_s() -> None:
    model = MODELS["llama3_70b"]
    (stage,), saved, padded = stages(model, 1, 1), [], []
    for dp in (16, 32):
        buckets = _weighed(stage.dense, dp, 8)["owner"].laid_out.world.layout.buckets
        padded.append(6 * sum(bucket.padded - bucket.numel for bucket in buckets) / 1e9)
        saved.append(4 * share_of_matrices(model) * model.parameters / dp / 8 / 1e9)
        assert padded[-1] < 0.03 * 6 * sum(bucket.numel for bucket in buckets) / 1e9
    told = "that is {:.1f} GB on 16 DP ranks and {:.1f} GB on 32, where Muon saves {:.1f} and {:.1f} GB"
    assert any(told.format(*padded, *saved) in cell.source for cell in stored_pages.cells("13_memory"))


def test_what_a_layer_of_the_8b_keeps_is_what_the_page_adds_up() -> None:
    model, degrees = MODELS["llama3_8b"], Degrees(8)
    (stage,) = stages(model, 1, 1)
    kept = {size / model.width for size in StageActivations(model, stage, degrees, True, False)._by_layer().values()}
    assert kept == {17} == {4 + 1.5 + 1 + 3 * model.mlp / model.width}


def test_bytes_of_buckets_over_tp_are_chapter_12_s() -> None:
    (cell,) = (cell for cell in stored_pages.cells("12_bytes") if cell.printed.startswith("Llama 3 70B, 8 TP ranks"))
    rows = [line.split() for line in cell.printed.splitlines()[2:5]]
    assert [row[0] for row in rows] == ["4", "16", "64"]
    assert [f"{extreme(float(row[1]) for row in rows):.1f}" for extreme in (min, max)] == ["1.9", "2.5"]
    in_bf16 = [1 + 8 / 6 * (extreme(float(row[1]) for row in rows) - 1) for extreme in (min, max)]  # 6 bytes, not 8
    (said,) = (
        cell.source for cell in stored_pages.cells("13_memory") if "with bf16 weights a third and" in cell.source
    )
    assert "a third and {:.1f} to {:.1f} times".format(*in_bf16) in said


@pytest.mark.parametrize("name", LLAMAS)
def test_what_is_saved_is_one_moment_of_the_matrices(name: str) -> None:
    model, degrees = LLAMAS[name]
    found = planned_peaks(model, degrees)
    assert found["AdamW"].highest is found["AdamW"].passes
    muon = found["gather all, per matrix"]
    assert muon.passes.borrowed == found["AdamW"].passes.borrowed
    saved = 4 * share_of_matrices(model) * model.parameters / degrees.dp / degrees.tp
    assert found["AdamW"].passes.kept - muon.passes.kept == pytest.approx(saved, rel=1e-3)  # vectors are not cut


def test_peaks_are_those_that_the_planner_has() -> None:
    """Where the passes hide both updates; the planner counts AdamW's step counters, too."""
    model, degrees = LLAMAS["8B"]
    adamw, muon = (
        WorldPlan(WorldSetting(model, degrees, optimizer, "gather_all", "megatron", recompute=True))
        for optimizer in ("adamw", "muon")
    )
    assert "while stepping" not in {**adamw.held_at_worst, **muon.held_at_worst}
    assert planned_peaks(model, degrees)["AdamW"].highest.top == adamw.fullest[2]
    assert beyond("llama3_8b", degrees)["gather all, bucketed"] == pytest.approx(
        muon.fullest[2] - adamw.fullest[2], rel=1e-6
    )


def test_a_flat_shard_without_matrices_saves_nothing() -> None:
    """The embeddings and the head of the 8B fill one of eight shards."""
    found = planned_peaks(*LLAMAS["8B"])
    saved = found["AdamW"].passes.kept - found["gather all, per matrix"].passes.kept
    higher = beyond("llama3_8b", Degrees(8))
    assert abs(higher["gather cut"]) < 0.001 * saved
    assert higher["gather all, bucketed"] == pytest.approx(-saved, rel=1e-3)


def test_above_the_passes_peaks_differ_by_what_updates_borrow() -> None:
    found, higher = planned_peaks(*LLAMAS["70B"]), beyond("llama3_70b", Degrees(128, 8))
    more = found["gather all, bucketed"].update.borrowed - found["gather all, per matrix"].update.borrowed
    assert higher["gather all, bucketed"] - higher["gather all, per matrix"] == pytest.approx(more, rel=0.01)


@pytest.mark.parametrize(
    ("model", "degrees", "words"),
    [("llama3_8b", Degrees(4, pp=2), "not of PP 2, EP 1"), ("gpt2", Degrees(4), "GPT-2: AdamW's update may borrow")],
)
def test_where_the_passes_are_not_one_ranks_peak_there_is_no_answer(model: str, degrees: Degrees, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        planned_peaks(MODELS[model], degrees)
