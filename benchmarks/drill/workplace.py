"""What the jobs of the drill work on: a target of random weights and a dozen conversations."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from PIL import Image
from transformers import GenerationConfig

from fovea.targets.tiny.config import TinyConfig
from fovea.targets.tiny.qwen25vl import Qwen25VL
from fovea.targets.tiny.tokenizer import END_OF_TEXT, IM_END, train_tokenizer

CONVERSATIONS = 12
_SIZE = TinyConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=128,
    layers=4,
    num_heads=4,
    num_kv_heads=2,
    mrope_section=(2, 3, 3),
    vision_depth=2,
    vision_hidden_size=32,
    vision_intermediate_size=64,
    vision_heads=2,
)


def places(folder: Path) -> tuple[Path, Path]:
    """Where :func:`prepare` puts the target's checkpoint and the file of conversations."""
    return folder / "target", folder / "conversations.jsonl"


def prepare(folder: Path) -> None:
    """Makes them in ``folder``."""
    target, conversations = places(folder)
    architecture = Qwen25VL()
    texts = ["what is in the picture", "the red square and the blue circle"]
    tokenizer = train_tokenizer(texts, _SIZE.vocab_size, architecture.special_tokens, architecture.template)
    model = architecture.new_model(_SIZE, tokenizer, _SIZE.layers)
    _draw(model)
    ids = tokenizer.get_vocab()
    model.generation_config = GenerationConfig(eos_token_id=ids[IM_END], pad_token_id=ids[END_OF_TEXT], do_sample=False)
    model.save_pretrained(target)
    architecture.processor(_SIZE, tokenizer).save_pretrained(target)
    with conversations.open("w", encoding="utf-8") as stream:
        for number in range(CONVERSATIONS):
            images = [f"{number}.png"] if number % 6 else []
            for name in images:
                Image.new("RGB", (84 + 28 * (number % 3), 84), (20 * number, 90, 160)).save(folder / name)
            question = [{"type": "image"}] * len(images) + [{"type": "text", "text": f"what is it? {number}"}]
            record = {"key": f"k.{number}", "messages": [{"role": "user", "content": question}], "images": images}
            stream.write(json.dumps(record | {"source": "ab"[number % 2]}) + "\n")


@torch.no_grad()
def _draw(model: torch.nn.Module) -> None:
    """Weights so large that answers differ from one question to the next."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "embed_tokens" in name:
            weight.copy_(noise)
        elif weight.ndim > 1:
            weight.copy_(noise * 1.5 / weight[0].numel() ** 0.5)
        else:
            weight.copy_((1.0 if "norm" in name or "ln_q" in name else 0.0) + 0.3 * noise)
