"""Prompts that a language model writes itself, for users who have a target and no conversations:

    python -m fovea.artifacts.prompts --target FOLDER --out prompts.jsonl --count 400

A chat model that is given its template up to where the user speaks goes on with what a user might say (Magpie, Xu et
al. 2024, section 2). The file has the layout that ``data=jsonl`` reads; the answers are the target's, when artifacts
are exported.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from fovea.artifacts.command import COMPUTE_DTYPES
from fovea.targets.checkpoint import CheckpointError
from fovea.targets.hf import HFTarget

_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
#: Shorter texts are no question, longer ones rarely end.
_LEAST_TOKENS, _MOST_TOKENS = 5, 96


def user_prefix(target: HFTarget) -> list[int]:
    """Token ids of the chat template up to where the first user speaks.

    Raises:
        CheckpointError: the target has no chat template, or one that does not show what the user says.
    """
    if not getattr(target.tokenizer, "chat_template", None):
        raise CheckpointError("the target has no chat template, so nothing tells it that a user speaks")
    text = target.tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    before, mark, _ = text.partition(_MARK)
    if not mark:
        raise CheckpointError("the chat template of the target does not show what the user says")
    return target.tokenizer(before, add_special_tokens=False).input_ids


@torch.inference_mode()
def write_prompts(
    target: HFTarget, *, temperature: float = 1.0, top_p: float = 0.95, batch_size: int = 32, seed: int = 0
) -> Iterator[str]:
    """Texts that a user might write, each one once, without end; sampled in batches from ``seed`` on."""
    prefix = torch.tensor([user_prefix(target)] * batch_size, device=target.device)
    model: Any = target.model
    seen: set[str] = set()
    torch.manual_seed(seed)
    while True:
        written = model.generate(
            input_ids=prefix,
            attention_mask=torch.ones_like(prefix),
            do_sample=True,
            temperature=temperature,
            top_p=top_p,
            top_k=0,
            max_new_tokens=_MOST_TOKENS,
            eos_token_id=list(target.spec.eos_ids),
            pad_token_id=target.spec.eos_ids[0],
        )
        for row in written[:, prefix.shape[1] :].tolist():
            end = next((place for place, token in enumerate(row) if token in target.spec.eos_ids), None)
            # A text that was cut is no prompt.
            if end is None or end < _LEAST_TOKENS:
                continue
            text = target.tokenizer.decode(row[:end], skip_special_tokens=True).strip()
            if text and text not in seen:
                seen.add(text)
                yield text


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the file; a user's error ends it with one sentence and exit code 1."""
    from fovea.targets.load import load_target

    parser = argparse.ArgumentParser(
        prog="python -m fovea.artifacts.prompts", description="Prompts that a language model writes itself."
    )
    add = parser.add_argument
    add("--target", type=Path, required=True, help="checkpoint folder of the target")
    add("--out", type=Path, required=True, help="file of the prompts, JSON lines")
    add("--count", type=int, default=400, help="prompts")
    add("--temperature", type=float, default=1.0, help="of the sampling")
    add("--top-p", type=float, default=0.95, help="probability mass that is sampled from")
    add("--batch-size", type=int, default=32, help="prompts that are written at a time")
    add("--seed", type=int, default=0, help="of the sampling")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where the target runs")
    add("--compute-dtype", choices=tuple(COMPUTE_DTYPES), default="fp32", help="dtype of the target")
    options = parser.parse_args(arguments)
    if options.count < 1:
        parser.error("--count must be 1 or more")
    try:
        target = load_target(options.target, device=options.device, dtype=COMPUTE_DTYPES[options.compute_dtype])
        texts = write_prompts(
            target,
            temperature=options.temperature,
            top_p=options.top_p,
            batch_size=options.batch_size,
            seed=options.seed,
        )
        numbers = track(range(options.count), description="writing prompts")
        lines = [
            json.dumps({"key": f"self-{n:06d}", "source": "self", "messages": [{"role": "user", "content": text}]})
            for n, text in zip(numbers, texts, strict=False)
        ]
    except (CheckpointError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    partial = options.out.with_name(f".{options.out.name}.partial")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.replace(options.out)
    print(f"{len(lines)} prompts in {options.out}")


if __name__ == "__main__":
    main()
