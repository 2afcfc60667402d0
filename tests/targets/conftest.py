"""References that share no code with ours: the same checkpoints, loaded by transformers with eager attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaTokenizer,
    Qwen2_5_VLForConditionalGeneration,
)

from fovea.targets.base import Encoded
from fovea.targets.conversation import Conversation
from fovea.targets.hf import HFTarget
from fovea.targets.load import load_target
from tests.small_checkpoints import llama_tokenizer as make_llama_tokenizer
from tests.small_checkpoints import save


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


@pytest.fixture(scope="session")
def llama_tokenizer() -> Callable[..., LlamaTokenizer]:
    """:func:`tests.small_checkpoints.llama_tokenizer`."""
    return make_llama_tokenizer


@pytest.fixture(scope="session")
def twin(small_checkpoint: Callable[[str], Path]) -> Callable[[str], Twin]:
    """Makes the twins by name, each once."""
    made: dict[str, Twin] = {}
    return lambda name: made.setdefault(name, Twin(name, small_checkpoint(name)))


@pytest.fixture(scope="session")
def twin_at() -> Callable[[Path, str], Twin]:
    """``(folder, name)``: a twin of the checkpoint in a folder."""
    return lambda folder, name: Twin(name, folder)


@pytest.fixture(scope="session")
def twin_of() -> Callable[..., Twin]:
    """``(model, folder, processor, tokenizer, eos)``: a twin of any other model; it may have an adapter of its own."""

    def make(model: Any, folder: Path, processor: Any, tokenizer: Any, *, eos: str) -> Twin:
        save(model, folder, processor, tokenizer, eos)
        return Twin(folder.name, folder)

    return make
