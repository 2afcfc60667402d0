"""Outputs of feature layers in artifacts: stored and read when asked for, refused by name when not there."""

from dataclasses import replace

import pytest
import torch

from datamodules.artifacts import ArtifactDataModule
from datamodules.conversations import ConversationSource
from datamodules.loading import LoaderConfig
from fovea.artifacts.config import ExportConfig
from fovea.artifacts.errors import ArtifactError, FingerprintMismatchError
from fovea.artifacts.reading import open_artifacts
from fovea.artifacts.schema import META, TENSORS, SampleMeta, decode_sample, encode_sample
from fovea.artifacts.streaming import StreamedArtifacts
from fovea.artifacts.writer import ArtifactWriter, finish_rank
from fovea.targets.teacher_batch import TeacherBatch

LAYERS = (4, 1)


@pytest.fixture
def make_featured(make_sample):
    """A sample with outputs of two layers beside its own."""

    def make(key: str = "k", dtype=torch.bfloat16, **settings):
        sample = make_sample(key, dtype=dtype, **settings)
        other = make_sample(f"{key} features", dtype=dtype, **settings).last
        return replace(sample, features=torch.cat((other, -other), dim=-1), feature_layers=LAYERS)

    return make


def decoded(members: dict[str, bytes], layers: tuple[int, ...] = ()):
    return decode_sample(members[META], torch.frombuffer(bytearray(members[TENSORS]), dtype=torch.uint8), layers)[0]


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_they_survive_bit_by_bit_in_any_order(make_featured, assert_same, dtype, torch_dtype):
    sample = make_featured(dtype=torch_dtype)
    members = encode_sample(sample, SampleMeta(), dtype)
    back = decoded(members, LAYERS)
    assert_same(back, sample)
    assert torch.equal(back.features, sample.features)
    width = sample.last.shape[1]
    assert torch.equal(decoded(members, (1,)).features, sample.features[:, width:])
    assert torch.equal(decoded(members, (1, 4)).features[:, :width], sample.features[:, width:])
    plain = decoded(members)
    assert (plain.features, plain.feature_layers) == (None, ())
    with pytest.raises(ArtifactError, match=r"'k' holds no tensor 'feature\.3'"):
        decoded(members, (3,))


def test_fp8_scales_each_layer_by_itself(make_featured):
    sample = make_featured()
    width = sample.last.shape[1]
    sample.features[:, :width] *= 1000
    back = decoded(encode_sample(sample, SampleMeta(), "fp8"), LAYERS)
    error = (back.features.float() - sample.features.float()).abs()
    assert (error[:, width:] <= sample.features[:, width:].float().abs() / 8 + 1e-2).all()
    assert error.max() > 0


def test_lengths_are_checked(make_featured):
    sample = make_featured("the key")
    with pytest.raises(ArtifactError, match=r"'the key'.*features has 11 rows instead of 12"):
        encode_sample(replace(sample, features=sample.features[:-1]), SampleMeta(), "bf16")


def test_batches_hold_them_beside_each_other(make_featured):
    samples = [make_featured("a", tokens=12), make_featured("b", tokens=9)]
    batch = TeacherBatch.collate(samples)
    for row, sample in enumerate(samples):
        assert torch.equal(batch.read(LAYERS)[row, : len(sample.ids)], sample.features)
    assert not batch.features[1, 9:].any()
    width = batch.last.shape[-1]
    assert torch.equal(batch.read((1,)), batch.features[..., width:])
    assert batch.read(()) is batch.last
    assert batch.to("cpu", torch.float32).read(LAYERS).dtype == torch.float32


def test_both_doors_read_them_and_refuse_layers_that_are_not_there(tmp_path, fingerprint, make_featured, assert_same):
    fingerprint = replace(fingerprint, feature_layers=LAYERS)
    samples = [make_featured(f"k{i}", tokens=12 + i) for i in range(4)]
    with ArtifactWriter(tmp_path, fingerprint, dtype="bf16", shard_bytes=100_000) as writer:
        for sample in samples:
            writer.write(sample, SampleMeta())
    finish_rank(tmp_path, fingerprint, {}, 0, 1)
    for found, sample in zip(open_artifacts(tmp_path, LAYERS), samples, strict=True):
        assert torch.equal(found.features, sample.features)
    location = f"pipe:cat {tmp_path}/{{name}}"
    (batch,) = StreamedArtifacts(location, batch_size=4, shuffle_buffer=0, feature_layers=LAYERS)
    assert torch.equal(batch.features, TeacherBatch.collate(samples).features)
    assert open_artifacts(tmp_path)[0].features is None
    missing = r"reads the outputs of layers \[2, 4\] .* those of \[4, 1\]; export"
    with pytest.raises(ArtifactError, match=missing):
        open_artifacts(tmp_path, (2, 4))
    with pytest.raises(ArtifactError, match=missing):
        StreamedArtifacts(location, batch_size=1, feature_layers=(2, 4))


def test_more_layers_than_wanted_fit_and_fewer_do_not(fingerprint):
    more = replace(fingerprint, feature_layers=LAYERS)
    more.require(fingerprint, "there")
    more.require(replace(fingerprint, feature_layers=(1,)), "there")
    for less in (fingerprint, replace(fingerprint, feature_layers=(1, 2))):
        with pytest.raises(FingerprintMismatchError, match=r"feature_layers is .* there, \(4, 1\) here"):
            less.require(more, "there")
    assert more.digest() != fingerprint.digest()
    with pytest.raises(ValueError, match=r"feature_layers must be different layers, got \[2, 2\]"):
        ExportConfig(mid_layers=(1,), feature_layers=(2, 2))


class Few(ConversationSource):
    """A few conversations that are there already."""

    def __init__(self, items):
        self.items = items

    def _read(self):
        return self.items

    def digest(self) -> str:
        return "few"


def test_the_data_module_exports_them_and_refuses_artifacts_without(
    tmp_path, small_target, small_target_path, small_conversations
):
    plain = ExportConfig(mid_layers=(1, 2), dtype="fp32", answers="dataset")

    def data(train, export: ExportConfig) -> ArtifactDataModule:
        module = ArtifactDataModule(
            checkpoint=small_target_path,
            export=export,
            load_target=lambda: small_target,
            train=train,
            root=tmp_path,
            loader=LoaderConfig(batch_size=8, val_fraction=0.0),
            progress=False,
        )
        module.prepare_data()
        module.setup()
        return module

    few = Few([c for c in small_conversations if c.key in ("image", "text")])
    (batch,) = data(few, replace(plain, feature_layers=LAYERS)).train_dataloader()
    taught = small_target.teach([small_target.encode(c) for c in few], (1, 2), feature_layers=LAYERS)
    by_key = {sample.key: sample for sample in taught}
    for row, key in enumerate(batch.keys):
        tokens = len(by_key[key].ids)
        torch.testing.assert_close(batch.features[row, :tokens], by_key[key].features, rtol=1e-4, atol=1e-4)
    without = data(few, plain)
    (batch,) = without.train_dataloader()
    assert batch.features is None
    folder = str(without.folder_of(without.train_source))
    with pytest.raises(ArtifactError, match=r"layers \[4, 1\] and the artifacts in .* hold none"):
        data(folder, replace(plain, feature_layers=LAYERS))
