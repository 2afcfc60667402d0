"""Small checkpoints of every architecture, with random weights that are large enough for mistakes to show.

A default-initialised model is almost linear: wrong positions or masks change its logits by less than a test would
notice. Here every matrix keeps the scale of what it reads, biases and norms differ from their defaults, and a wrong
position changes the greedy tokens at once.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPImageProcessor,
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaTokenizer,
    LlavaConfig,
    LlavaNextConfig,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaProcessor,
    MistralConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3Config,
)

from fovea.targets.tiny.tokenizer import CHAT_TEMPLATE, train_tokenizer

TEXT_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 768,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: As Vicuna's: pictures first, a space behind every text, no end token behind an answer.
VICUNA = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}{% endif %}"
    "{% for p in m['content'] if p['type'] == 'image' %}{{ '<image>\\n' }}{% endfor %}"
    "{% for p in m['content'] if p['type'] == 'text' %}{{ p['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
#: As Mistral's: brackets, an end token behind an answer; parts in their order.
MISTRAL = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' }}{% for p in m['content'] %}"
    "{{ '<image>\\n' if p['type'] == 'image' else p['text'] }}{% endfor %}{{ ' [/INST]' }}"
    "{% else %}{% for p in m['content'] %}{{ ' ' + p['text'] + '</s>' }}{% endfor %}{% endif %}{% endfor %}"
)
#: For strings, without a word for the roles' end but the end token.
PLAIN = (
    "{% for m in messages %}{{ '[' + m['role'] + ']\\n' + m['content'] + '</s>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\\n' }}{% endif %}"
)


def save_checkpoint(name: str, folder: Path) -> None:
    """Writes the checkpoint called ``name`` into ``folder``: fp32, with tokenizer or processor and chat template.

    ``qwen25vl``, ``llava15``, ``llava_next_vicuna``, ``llava_next_mistral``, or a language model's ``model_type``.
    """
    if name == "qwen25vl":
        _save_qwen25vl(folder)
    elif name.startswith("llava"):
        _save_llava(name, folder, llama_tokenizer())
    else:
        _save_language_model(name, folder, llama_tokenizer())


def llama_tokenizer(*, plain: bool = False) -> LlamaTokenizer:
    """A small tokenizer of Llama's kind: words with their leading space, bytes for the rest, and an image token unless
    it is to be ``plain``."""
    vocab, merges = _llama_vocabulary()
    tokenizer = LlamaTokenizer(vocab=dict(vocab), merges=list(merges), add_bos_token=True)
    if not plain:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"], "pad_token": "<pad>"})
    return tokenizer


@cache
def _llama_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    bpe = Tokenizer(models.BPE(byte_fallback=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    bpe.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    texts = ["what is in the picture", "the red square and the blue circle", "USER: ASSISTANT: [INST] [/INST] user"]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    return bpe.get_vocab(), [tuple(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]


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


def _save_qwen25vl(folder: Path) -> None:
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


def _save_language_model(name: str, folder: Path, tokenizer: LlamaTokenizer) -> None:
    kinds: dict[str, Any] = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    own = {"mistral": {"sliding_window": None}, "llama": {"tie_word_embeddings": True}}.get(name, {})
    config = kinds[name](vocab_size=len(tokenizer), **TEXT_SIZES, **own)
    model = AutoModelForCausalLM.from_config(config)
    tokenizer.chat_template = PLAIN
    save(model, folder, tokenizer, tokenizer)


def _save_llava(name: str, folder: Path, tokenizer: LlamaTokenizer) -> None:
    text = MistralConfig if name.endswith("mistral") else LlamaConfig
    own = {"sliding_window": None} if name.endswith("mistral") else {}
    tower = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=28, patch_size=7
    )
    shared = {
        "text_config": text(vocab_size=len(tokenizer), **TEXT_SIZES, **own),
        "vision_config": tower,
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
    }
    size: dict[str, Any] = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    # The processors of older checkpoints say nothing about the vision tower.
    if name == "llava15":
        config: Any = LlavaConfig(**shared)
        processor: Any = LlavaProcessor(CLIPImageProcessor(**size), tokenizer, chat_template=VICUNA)
    else:
        pinpoints = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
        config = LlavaNextConfig(**shared, image_grid_pinpoints=pinpoints)
        template = MISTRAL if name.endswith("mistral") else VICUNA
        images = LlavaNextImageProcessor(**size, image_grid_pinpoints=pinpoints)
        processor = LlavaNextProcessor(images, tokenizer, chat_template=template)
    save(AutoModelForImageTextToText.from_config(config), folder, processor, tokenizer)


def save(model: Any, folder: Path, processor: Any, tokenizer: Any, eos: str = "</s>") -> None:
    """Draws the weights of ``model`` anew and writes it into ``folder``, with what reads its inputs."""
    enlarge_weights(model, seed=1)
    ids = tokenizer.convert_tokens_to_ids
    # A trained target never answers with a placeholder.
    model.get_output_embeddings().weight.data[ids("<image>")] = 0.0
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=ids(eos), pad_token_id=ids(eos), repetition_penalty=1.2
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
