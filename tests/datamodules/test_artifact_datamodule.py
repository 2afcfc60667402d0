"""The data module: exports once, loads the target only for that, shuffles reproducibly, deals evenly to ranks."""

import itertools
import json
from collections import Counter

import lightning as L
import pytest
import torch

from datamodules.artifacts import ArtifactDataModule, split_by_picture
from datamodules.conversations import JsonlConversations
from datamodules.loading import LoaderConfig
from fovea.artifacts.config import ExportConfig
from fovea.artifacts.errors import ArtifactError, FingerprintMismatchError
from fovea.artifacts.reading import IndexedArtifacts

EXPORT = ExportConfig(mid_layers=(1, 2), dtype="fp32", answers="dataset", shard_bytes=40_000)


@pytest.fixture
def source(tmp_path):
    """Twelve text conversations."""
    path = tmp_path / "c.jsonl"
    with path.open("w") as file:
        for i in range(12):
            messages = [
                {"role": "user", "content": f"what is {i}?"},
                {"role": "assistant", "content": "the red square"},
            ]
            file.write(json.dumps({"key": f"k{i}", "messages": messages}) + "\n")
    return JsonlConversations(path)


@pytest.fixture
def make_data(tmp_path, small_target, small_target_path, source):
    """A data module; ``loads`` counts how often it asked for the target."""

    def make(**settings):
        loads = []

        def load():
            loads.append(1)
            return small_target

        loader = LoaderConfig(**{"batch_size": 2, "val_fraction": 0.25, **settings.pop("loader", {})})
        given = {"checkpoint": small_target_path, "export": EXPORT, "train": source, "root": tmp_path / "artifacts"}
        data = ArtifactDataModule(**given | settings, load_target=load, loader=loader, progress=False)
        data.loads = loads
        return data

    return make


def keys(loader):
    return [key for batch in loader for key in batch.keys]


@pytest.mark.parametrize("use", ["train", "val"])
def test_an_empty_file_is_named_before_the_target_is_loaded(make_data, tmp_path, use):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    data = make_data(**{use: JsonlConversations(empty)})
    with pytest.raises(ArtifactError, match=rf"there is no conversation in {empty}; is a file empty"):
        data.prepare_data()
    assert not data.loads


