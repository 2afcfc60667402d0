"""What all drafters share: the noise on the target's states while training."""

from collections.abc import Callable

import pytest
import torch

from fovea.drafters.base import disturb
from fovea.drafters.fovea import FoveaConfig, FoveaDrafter
from fovea.targets.base import Prefill


def test_noise_is_uniform_and_smaller_in_longer_texts() -> None:
    for length in (8, 512):
        added = disturb(torch.zeros(length, 400), 0.2, torch.Generator().manual_seed(3))
        largest = 0.2 * 256 / length
        assert largest * 0.98 < added.abs().max() <= largest
        assert added.mean().abs() < 0.05 * largest
        assert added.var() == pytest.approx(largest**2 / 3, rel=0.1)
        assert torch.equal(added, disturb(torch.zeros(length, 400), 0.2, torch.Generator().manual_seed(3)))
        assert not torch.equal(added, disturb(torch.zeros(length, 400), 0.2, torch.Generator().manual_seed(4)))


def test_states_are_disturbed_in_training_alone(
    make_drafter: Callable[..., FoveaDrafter], make_prefill: Callable[..., Prefill]
) -> None:
    prefill, draw = make_prefill(), torch.Generator()
    drafter = make_drafter(feature_noise=0.2)
    for context in (drafter.context(prefill, draw), drafter.train().context(prefill)):
        assert torch.equal(context.states, prefill.hidden[:-1])
    disturbed = drafter.context(prefill, draw)
    assert not torch.equal(disturbed.states, prefill.hidden[:-1])
    assert torch.equal(disturbed.embeds, prefill.embeds[1:])
    assert torch.equal(make_drafter().train().context(prefill, draw).states, prefill.hidden[:-1])
    with pytest.raises(ValueError, match=r"drafter\.feature_noise is -1"):
        FoveaConfig(feature_noise=-1)
