"""Bytes of a sample, told from its lengths, against what the writer writes."""

from __future__ import annotations

import pytest
import torch

from fovea.artifacts.fingerprint import Fingerprint
from fovea.artifacts.schema import SampleMeta
from fovea.artifacts.size import SampleLengths, sample_bytes
from fovea.artifacts.writer import ArtifactWriter
from fovea.targets.teacher_batch import TeacherSample

WIDTH = 96


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp8"])
@pytest.mark.parametrize("pictures", [None, (40_000, 7_001)])
@pytest.mark.parametrize(("lengths", "features"), [(SampleLengths(900, 500, 200), 0), (SampleLengths(500, 0, 120), 3)])
def test_a_shard_is_as_large_as_told(dtype, lengths, features, pictures, tmp_path):
    place = torch.arange(lengths.tokens)
    axes = 3 if lengths.visual else 1
    samples = [
        TeacherSample(
            key=f"mixture/{number:07}",
            ids=place,
            positions=place.expand(axes, -1),
            answer_mask=place >= lengths.tokens - lengths.answer,
            is_visual=place < lengths.visual,
            last=torch.randn(lengths.tokens, WIDTH),
            mid=torch.randn(lengths.answer, WIDTH),
            visual=torch.randn(lengths.visual, WIDTH),
            importance=torch.rand(lengths.visual),
            features=torch.randn(lengths.tokens, features * WIDTH) if features else None,
            feature_layers=tuple(range(1, features + 1)),
            pictures=None if pictures is None else tuple(torch.zeros(size, dtype=torch.uint8) for size in pictures),
        )
        for number in range(20)
    ]
    fingerprint = Fingerprint("none", {}, "random", (1,), dtype, "dataset")
    with ArtifactWriter(tmp_path, fingerprint, dtype=dtype, shard_bytes=1 << 30) as writer:
        for sample in samples:
            writer.write(sample, SampleMeta("mixture", ((640, 480),), ("0123456789abcdef",)))
    (shard,) = tmp_path.glob("shard-*.tar")
    told = 20 * sample_bytes(lengths, WIDTH, axes, dtype, features, sum(pictures) if pictures else None)
    assert told == pytest.approx(shard.stat().st_size, rel=0.01)


@pytest.mark.parametrize("lengths", [(100, 90, 10), (100, 10, 0), (100, -1, 10), (10, 0, 10)])
def test_lengths_of_no_sample_are_refused(lengths):
    with pytest.raises(ValueError, match="are no sample"):
        SampleLengths(*lengths)
