"""References that share no code with ours: the same checkpoints, loaded by transformers with eager attention."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
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
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen3Config,
)

from fovea.targets.base import Encoded
from fovea.targets.conversation import Conversation
from fovea.targets.hf import HFTarget
from fovea.targets.load import load_target


@pytest.fixture(scope="session")
def reference_model(small_target_path: Path) -> Any:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(
        small_target_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="session")
def reference_output(reference_model: Any) -> Callable[..., Any]:
    """``(encoded, more ids, **flags)``: the output of a plain forward over the whole text, positions left to it."""

    def forward(encoded: Encoded, more: Sequence[int] = (), **flags: Any) -> Any:
        ids = torch.cat([encoded.ids, torch.tensor(list(more), dtype=torch.int64)])[None]
        inputs: dict[str, Tensor] = dict(encoded.vision)
        if inputs:
            kinds = torch.zeros_like(ids, dtype=torch.int32)
            kinds[0, : encoded.ids.shape[0]] = encoded.is_visual
            inputs["mm_token_type_ids"] = kinds
        with torch.no_grad():
            return reference_model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs, **flags)

    return forward


@dataclass(frozen=True)
class Twin:
    """A small target and what transformers makes of the same checkpoint and conversations, by its own processor."""

    name: str
    folder: Path

    @cached_property
    def target(self) -> HFTarget:
        return load_target(self.folder)

    @cached_property
    def model(self) -> Any:
        auto = AutoModelForImageTextToText if self.sees else AutoModelForCausalLM
        return auto.from_pretrained(self.folder, dtype=torch.float32, attn_implementation="eager").eval()

    @property
    def sees(self) -> bool:
        return self.target.image_token is not None

    def inputs(self, conversation: Conversation) -> dict[str, Tensor]:
        """What the processor feeds the model, a trailing user turn with its generation prompt."""
        processor: Any = self.target.processor
        as_read = self._parts if self.sees else self._string
        messages = [{"role": m["role"], "content": as_read(m["content"])} for m in conversation.messages]
        text = processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=messages[-1]["role"] == "user"
        )
        if not self.sees:
            return {"input_ids": processor(text, return_tensors="pt")["input_ids"]}
        images = [list(conversation.images)] if conversation.images else None
        return dict(processor(text=[text], images=images, return_tensors="pt"))

    @staticmethod
    def _parts(content: Any) -> list[dict[str, Any]]:
        return [{"type": "text", "text": content}] if isinstance(content, str) else content

    @staticmethod
    def _string(content: Any) -> str:
        return content if isinstance(content, str) else "".join(part["text"] for part in content)

    def forward(self, conversation: Conversation, more: Sequence[int] = (), **flags: Any) -> Any:
        """The output of a plain forward over the conversation and ``more`` ids."""
        inputs = self.inputs(conversation)
        added = torch.tensor([list(more)], dtype=torch.int64)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], added], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(added)], 1)
        with torch.no_grad():
            return self.model(**inputs, **flags)

    def generate(self, conversation: Conversation, count: int) -> list[int]:
        """transformers' greedy answer, none of the checkpoint's generation settings applied."""
        inputs = self.inputs(conversation)
        output = self.model.generate(**inputs, max_new_tokens=count, do_sample=False, repetition_penalty=1.0)
        return output[0, inputs["input_ids"].shape[1] :].tolist()


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


@pytest.fixture(scope="session")
def llama_tokenizer() -> Callable[..., LlamaTokenizer]:
    """Makes a small tokenizer of Llama's kind: words with their leading space, bytes for the rest, and an image token
    unless it is to be ``plain``."""
    bpe = Tokenizer(models.BPE(byte_fallback=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    bpe.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    texts = ["what is in the picture", "the red square and the blue circle", "USER: ASSISTANT: [INST] [/INST] user"]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    vocab, merges = bpe.get_vocab(), [tuple(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]

    def make(*, plain: bool = False) -> LlamaTokenizer:
        tokenizer = LlamaTokenizer(vocab=dict(vocab), merges=list(merges), add_bos_token=True)
        if plain:
            return tokenizer
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"], "pad_token": "<pad>"})
        return tokenizer

    return make


@pytest.fixture(scope="session")
def twin(
    small_target_path: Path, tmp_path_factory: pytest.TempPathFactory, llama_tokenizer: Any, enlarge: Any
) -> Callable[[str], Twin]:
    """Makes the twins by name, each once."""
    made: dict[str, Twin] = {}

    def make(name: str) -> Twin:
        if name == "qwen25vl":
            return made.setdefault(name, Twin(name, small_target_path))
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            tokenizer = llama_tokenizer()
            (_save_llava if name.startswith("llava") else _save_language_model)(name, folder, tokenizer, enlarge)
            made[name] = Twin(name, folder)
        return made[name]

    return make


@pytest.fixture(scope="session")
def twin_at() -> Callable[[Path, str], Twin]:
    """``(folder, name)``: a twin of the checkpoint in a folder."""
    return lambda folder, name: Twin(name, folder)


@pytest.fixture(scope="session")
def twin_of(enlarge: Any) -> Callable[..., Twin]:
    """``(model, folder, processor, tokenizer, eos)``: a twin of any other model; it may have an adapter of its own."""

    def make(model: Any, folder: Path, processor: Any, tokenizer: Any, *, eos: str) -> Twin:
        _save(model, folder, processor, tokenizer, enlarge, eos)
        return Twin(folder.name, folder)

    return make


def _save_language_model(name: str, folder: Path, tokenizer: LlamaTokenizer, enlarge: Any) -> None:
    kinds: dict[str, Any] = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    own = {"mistral": {"sliding_window": None}, "llama": {"tie_word_embeddings": True}}.get(name, {})
    config = kinds[name](vocab_size=len(tokenizer), **TEXT_SIZES, **own)
    model = AutoModelForCausalLM.from_config(config)
    tokenizer.chat_template = PLAIN
    _save(model, folder, tokenizer, tokenizer, enlarge)


def _save_llava(name: str, folder: Path, tokenizer: LlamaTokenizer, enlarge: Any) -> None:
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
    size = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
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
    _save(AutoModelForImageTextToText.from_config(config), folder, processor, tokenizer, enlarge)


def _save(model: Any, folder: Path, processor: Any, tokenizer: LlamaTokenizer, enlarge: Any, eos: str = "</s>") -> None:
    enlarge(model, seed=1)
    ids = tokenizer.convert_tokens_to_ids
    # A trained target never answers with a placeholder.
    model.get_output_embeddings().weight.data[ids("<image>")] = 0.0
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=ids(eos), pad_token_id=ids(eos), repetition_penalty=1.2
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
