"""Pictures of every kind and shape, through every adapter that sees, as files that people have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fovea.targets.chat_template import PromptError
from fovea.targets.conversation import Conversation
from fovea.targets.images import BrokenImageError

SEEING = ("qwen25vl", "llava_next_vicuna", "llava15")


@pytest.fixture(params=SEEING, scope="module")
def target(request: pytest.FixtureRequest, twin: Callable[[str], Any]) -> Any:
    return twin(request.param).target


def showing(*images: Any) -> Conversation:
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": "what is it"}]
    return Conversation("shown", [{"role": "user", "content": content}], images)


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (1, 2), (3, 5), (1, 150), (150, 1), (600, 4), (27, 1000)])
def test_tiny_and_extreme_shapes(target: Any, size: tuple[int, int]) -> None:
    """As many visual tokens as places, finite, alone and beside an ordinary picture."""
    odd, plain = Image.new("RGB", size, "red"), Image.new("RGB", (60, 40), "blue")
    for images in ((odd,), (odd, plain), (plain, odd)):
        encoded = target.encode(showing(*images))
        _, prefill = target.prefill(encoded, 1)
        assert prefill.visual.shape[0] == sum(rows * columns for rows, columns in encoded.grids)
        assert torch.isfinite(prefill.hidden).all()
        assert encoded.image_sizes == tuple(image.size for image in images)


def test_what_is_longer_than_any_picture_is_refused_by_name_or_read(target: Any) -> None:
    sliver = Image.new("RGB", (2000, 1))
    if target.spec.architecture == "LlavaNextForConditionalGeneration":  # it scales the long side, and never grows it
        assert target.encode(showing(sliver)).image_sizes == ((2000, 1),)
        return
    with pytest.raises(PromptError, match=r"conversation 'shown': the image processor says: .*200"):
        target.encode(showing(sliver))


def test_another_file_format_is_the_same_prompt(target: Any, tmp_path: Path) -> None:
    """Turned, with a palette, as WebP, with an alpha: the pixels are the same, and so are the inputs."""
    pixels = np.zeros((40, 60, 3), dtype=np.uint8)
    pixels[:15, :20], pixels[15:, 30:] = (255, 0, 0), (0, 255, 255)
    plain = Image.fromarray(pixels)
    turned, exif = plain.transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.png", exif=exif)
    plain.quantize(8).save(tmp_path / "palette.gif")
    plain.save(tmp_path / "lossless.webp", lossless=True)
    plain.convert("RGBA").save(tmp_path / "opaque.png")
    expected = target.encode(showing(plain))
    for name in ("turned.png", "palette.gif", "lossless.webp", "opaque.png"):
        encoded = target.encode(showing(tmp_path / name))
        assert encoded.ids.tolist() == expected.ids.tolist(), name
        for key, value in expected.vision.items():
            assert torch.equal(encoded.vision[key], value), name
    grey = target.encode(showing(plain.convert("L")))
    assert not torch.equal(grey.vision["pixel_values"], expected.vision["pixel_values"])


def test_a_broken_file_is_named_before_any_work(target: Any, tmp_path: Path) -> None:
    (tmp_path / "page.png").write_text("<html>404</html>")
    with pytest.raises(BrokenImageError, match=r"page\.png"):
        target.encode(showing(Image.new("RGB", (40, 40)), tmp_path / "page.png"))
