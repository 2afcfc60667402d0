"""What a training step keeps, told from small copies, against the same measured at full size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fovea.artifacts.size import SampleLengths
from fovea.drafters.registry import DRAFTERS
from fovea.planning.replica import Precision, Trained, kept_bytes, measure_kept_bytes
from fovea.targets.architecture import Architecture
from fovea.training.objective import ObjectiveConfig

SMALL = Architecture(256, 704, 12, 8, 2, 32, 64, qkv_bias=True)


def trained(name: str, precision: str = "32-true", **numbers) -> Trained:
    config = DRAFTERS[name].config_type(depth=3, **numbers)
    return Trained(name, SMALL.spec(), config, ObjectiveConfig(), 4, Precision.named(precision))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_samples_of_other_lengths_keep_what_was_told(name, precision):
    """Whatever is measured beyond what was told is the same for every sample."""
    run = trained(name, precision)
    told = kept_bytes(run, with_pictures=True)
    lengths = [SampleLengths(380, 120, 20), SampleLengths(500, 60, 90), SampleLengths(620, 300, 40)]
    beyond = [measure_kept_bytes(run, sample) - told.of(sample) for sample in lengths]
    assert max(beyond) - min(beyond) < 0.001 * told.of(lengths[0])
    assert min(beyond) >= 0
    assert told.of(lengths[1]) > 1.2 * told.of(lengths[0])


def test_samples_without_pictures():
    run = trained("fovea")
    told = kept_bytes(run, with_pictures=False)
    lengths = [SampleLengths(300, 0, 20), SampleLengths(410, 0, 95)]
    beyond = [measure_kept_bytes(run, sample) - told.of(sample) for sample in lengths]
    assert abs(beyond[0] - beyond[1]) < 0.001 * told.of(lengths[0])
    assert told.of(lengths[0]) < kept_bytes(run, with_pictures=True).of(replace(lengths[0], visual=200))


def test_what_a_drafter_keeps_follows_its_settings():
    sample = SampleLengths(600, 200, 60)
    plain = kept_bytes(trained("fovea"), with_pictures=True).of(sample)
    assert kept_bytes(trained("fovea", num_blocks=4), with_pictures=True).of(sample) > 1.5 * plain
    assert kept_bytes(trained("fovea", correction_width=2048), with_pictures=True).of(sample) > plain
    assert kept_bytes(replace(trained("fovea"), steps=2), with_pictures=True).of(sample) < plain
    assert 0.4 * plain < kept_bytes(trained("fovea", "bf16-mixed"), with_pictures=True).of(sample) < 0.8 * plain


def test_head_widths_that_cannot_be_halved_are_refused():
    odd = replace(SMALL.spec(), head_dim=33)
    with pytest.raises(ValueError, match="head width 33"):
        kept_bytes(replace(trained("fovea"), spec=odd), with_pictures=False)
