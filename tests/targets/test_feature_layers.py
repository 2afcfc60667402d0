"""Outputs of feature layers equal transformers' hidden states, in teaching, prefill and verification alike."""

import pytest
import torch

from fovea.targets.feature_layers import default_feature_layers

LAYERS = (3, 1)


def expected(output) -> torch.Tensor:
    """[T, 2 D] of a plain forward; ``hidden_states[i]`` is the output of layer i."""
    return torch.cat([output.hidden_states[layer][0] for layer in LAYERS], dim=-1)


@pytest.fixture(scope="module")
def encoded(small_target, small_conversations):
    return [small_target.encode(one) for one in small_conversations if one.key in ("image", "two", "text")]


def test_teaching_gives_them_for_every_token(small_target, encoded, reference_output):
    samples = small_target.teach(encoded, [1, 2], feature_layers=LAYERS)
    for one, sample in zip(encoded, samples, strict=True):
        assert sample.feature_layers == LAYERS
        torch.testing.assert_close(
            sample.features, expected(reference_output(one, output_hidden_states=True)), rtol=1e-4, atol=1e-4
        )
    without = small_target.teach(encoded, [1, 2])
    for sample, plain in zip(samples, without, strict=True):
        assert (plain.features, plain.feature_layers) == (None, ())
        for name in ("last", "mid", "visual"):
            assert torch.equal(getattr(sample, name), getattr(plain, name))


def test_prefill_and_verification_give_them_in_the_state(small_target, encoded, reference_output):
    """Two requests take turns; each node's features are those of a plain forward over its path."""
    parents = [-1, 0, 0, 1, 2]
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
    mask = torch.tensor([[column in path for column in range(5)] for path in paths])
    depths = torch.tensor([len(path) - 1 for path in paths])
    ids = torch.tensor([5, 9, 17, 4, 30])
    assert [path[-2] if len(path) > 1 else -1 for path in paths] == parents
    begun = [small_target.prefill(one, 8, 8, LAYERS) for one in encoded[:2]]
    plain, nothing = small_target.prefill(encoded[2], 8, 8)
    for one, (_, prefill) in zip(encoded, begun, strict=False):
        output = reference_output(one, output_hidden_states=True)
        torch.testing.assert_close(prefill.features, expected(output), rtol=1e-4, atol=1e-4)
        assert prefill.read is prefill.features
    for state, _ in begun:
        hidden = small_target.extend(state, ids, state.text_positions(depths), mask)
        assert state.read(hidden) is state.features
    hidden = small_target.extend(plain, ids, plain.text_positions(depths), mask)
    assert nothing.read is nothing.hidden
    assert plain.features is None
    assert plain.read(hidden) is hidden
    for one, (state, _) in zip(encoded, begun, strict=False):
        for row, path in enumerate(paths):
            output = reference_output(one, ids[path].tolist(), output_hidden_states=True)
            torch.testing.assert_close(state.features[row], expected(output)[-1], rtol=1e-4, atol=1e-4)


def test_layers_that_the_target_has_not_are_refused(small_target, encoded):
    for layers in ((0,), (5,), (2, 2)):
        with pytest.raises(ValueError, match=r"feature_layers=.* does not fit a target of 4 layers; .*\[1, 2\]"):
            small_target.prefill(encoded[0], 4, feature_layers=layers)
        with pytest.raises(ValueError, match="feature_layers"):
            small_target.teach(encoded[:1], [1], feature_layers=layers)


def test_the_papers_layers():
    assert [default_feature_layers(layers) for layers in (32, 28, 40)] == [(2, 16, 29), (2, 14, 25), (2, 20, 37)]
    assert [default_feature_layers(layers) for layers in (16, 6, 4, 2, 1)] == [(2, 8, 13), (2, 3), (1, 2), (1, 2), (1,)]