class Recorder(L.LightningModule):
    """Trains nothing and remembers what it was given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = {}

    def training_step(self, batch, index):
        self.seen.setdefault(self.current_epoch, []).extend(batch.keys)
        return self.weight

    def validation_step(self, batch, index):
        self.seen.setdefault("val", []).extend(batch.keys)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(data, epochs=2):
    recorder = Recorder()
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(recorder, datamodule=data)
    return recorder.seen, trainer


def test_exports_once_and_loads_the_target_only_then(make_data):
    data = make_data()
    data.prepare_data()
    data.setup()
    assert len(data.loads) == 1
    again = make_data()
    again.prepare_data()
    again.setup()
    assert not again.loads
    assert isinstance(again.train_artifacts, IndexedArtifacts)
    assert len(again.train_artifacts) == 12


def test_epochs_are_shuffled_and_reproducible(make_data):
    seen, trainer = fit(make_data())
    assert trainer.global_step == 2 * 5  # nine samples in batches of two
    assert sorted(seen[0]) == sorted(seen[1])
    assert seen[0] != seen[1]
    assert not set(seen[0]) & set(seen["val"])
    assert len(set(seen[0]) | set(seen["val"])) == 12
    assert fit(make_data())[0] == seen
    whole = [fit(make_data(loader={"seed": seed, "val_fraction": 0.0}), epochs=1)[0][0] for seed in (0, 1)]
    assert sorted(whole[0]) == sorted(whole[1])
    assert whole[0] != whole[1]


def test_two_ranks_share_the_samples(make_data, monkeypatch):
    shares = []
    for rank in range(2):
        data = make_data(loader={"val_fraction": 0.0})
        data.prepare_data()
        data.setup()
        data.trainer = type("Ranks", (), {"world_size": 2, "global_rank": rank, "current_epoch": 0})()
        shares.append(keys(data.train_dataloader()))
        assert data.val_dataloader() == []
    assert len(shares[0]) == len(shares[1]) == 6
    assert set(shares[0]).isdisjoint(shares[1])


def test_workers_and_threads_change_nothing(make_data):
    orders = []
    for loader in ({}, {"num_workers": 2}, {"threads": 3}, {"num_workers": 2, "threads": 1}):
        data = make_data(loader=loader)
        data.prepare_data()
        data.setup()
        orders.append(list(data.train_dataloader()))
    for batches in orders[1:]:
        for ours, plain in zip(batches, orders[0], strict=True):
            assert ours.keys == plain.keys
            for name in ("ids", "positions", "answer_mask", "last", "mid", "visual", "visual_valid"):
                assert torch.equal(getattr(ours, name), getattr(plain, name))


def test_threads_name_a_damaged_sample(make_data):
    data = make_data(loader={"threads": 2})
    data.prepare_data()
    data.setup()
    shard = sorted(data.folder_of(data.train_source).glob("*.tar"))[0]
    entry = data.train_artifacts.entries[0]
    with shard.open("r+b") as file:
        file.seek(entry.data[0] + entry.data[1] - 1)
        last = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([last ^ 1]))
    with pytest.raises(ArtifactError, match=f"sample '{entry.key}'"):
        list(itertools.chain(data.train_dataloader(), data.val_dataloader()))


def test_fixed_folder_of_other_settings_is_refused_by_name(make_data, tmp_path):
    make_data(folder=tmp_path / "fixed").prepare_data()
    other = ExportConfig(mid_layers=(1,), dtype="fp32", answers="dataset")
    data = make_data(folder=tmp_path / "fixed", export=other)
    with pytest.raises(FingerprintMismatchError, match=r"mid_layers is \(1, 2\) there, \(1,\) here"):
        data.prepare_data()
    with pytest.raises(FingerprintMismatchError, match="mid_layers"):
        data.setup()
    assert not data.loads


def test_cut_shard_is_refused(make_data):
    data = make_data()
    data.prepare_data()
    shard = sorted(data.folder_of(data.train_source).glob("*.tar"))[0]
    shard.write_bytes(shard.read_bytes()[:-512])
    with pytest.raises(ArtifactError, match=r"is cut"):
        data.setup()


@pytest.mark.parametrize("streamed", [False, True])
def test_finished_artifacts_from_elsewhere(make_data, streamed):
    first = make_data()
    first.prepare_data()
    folder = first.folder_of(first.train_source)
    location = f"pipe:cat {folder}/{{name}}" if streamed else str(folder)
    data = make_data(train=location, val=str(folder))
    seen, trainer = fit(data)
    assert not data.loads
    assert trainer.global_step == 2 * 6
    assert all(Counter(seen[epoch]) == Counter(f"k{i}" for i in range(12)) for epoch in (0, 1))
    assert seen[0] != seen[1]
    with pytest.raises(FingerprintMismatchError, match="mid_layers"):
        make_data(train=location, export=ExportConfig(mid_layers=(1,), answers="dataset")).setup()


def test_split_keeps_pictures_together():
    pictures = [f"picture{i // 3}" for i in range(30)] + [f"text{i}" for i in range(10)]
    train, val = split_by_picture(pictures, 0.2, seed=0)
    assert sorted(train + val) == list(range(40))
    assert 8 <= len(val) <= 10
    assert {i // 3 for i in val if i < 30}.isdisjoint({i // 3 for i in train if i < 30})
    assert split_by_picture(pictures, 0.2, seed=0) == (train, val)
    assert split_by_picture(pictures, 0.2, seed=1) != (train, val)
    assert split_by_picture(pictures[:3], 0.2, seed=0) == ([0, 1, 2], [])  # one picture: all of it trains


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 0},
        {"num_workers": -1},
        {"threads": -1},
        {"checksums": "never"},
        {"val_fraction": 1.0},
        {"shuffle_buffer": -1},
    ],
)
def test_settings_are_refused_by_name(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        LoaderConfig(**change)
