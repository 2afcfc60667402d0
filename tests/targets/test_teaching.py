import pytest
import torch

from fovea.targets.mid_states import default_mid_layers
from fovea.targets.teacher_batch import TeacherBatch, supervised_positions

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
LAYERS = [1, 2, 3]


@pytest.fixture(scope="module")
def encoded(small_target, small_conversations):
    return [small_target.encode(conversation) for conversation in small_conversations]


@pytest.fixture(scope="module")
def taught(small_target, encoded):
    return small_target.teach(encoded, LAYERS)


def test_a_batch_teaches_what_each_conversation_teaches_alone(small_target, encoded, taught) -> None:
    for one, sample in zip(encoded, taught, strict=True):
        (alone,) = small_target.teach([one], LAYERS)
        torch.testing.assert_close(sample.last, alone.last, **CLOSE)
        torch.testing.assert_close(sample.mid, alone.mid, **CLOSE)
        torch.testing.assert_close(sample.visual, alone.visual, **CLOSE)


def test_last_states_lead_to_the_logits_of_a_plain_forward(small_target, encoded, taught, reference_output) -> None:
    for one, sample in zip(encoded, taught, strict=True):
        logits = reference_output(one).logits[0]
        torch.testing.assert_close(small_target.lm_head(sample.last), logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("side", ["output", "input"])
@pytest.mark.parametrize("layers", [[1], [2, 3], [1, 2, 3, 4]])
def test_mid_states_equal_the_choice_by_full_attention_matrices(
    small_target, encoded, reference_output, layers, side
) -> None:
    samples = small_target.teach(encoded, layers, side)
    chosen = set()
    for one, sample in zip(encoded, samples, strict=True):
        output = reference_output(one, output_attentions=True, output_hidden_states=True)
        # attentions[i - 1] is that of layer i, whose output is hidden_states[i]; the last of these has been normed.
        weights = torch.stack([output.attentions[layer - 1][0] for layer in layers])
        entropy = torch.special.entr(weights).sum(-1).mean(1)
        shift = 0 if side == "output" else 1
        states = torch.stack([_before_norm(output, layer - shift, len(output.attentions)) for layer in layers])
        rows = supervised_positions(one.answer_mask)
        best = entropy.argmin(0)[rows]
        chosen |= set(best.tolist())
        expected = states[best, rows.nonzero().squeeze(-1)]
        usable = ~torch.isnan(expected).any(-1)
        torch.testing.assert_close(sample.mid[usable], expected[usable], atol=2e-4, rtol=1e-4)
        assert sample.mid.shape == expected.shape
    assert len(chosen) == len(layers)


def _before_norm(output, layer: int, last: int) -> torch.Tensor:
    state = output.hidden_states[layer][0]
    return torch.full_like(state, torch.nan) if layer == last else state


def test_a_chunk_of_rows_at_a_time_gives_the_same(small_target, encoded, taught, monkeypatch) -> None:
    monkeypatch.setattr("fovea.targets.attention._CHUNK_NUMBERS", 1)
    for sample, again in zip(taught, small_target.teach(encoded, LAYERS), strict=True):
        torch.testing.assert_close(sample.mid, again.mid, **CLOSE)


def test_samples_hold_what_the_conversation_holds(small_target, encoded, taught) -> None:
    for one, sample in zip(encoded, taught, strict=True):
        assert sample.key == one.key
        assert torch.equal(sample.ids, one.ids)
        assert torch.equal(sample.positions, one.positions)
        assert sample.grids == one.grids
        assert sample.visual.shape == (int(one.is_visual.sum()), small_target.spec.hidden_size)
        assert sample.mid.shape[0] == int(supervised_positions(one.answer_mask).sum())


def test_states_of_the_batch_do_not_share_memory(small_target, encoded) -> None:
    first, second = small_target.teach(encoded[:2], LAYERS)
    assert first.last.untyped_storage().data_ptr() != second.last.untyped_storage().data_ptr()
    assert first.last.untyped_storage().size() == first.last.numel() * 4


@pytest.mark.parametrize("layers", [[], [0], [5], [1, 1]])
def test_layers_that_do_not_fit_are_refused(small_target, encoded, layers) -> None:
    with pytest.raises(ValueError, match=r"does not fit a target of 4 layers; .* from 1 to 4"):
        small_target.teach(encoded[:1], layers)


@pytest.mark.parametrize(("depth", "last"), [(28, 9), (32, 10), (40, 14), (16, 4), (4, 1), (1, 1)])
def test_default_layers(depth, last) -> None:
    assert default_mid_layers(depth) == list(range(1, last + 1))


def test_collated_samples_keep_their_rows(taught) -> None:
    batch = TeacherBatch.collate(taught)
    supervised = supervised_positions(batch.answer_mask)
    assert int(supervised.sum()) == batch.mid.shape[0]
    for row, sample in enumerate(taught):
        assert torch.equal(batch.last[row][batch.valid[row]], sample.last)
        assert torch.equal(batch.visual[row][batch.visual_valid[row]], sample.visual)
        assert int(batch.is_visual[row].sum()) == sample.visual.shape[0]
        assert not batch.last[row][~batch.valid[row]].any()
    half = batch.to("cpu", torch.bfloat16)
    assert (half.last.dtype, half.ids.dtype, half.valid.dtype) == (torch.bfloat16, torch.int64, torch.bool)


def test_a_supervised_position_is_the_one_before_an_answer_token() -> None:
    mask = torch.tensor([[True, False, True, True], [False, False, False, False]])
    assert supervised_positions(mask).tolist() == [[False, True, True, False], [False] * 4]
