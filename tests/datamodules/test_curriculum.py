"""Texts first, then ever more pictures: shares, orders that depend on seed and place alone, and what is refused."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.artifacts import ArtifactDataModule
from datamodules.conversations import ConversationSource, TinyConversations
from datamodules.curriculum import Curriculum, CurriculumSampler
from datamodules.loading import LoaderConfig
from datamodules.online import OnlineDataModule
from fovea.artifacts.config import ExportConfig
from fovea.artifacts.errors import ArtifactError

EPOCHS = 8


def sampler(pictures: int = 300, texts: int = 100, length: int = 400, text_share: float = 0.5, **more):
    pictured = [True] * pictures + [False] * texts
    return CurriculumSampler(pictured, length, Curriculum(text_share), lambda: EPOCHS, **more)


def epoch(sampler: CurriculumSampler, number: int) -> list[int]:
    sampler.set_epoch(number)
    return list(sampler)


def test_the_share_of_pictures_is_none_and_then_rises_to_all() -> None:
    one = sampler(length=4000)
    shares = [sum(n < 300 for n in epoch(one, number)) / 4000 for number in range(EPOCHS)]
    assert shares[:4] == [0] * 4
    assert shares[4:] == pytest.approx([1 / 8, 3 / 8, 5 / 8, 7 / 8], abs=0.03)
    last = epoch(one, EPOCHS - 1)
    assert sum(n < 300 for n in last[-200:]) > 190
    assert Curriculum(0).picture_share(torch.tensor([0.0, 0.25, 1.0])).tolist() == [0, 0.25, 1]


def test_every_sample_of_a_kind_comes_once_before_any_comes_again() -> None:
    order = epoch(sampler(), 0)
    assert len(order) == 400
    for start in range(0, 400, 100):
        assert sorted(order[start : start + 100]) == list(range(300, 400))
    assert order[:100] != order[100:200]
    mixed = epoch(sampler(), 6)
    seen = [n for n in mixed if n < 300]
    assert len(seen) == len(set(seen)) > 100


@settings(max_examples=50, deadline=None)
@given(number=st.integers(0, EPOCHS - 1), ranks=st.integers(1, 5), length=st.integers(1, 60))
def test_ranks_share_the_order_of_one(number: int, ranks: int, length: int) -> None:
    shares = [epoch(sampler(length=length, num_replicas=ranks, rank=rank), number) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    dealt = [n for row in zip(*shares, strict=True) for n in row]
    # The first ones come again, so that all have equally many.
    one = epoch(sampler(length=length), number)
    assert dealt == [one[place % length] for place in range(-(-length // ranks) * ranks)]


def test_an_epoch_can_be_run_again_whatever_ran_before() -> None:
    one, other = sampler(seed=3), sampler(seed=3)
    first = [epoch(one, number) for number in range(EPOCHS)]
    torch.manual_seed(99)
    assert epoch(other, 5) == first[5]
    assert epoch(sampler(seed=4), 5) != first[5]
    assert first[5] != first[6]


def test_shares_that_leave_no_room_are_refused() -> None:
    for share in (1.0, -0.1):
        with pytest.raises(ValueError, match=r"curriculum\.text_share is"):
            Curriculum(share)


class Given(ConversationSource):
    """A few conversations that are there already."""

    def __init__(self, *items):
        self.items = items

    def _read(self):
        return list(self.items)

    def digest(self) -> str:
        return "-".join(item.key for item in self.items)


class Recorder(L.LightningModule):
    """Trains nothing and remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[bool]] = []
        self.keys: list[str] = []

    def training_step(self, batch, index):
        if index == 0:
            self.seen.append([])
        self.seen[-1] += batch.visual_valid.any(1).tolist()
        self.keys += batch.keys
        return self.weight

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def make_data(small_target, small_target_path, small_conversations, tmp_path_factory):
    """A data module; the keys say which conversations are in ``train`` and which in ``texts``."""
    root = tmp_path_factory.mktemp("artifacts")
    by_key = {conversation.key: conversation for conversation in small_conversations}

    def make(train: list[str], texts: list[str] | None, *, online: bool = False, **loader) -> L.LightningDataModule:
        given = {
            "export": ExportConfig(mid_layers=(1, 2), answers="dataset"),
            "load_target": lambda: small_target,
            "train": Given(*(by_key[key] for key in train)),
            "texts": Given(*(by_key[key] for key in texts)) if texts else None,
            "loader": LoaderConfig(**{"batch_size": 2, "val_fraction": 0.0, "curriculum": Curriculum(0.5)} | loader),
        }
        if online:
            return OnlineDataModule(**given)
        return ArtifactDataModule(checkpoint=small_target_path, root=root, progress=False, **given)

    return make


def fit(data: L.LightningDataModule, **ends) -> Recorder:
    recorder = Recorder()
    trainer = L.Trainer(
        **ends, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(recorder, datamodule=data)
    return recorder


def test_training_follows_the_curriculum(make_data) -> None:
    """An epoch is as long as without texts."""
    pictures = ["image", "wide", "tall", "two", "between", "turns"]
    seen = fit(make_data(pictures, ["text"]), max_epochs=4).seen
    assert [len(epoch) for epoch in seen] == [6] * 4
    assert not any(seen[0] + seen[1])
    assert 0 < sum(seen[2]) + sum(seen[3]) < 12
    assert sum(fit(make_data([*pictures, "text"], None), max_epochs=4).seen[0]) == 0
    # An epoch of one step: the curriculum ends with the last of forty.
    steps = fit(make_data(["image", "text"], None), max_steps=40).seen
    assert not any(any(step) for step in steps[:20])
    assert all(steps[-1])
    assert all(any(epoch) for epoch in fit(make_data(pictures, ["text"], curriculum=None), max_epochs=1).seen)


def test_the_live_target_teaches_the_same_samples_in_the_same_order(make_data) -> None:
    runs = [fit(make_data(["image", "wide", "two"], ["text"], online=online), max_epochs=3) for online in (True, False)]
    assert runs[0].keys == runs[1].keys
    assert not any(runs[0].seen[0])
    assert any(runs[0].seen[2])


@pytest.mark.parametrize(
    ("train", "texts", "ends", "message"),
    [
        (["image"], None, {"max_epochs": 1}, r"none without a picture: name some in data\.texts"),
        (["text"], None, {"max_epochs": 1}, r"none with a picture: name some in data\.train"),
        (["image"], ["text"], {"max_epochs": -1}, r"set trainer\.max_epochs or trainer\.max_steps"),
    ],
)
def test_a_curriculum_without_one_kind_or_without_end_is_refused(make_data, train, texts, ends, message) -> None:
    with pytest.raises(ArtifactError, match=message):
        fit(make_data(train, texts), **ends)


def test_questions_can_be_asked_without_showing_the_picture() -> None:
    shown, unseen = TinyConversations("train", 10, seed=1), TinyConversations("train", 10, seed=1, shown=False)
    assert shown.digest() != unseen.digest()
    assert any(conversation.images for conversation in shown)
    for one, other in zip(shown, unseen, strict=True):
        assert not other.images
        assert one.key != other.key
        assert [m for m in one.messages if m["role"] == "assistant"] == other.messages[1::2]
        texts = [[p for p in m["content"] if p["type"] == "text"] for m in one.messages[::2]]
        assert [m["content"] for m in other.messages[::2]] == texts
