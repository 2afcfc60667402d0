import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("index", range(8))
def test_positions_equal_get_rope_index(small_target, small_conversations, reference_model, index) -> None:
    encoded = small_target.encode(small_conversations[index])
    positions, delta = reference_model.model.get_rope_index(
        encoded.ids[None],
        mm_token_type_ids=encoded.is_visual.int()[None],
        image_grid_thw=encoded.vision.get("image_grid_thw"),
    )
    assert torch.equal(encoded.positions, positions[:, 0])
    assert encoded.next_position - encoded.ids.shape[0] == int(delta)


@pytest.mark.parametrize("index", range(8))
def test_every_node_stands_where_get_rope_index_puts_it(
    small_target, small_conversations, reference_model, index
) -> None:
    """Behind one picture, several and none, and behind committed rows: rotary position and cache slot differ."""
    encoded = small_target.encode(small_conversations[index])
    parents = [-1, 0, 0, 2, 2, 4, 1]
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    depths = torch.tensor([len(path) - 1 for path in paths])
    state, _ = small_target.prefill(encoded, 8, draft_rows=len(parents))
    for committed in range(3):
        positions = state.text_positions(depths)
        for row, path in enumerate(paths):
            ids = torch.cat([encoded.ids, torch.full((committed + len(path),), 50)])[None]
            kinds = torch.zeros_like(ids, dtype=torch.int32)
            kinds[0, : len(encoded.ids)] = encoded.is_visual
            expected, _ = reference_model.model.get_rope_index(
                ids, mm_token_type_ids=kinds, image_grid_thw=encoded.vision.get("image_grid_thw")
            )
            assert torch.equal(positions[:, row], expected[:, 0, -1])
        small_target.extend(state, torch.tensor([50]), state.text_positions(torch.tensor([0])))
        small_target.commit(state, [0])
        assert state.length == len(encoded.ids) + committed + 1


@settings(deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)), max_size=4),
    tail=st.integers(1, 5),
)
def test_positions_of_any_sequence_of_pictures(small_target, reference_model, parts, tail) -> None:
    is_visual = torch.zeros(0, dtype=torch.bool)
    for text, rows, columns in parts:
        is_visual = torch.cat([is_visual, torch.zeros(text, dtype=torch.bool), torch.ones(rows * columns).bool()])
    is_visual = torch.cat([is_visual, torch.zeros(tail, dtype=torch.bool)])
    grids = [(rows, columns) for _, rows, columns in parts]
    positions, following = small_target.rotary_positions(is_visual, grids)
    patches = torch.tensor([(1, 2 * rows, 2 * columns) for rows, columns in grids]) if grids else None
    expected, delta = reference_model.model.get_rope_index(
        torch.ones_like(is_visual, dtype=torch.int64)[None],
        mm_token_type_ids=is_visual.int()[None],
        image_grid_thw=patches,
    )
    assert torch.equal(positions, expected[:, 0])
    assert following - is_visual.shape[0] == int(delta)


def test_pictures_side_by_side_are_told_apart(small_target) -> None:
    positions, following = small_target.rotary_positions(torch.ones(6).bool(), [(1, 2), (2, 2)])
    assert positions.tolist() == [[0, 0, 2, 2, 2, 2], [0, 0, 2, 2, 3, 3], [0, 1, 2, 3, 2, 3]]
    assert following == 4


def test_an_image_takes_fewer_positions_than_slots(small_target, small_conversations) -> None:
    encoded = small_target.encode(small_conversations[7])
    assert encoded.grids == ((4, 5),)
    assert encoded.ids.shape[0] - encoded.next_position == 20 - 5


def test_visual_tokens_are_in_reading_order(small_target, reference_model, small_conversations) -> None:
    encoded = small_target.encode(small_conversations[3])
    visual = small_target.read_visual([encoded])
    features = reference_model.model.get_image_features(**_named(encoded.vision)).pooler_output
    torch.testing.assert_close(visual, torch.cat(features), atol=1e-5, rtol=1e-5)
    assert visual.shape[0] == 9 + 8


def _named(vision):
    return {"pixel_values": vision["pixel_values"], "image_grid_thw": vision["image_grid_thw"]}
