"""Words about the seven cuts that are typed: the map says the same."""

from tools.pages import moving


def test_zero1_says_where_the_map_cuts_the_strip() -> None:
    zero1 = next(cut for cut in moving.CUTS if cut.name == "ZeRO-1")
    held = [{piece.part.name: len(piece.rows) for piece in zero1.kept[2](rank)} for rank in (0, 1)]
    assert held == [{"layer 1": 8, "layer 2": 1}, {"layer 2": 7, "expert 0": 4}]
    assert [piece.part.shape[0] for piece in zero1.kept[2](1)] == [8, 4]
    assert zero1.shown.endswith("rank 0 layer 1 and a row of layer 2, rank 1 the rest of it and an expert.")
