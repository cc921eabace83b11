"""Who orthogonalizes one matrix: the ranks that the planner counts, each drawn once; and whether a step pays."""

import numpy as np
import pytest
from figure_helpers import assert_readable, boxes

from muonbook.ch15.experiments import repeats
from muonbook.ch15.figures import EVEN, SHOWN, describe_repeats, describe_step_ratios, draw_repeats, draw_step_ratios
from muonbook.planner.algorithms import ALGORITHMS
from muonbook.planner.choices import compared
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.planned_worlds import specs_of
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import WorldSetting

TITLE = "One matrix of the 70B on 1,024 GPUs"


def test_means_are_those_of_the_planner_s_table() -> None:
    setting = WorldSetting(shape=MODELS["llama3_70b"], degrees=Degrees(128, 8), tokens=1 << 22, recompute=True)
    planned = {each.algorithm.title: each.repeats for each in compared(setting)}
    for each in repeats("llama3_70b", 128, 8, "blocks.40.up", SHOWN):
        assert each.mean == pytest.approx(planned[each.title], rel=1e-3)


def test_columns_are_consecutive_and_whole_except_the_owner_s_single_rank() -> None:
    found = dict(zip(SHOWN, repeats("llama3_70b", 128, 8, "blocks.40.up", SHOWN), strict=True))
    for name in ("bucketed", "flat"):
        columns = found[name].busy.any(axis=0)
        assert np.array_equal(found[name].busy, np.broadcast_to(columns, (8, 128)))
        assert np.ptp(np.flatnonzero(columns)) + 1 == columns.sum()
    assert found["owner"].ranks == 1 < found["flat"].ranks < found["bucketed"].ranks


def test_on_a_small_grid_columns_are_the_owners_of_the_map() -> None:
    specs, indices = specs_of(MODELS["gpt2"], 2)
    layout = ALGORITHMS["bucketed"].lay_out(specs, indices, 4, 2).world.layout  # type: ignore[union-attr]
    for index in sorted(indices)[:6]:
        (bucket,) = (bucket for bucket in layout.buckets if index in bucket.params)
        first, *_ = repeats("gpt2", 4, 2, specs[index].name, SHOWN)
        assert np.flatnonzero(first.busy.any(axis=0)).tolist() == list(layout.owners(bucket, index))


def test_the_picture_has_a_cell_per_rank_and_says_in_words_what_it_shows() -> None:
    found = repeats("llama3_70b", 128, 8, "blocks.40.up", SHOWN)
    figure = draw_repeats(found, TITLE)
    assert_readable(figure)
    meshes = [mesh for mesh in figure.axes[0].collections if (mesh.get_gid() or "").startswith("ranks-")]
    cells = [np.asarray(mesh.get_array()) for mesh in meshes]
    assert [colours.shape for colours in cells] == [(8, 128, 3)] * 3
    for colours, each in zip((colours.reshape(-1, 3) for colours in cells), found, strict=True):
        assert (colours == colours[each.busy.argmax()]).all(axis=1).sum() == each.ranks
    alt = describe_repeats(found, TITLE)
    assert alt.startswith(TITLE)
    for each in found:
        assert f"{each.title}: {each.ranks} GPU" in alt


def test_a_matrix_that_muon_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no matrix 'embedding' in gpt2; its first is"):
        repeats("gpt2", 4, 2, "embedding", SHOWN)


def test_both_lines_stand_where_their_ratios_end_on_the_bars_scale() -> None:
    ratios, note = {"a layout": 2.5, "another": 1.0}, "Planned."
    figure = draw_step_ratios(ratios, "A step", note)
    assert_readable(figure)
    for layout, ratio in ratios.items():
        (bar,) = boxes(figure, f"bar-{layout}-")
        for gid, even in zip(("early", "level"), EVEN, strict=True):
            (line,) = (each for each in figure.axes[0].collections if each.get_gid() == f"{gid}-{layout}")
            x = line.get_segments()[0][0][0]  # type: ignore[attr-defined]
            assert x - bar.get_x() == pytest.approx(bar.get_width() * even / ratio)
    alt = describe_step_ratios(ratios, "A step", note)
    assert "a layout: 2.5 ×" in alt
    assert "1.33" in alt
