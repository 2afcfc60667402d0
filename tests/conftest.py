"""Shared fixtures: a small Qwen2.5-VL with random weights that are large enough for mistakes to show.

A default-initialised model is almost linear: wrong positions or masks change its logits by less than a test would
notice. Here every matrix keeps the scale of what it reads, biases and norms differ from their defaults, and a wrong
position changes the greedy tokens at once.
"""

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
def small_target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder of a 4-layer Qwen2.5-VL, fp32, with tokenizer, processor and chat template."""
    from transformers import (
        GenerationConfig,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    from fovea.targets.tiny.tokenizer import CHAT_TEMPLATE, train_tokenizer

    folder = tmp_path_factory.mktemp("small_target")
    tokenizer = train_tokenizer(["what is in the picture", "the red square and the blue circle"], 300)
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "bos_token_id": None,
            "eos_token_id": ids("<|im_end|>"),
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    enlarge_weights(model, seed=0)
    # A trained target never answers with a placeholder; transformers would look for the picture behind it.
    placeholders = [ids(token) for token in ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")]
    model.lm_head.weight.data[placeholders] = 0.0
    model.generation_config = GenerationConfig(
        eos_token_id=[ids("<|im_end|>"), ids("<|endoftext|>")],
        pad_token_id=ids("<|endoftext|>"),
        repetition_penalty=1.3,
    )
    model.save_pretrained(folder)
    pixels = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)
    return folder


def enlarge_weights(model: torch.nn.Module, seed: int) -> None:
    """Draws all weights anew: matrices of gain 1.5, biases and norm weights away from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "embed_tokens" in name:
                weight.copy_(noise)
            elif weight.ndim > 1:
                weight.copy_(noise * 1.5 / weight[0].numel() ** 0.5)
            else:
                weight.copy_((1.0 if "norm" in name or "ln_q" in name else 0.0) + 0.3 * noise)


@pytest.fixture(scope="session")
def enlarge() -> Callable[..., None]:
    """:func:`enlarge_weights`, for other small models."""
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
