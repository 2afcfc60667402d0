"""The tokenizer: byte-level BPE with the target's special tokens; digits and capitals are tokens of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
#: Those of every small target.
CHAT_TOKENS = (END_OF_TEXT, IM_START, IM_END)
#: Qwen2.5-VL's.
SPECIAL_TOKENS = (*CHAT_TOKENS, VISION_START, VISION_END, "<|vision_pad|>", IMAGE_PAD, VIDEO_PAD)

#: Lower-case words take their leading space along; a capital, a digit, a mark and a run of spaces stand alone.
_PIECES = r" ?[\p{Ll}\p{Lo}\p{M}]+|\p{Lu}|\p{N}| ?[^\s\p{L}\p{N}]|\s+"


def chat_template(**written: str) -> str:
    """ChatML, with ``written`` where a part of that type belongs."""
    parts = "{%- el".join(f"if part['type'] == '{kind}' -%}}{{{{- '{text}' -}}}}" for kind, text in written.items())
    return (
        "{%- for message in messages -%}"
        "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
        "{%- if message['content'] is string -%}{{- message['content'] -}}"
        "{%- else -%}{%- for part in message['content'] -%}"
        "{%- " + parts.replace("\n", "\\n") + "{%- else -%}{{- part['text'] -}}{%- endif -%}"
        "{%- endfor -%}{%- endif -%}"
        "{{- '<|im_end|>\\n' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )


#: Qwen2.5-VL's.
CHAT_TEMPLATE = chat_template(
    image=f"{VISION_START}{IMAGE_PAD}{VISION_END}", video=f"{VISION_START}{VIDEO_PAD}{VISION_END}"
)


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    template: str = CHAT_TEMPLATE,
) -> PreTrainedTokenizerFast:
    """A BPE of at most ``vocab_size`` entries, special tokens and all 256 bytes among them; any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[t for t in special_tokens if t not in (IM_END, END_OF_TEXT)],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
