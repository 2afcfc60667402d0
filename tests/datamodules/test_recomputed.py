"""Pictures in the place of visual tokens: through both doors, with workers, in a training, and what is refused."""

import io
import json
from dataclasses import replace

import lightning as L
import pytest
import torch
from PIL import Image

from datamodules.artifacts import ArtifactDataModule
from datamodules.conversations import JsonlConversations
from datamodules.loading import LoaderConfig
from datamodules.recomputed import PictureCollate, Sight
from fovea.artifacts.config import ExportConfig
from fovea.artifacts.errors import ArtifactError, FingerprintMismatchError
from fovea.artifacts.reading import open_artifacts
from fovea.targets.spec import UnsupportedTargetError
from fovea.targets.vision import load_vision

EXPORT = ExportConfig(mid_layers=(1, 2), dtype="fp32", answers="dataset", shard_bytes=40_000, visual="recomputed")


@pytest.fixture
def source(tmp_path):
    """Ten conversations, eight of them about a JPEG or PNG."""
    path = tmp_path / "c.jsonl"
    with path.open("w") as file:
        for i in range(10):
            shown = [{"type": "image"}] if i < 8 else []
            if shown:
                Image.effect_noise((84 + 28 * (i % 2), 56), 90).convert("RGB").save(
                    tmp_path / (f"{i}.jpg" if i % 2 else f"{i}.png")
                )
            content = [*shown, {"type": "text", "text": f"what is {i}?"}]
            turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "the red square"}]
            images = [f"{i}.jpg" if i % 2 else f"{i}.png"] if shown else []
            file.write(json.dumps({"key": f"k{i}", "messages": turns, "images": images}) + "\n")
    return JsonlConversations(path)


@pytest.fixture
def make_data(tmp_path, small_target, small_target_path, source):
    def make(loaded=None, **settings):
        def load(device):
            if loaded is not None:
                loaded.append(device)
            return load_vision(small_target_path, device=device, dtype=torch.float32)

        loader = LoaderConfig(**{"batch_size": 3, "val_fraction": 0.0, **settings.pop("loader", {})})
        given = {"checkpoint": small_target_path, "export": EXPORT, "train": source, "root": tmp_path / "artifacts"}
        data = ArtifactDataModule(
            **given | settings, load_target=lambda: small_target, load_vision=load, loader=loader, progress=False
        )
        data.prepare_data()
        data.setup()
        return data

    return make


def same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys == other.keys
        assert torch.equal(one.visual_valid, other.visual_valid)
        torch.testing.assert_close(one.visual, other.visual, rtol=0, atol=1e-5)
        assert torch.equal(one.last, other.last)


@pytest.mark.parametrize(("workers", "threads"), [(0, 0), (2, 0), (2, 3)])
def test_both_doors_give_what_was_stored(make_data, workers, threads):
    loaded = []
    data = make_data(loaded, loader={"num_workers": workers, "threads": threads})
    assert data.train_dataloader().num_workers == workers  # which decode pictures, whatever threads there are
    stored = list(make_data(export=replace(EXPORT, visual="stored")).train_dataloader())
    same(data.train_dataloader(), stored)
    same(data.train_dataloader(), stored)
    assert loaded == [torch.device("cpu")]
    folder = data.folder_of(data.train_source)
    settings = {"shuffle_buffer": 0, "num_workers": 0}
    streams = [
        make_data(train=f"pipe:cat {place}/{{name}}", loader=settings).train_dataloader()
        for place in (folder, make_data(export=replace(EXPORT, visual="stored")).folder_of(data.train_source))
    ]
    same(*streams)


def test_pictures_are_kept_as_they_were(make_data, source, tmp_path):
    data = make_data()
    artifacts = open_artifacts(data.folder_of(source))
    for sample in artifacts:
        number = int(sample.key[1:])
        files = [tmp_path / (f"{number}.jpg" if number % 2 else f"{number}.png")] if number < 8 else []
        assert [picture.numpy().tobytes() for picture in sample.pictures] == [file.read_bytes() for file in files]
        assert sample.visual.isnan().all()
        assert sample.visual.shape[0] == int(sample.is_visual.sum())
    stored = open_artifacts(make_data(export=replace(EXPORT, visual="stored")).folder_of(source))
    assert all(sample.pictures is None for sample in stored)


def test_a_picture_in_memory_is_kept_without_loss():
    from fovea.targets.images import encoded_picture, open_image

    for mode in ("RGB", "RGBA", "L", "P", "I;16"):
        image = Image.effect_noise((20, 14), 90)
        image = image.point(lambda v: v * 200, "I").convert("I;16") if mode == "I;16" else image.convert(mode)
        with Image.open(io.BytesIO(encoded_picture(image))) as back:
            assert open_image(back).tobytes() == open_image(image).tobytes()


class Recorder(L.LightningModule):
    """Trains nothing and remembers the visual tokens it was given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, index):
        self.seen.append(batch.visual)
        return self.weight * batch.visual.sum()

    def validation_step(self, batch, index):
        self.seen.append(batch.visual)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_training_reads_them(make_data):
    """The sanity check is the first to need the tower, in inference mode."""
    loaded, recorder = [], Recorder()
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(recorder, datamodule=make_data(loaded, loader={"val_fraction": 0.2}))
    assert len(loaded) == 1
    assert recorder.seen
    assert all(visual.isfinite().all() for visual in recorder.seen)


def test_other_ways_of_keeping_them_are_another_set(make_data, tmp_path):
    make_data(folder=tmp_path / "fixed")
    with pytest.raises(FingerprintMismatchError, match="visual is 'recomputed' there, 'stored' here"):
        make_data(folder=tmp_path / "fixed", export=replace(EXPORT, visual="stored"))


def test_another_number_of_tokens_is_refused(make_data, source, small_target_path):
    artifacts = open_artifacts(make_data().folder_of(source))
    small, large = (next(s for s in artifacts if s.key == key) for key in ("k0", "k1"))
    sight = Sight(lambda: load_vision(small_target_path, device="cpu", dtype=torch.float32))
    with pytest.raises(ArtifactError, match=r"samples k0 make 8 visual tokens now and made 6 when"):
        sight(PictureCollate(small_target_path)([replace(small, pictures=large.pictures)]))


def test_a_target_without_eyes_is_refused_before_it_is_loaded(tmp_path, source, small_target_path, monkeypatch):
    config = json.loads((small_target_path / "config.json").read_text())["text_config"]
    (tmp_path / "blind").mkdir()
    blind = config | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    blind.pop("rope_parameters", None)
    (tmp_path / "blind" / "config.json").write_text(json.dumps(blind))
    data = ArtifactDataModule(
        checkpoint=tmp_path / "blind",
        export=EXPORT,
        load_target=lambda: pytest.fail("loaded"),
        train=source,
        root=tmp_path,
    )
    with pytest.raises(UnsupportedTargetError, match="reads text only"):
        data.prepare_data()
