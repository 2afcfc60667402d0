"""A target that teaches made-up states at once, and the conversations that it can be asked about."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import pytest
import torch
from PIL import Image

from fovea.artifacts.config import ExportConfig
from fovea.artifacts.fingerprint import Fingerprint
from fovea.targets.base import Encoded
from fovea.targets.conversation import Conversation
from fovea.targets.images import open_image
from fovea.targets.teacher_batch import TeacherSample, supervised_positions

WIDTH = 16


def sample_of(key: str, tokens: int = 12, visual: int = 3, answer: int = 4, dtype=torch.bfloat16) -> TeacherSample:
    """A sample with numbers that depend on its key alone; its last ``answer`` tokens are supervised."""
    generator = torch.Generator().manual_seed(int(hashlib.sha256(key.encode()).hexdigest()[:8], 16))

    def states(rows: int) -> torch.Tensor:
        return torch.randn(rows, WIDTH, generator=generator).to(dtype)

    answer_mask = torch.arange(tokens) >= tokens - answer
    is_visual = torch.arange(tokens) < visual
    return TeacherSample(
        key=key,
        ids=torch.randint(0, 1000, (tokens,), generator=generator),
        positions=torch.arange(tokens).expand(3, -1).contiguous(),
        answer_mask=answer_mask,
        is_visual=is_visual,
        last=states(tokens),
        mid=states(int(supervised_positions(answer_mask).sum())),
        visual=states(visual),
        grids=((1, visual),) if visual else (),
        importance=torch.rand(visual, generator=generator),
    )


class FakeTarget:
    """Teaches :func:`sample_of` the key; the answers have as many tokens as the assistant's text has letters."""

    device = torch.device("cpu")

    def __init__(self, before_teach: Callable[[Sequence[Encoded]], None] = lambda batch: None):
        self.before_teach = before_teach
        self.batches: list[int] = []

    def encode(self, conversation: Conversation, answers: Sequence[Sequence[int]] | None = None) -> Encoded:
        for image in conversation.images:
            open_image(image)
        said = "".join(m["content"] for m in conversation.messages if m["role"] == "assistant")
        length = len(said) if answers is None else sum(map(len, answers))
        tokens = 8 + length
        return Encoded(
            key=conversation.key,
            ids=torch.arange(tokens),
            positions=torch.arange(tokens).expand(3, -1),
            answer_mask=torch.arange(tokens) >= 8,
            next_position=tokens,
            is_visual=torch.arange(tokens) < 3,
            image_sizes=((10, 20),) * len(conversation.images),
        )

    def answer(self, conversations, max_new_tokens, batch_size):
        return [[[1, 2, 3]] for _ in conversations]

    def teach(self, batch: Sequence[Encoded], mid_layers: Sequence[int]) -> list[TeacherSample]:
        self.batches.append(len(batch))
        self.before_teach(batch)
        return [sample_of(item.key, len(item.ids), answer=int(item.answer_mask.sum())) for item in batch]


def conversation(key: str, answer: str = "four", images: tuple = ()) -> Conversation:
    """One question, and its answer if there is one."""
    parts = [{"type": "image"}] * len(images) + [{"type": "text", "text": f"what is {key}?"}]
    messages: list[dict] = [{"role": "user", "content": parts}]
    return Conversation(key, [*messages, {"role": "assistant", "content": answer}], images, source="test")


@pytest.fixture
def conversations() -> list[Conversation]:
    """Ten conversations with awkward keys, some of which share a picture."""
    keys = [
        "v1.5/a",
        "v1.5/A",
        "v1.6",
        "COCO_val.000123",
        "ünï çode",
        "50%",
        "a.b",
        "a",
        "x" * 300,
        "http://h/?q=1.png",
    ]
    pictures = [Image.new("RGB", (10, 20), (i, 0, 0)) for i in range(5)]
    return [conversation(key, images=(pictures[i // 2],)) for i, key in enumerate(keys)]


@pytest.fixture
def config() -> ExportConfig:
    """Shards of a few samples, the data set's answers."""
    return ExportConfig(mid_layers=(1, 2), answers="dataset", batch_size=2, shard_bytes=6_000)


@pytest.fixture
def fingerprint() -> Fingerprint:
    """Of no real target."""
    return Fingerprint(
        weights="abc", processor={"max_pixels": 4}, data="d", mid_layers=(1, 2), dtype="bf16", answers="dataset"
    )


def assert_same(one: TeacherSample, other: TeacherSample, tolerance: float = 0.0) -> None:
    """Both hold the same tensors, of the same dtypes."""
    assert (one.key, one.grids) == (other.key, other.grids)
    for name in ("ids", "positions", "answer_mask", "is_visual", "last", "mid", "visual", "importance"):
        a, b = getattr(one, name), getattr(other, name)
        assert a.dtype == b.dtype, name
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(name="make_sample")
def _make_sample():
    return sample_of


@pytest.fixture(name="fake_target")
def _fake_target():
    return FakeTarget


@pytest.fixture(name="make_conversation")
def _make_conversation():
    return conversation


@pytest.fixture(name="assert_same")
def _assert_same():
    return assert_same
