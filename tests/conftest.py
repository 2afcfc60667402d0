"""Shared fixtures: small checkpoints of every architecture, one of them loaded, and conversations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw

from fovea.targets.conversation import Conversation


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small checkpoint by its name, see :func:`tests.small_checkpoints.save_checkpoint`; each is made
    once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        from tests.small_checkpoints import save_checkpoint

        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            save_checkpoint(name, folder)
            made[name] = folder
        return made[name]

    return make


@pytest.fixture(scope="session")
def small_target_path(small_checkpoint: Callable[[str], Path]) -> Path:
    """A checkpoint folder of a 4-layer Qwen2.5-VL, fp32, with tokenizer, processor and chat template."""
    return small_checkpoint("qwen25vl")


@pytest.fixture(scope="session")
def enlarge() -> Callable[..., None]:
    """:func:`tests.small_checkpoints.enlarge_weights`, for other small models."""
    from tests.small_checkpoints import enlarge_weights

    return enlarge_weights


@pytest.fixture(scope="session")
def small_target(small_target_path: Path):
    """The small target, loaded as any other, fp32 on the CPU."""
    from fovea.targets.load import load_target

    return load_target(small_target_path, device="cpu", dtype=torch.float32)


def picture(width: int, height: int, seed: int) -> Image.Image:
    """A few rectangles in random colours."""
    generator = torch.Generator().manual_seed(seed)
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        x, y, w, h, *colour = torch.randint(0, 256, (7,), generator=generator).tolist()
        left, top = x * width // 300, y * height // 300
        draw.rectangle((left, top, left + w * width // 500, top + h * height // 500), fill=tuple(colour))
    return image


@pytest.fixture(scope="session")
def small_conversations() -> list[Conversation]:
    """Eight conversations: pictures of several shapes, two pictures, none, several turns, a prompt without answer."""

    def shown(text: str, images: int = 1) -> list[dict]:
        return [{"type": "image"}] * images + [{"type": "text", "text": text}]

    def turns(*contents, role: str = "user") -> list[dict]:
        roles = ("user", "assistant")
        return [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]

    between = [
        {"type": "text", "text": "first "},
        {"type": "image"},
        {"type": "text", "text": " then "},
        {"type": "image"},
    ]
    return [
        Conversation("image", turns(shown("what is in the picture?"), "a red square"), (picture(112, 84, 1),), "image"),
        Conversation("wide", turns(shown("which colours?"), "blue, green and red"), (picture(196, 56, 2),), "image"),
        Conversation("tall", turns(shown("how many?"), "4"), (picture(56, 168, 3),), "image"),
        Conversation(
            "two", turns(shown("what differs?", 2), "the circle"), (picture(84, 84, 4), picture(112, 56, 5)), "two"
        ),
        Conversation("between", turns(between, "both are blue"), (picture(56, 84, 6), picture(84, 56, 7)), "two"),
        Conversation("text", turns("name a colour", "the blue circle"), (), "text"),
        Conversation(
            "turns",
            turns(shown("what is it?"), "a circle", "and its colour?", "red", shown("and here?"), "the blue square"),
            (picture(84, 112, 8), picture(56, 56, 9)),
            "turns",
        ),
        Conversation("prompt", turns(shown("describe the picture in the middle")), (picture(140, 112, 10),), "image"),
    ]
