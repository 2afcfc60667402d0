"""Prompts that a language model writes itself, for users who have a target and no conversations:

    python -m fovea.artifacts.prompts --target FOLDER --out prompts.jsonl --count 400

A chat model that is given its template up to where the user speaks goes on with what a user might say (Magpie, Xu et
al. 2024, section 2). The file has the layout that ``data=jsonl`` reads; the answers are the target's, when artifacts
are exported.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from fovea.artifacts.command import COMPUTE_DTYPES
from fovea.targets.checkpoint import CheckpointError, weights_fingerprint
from fovea.targets.hf import HFTarget
from fovea.targets.load import load_target
from fovea.targets.spec import UnsupportedTargetError

_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
#: Shorter texts are no question, longer ones rarely end.
_LEAST_TOKENS, _MOST_TOKENS = 5, 96
#: Tokens that nearly always make up what is drawn from.
_LIKELY = 1024
#: Batches without a new text after which there will hardly be one.
_EMPTY_BATCHES = 20


class NothingNewError(Exception):
    """The model writes what it has written before."""


class NucleusDraw(LogitsProcessor):
    """Draws a token and leaves nothing else to choose, so that greedy decoding samples.

    Drawn from the fewest tokens whose probabilities add up to ``top_p`` (Holtzman et al. 2020, section 3.1), as in
    transformers. There the whole vocabulary is sorted and drawn from, which takes a CPU several times as long as a
    small model does; here only rows are sorted that the most likely tokens do not cover.

    Args:
        temperature: the scores are divided by it.
        top_p: in (0, 1].
    """

    def __init__(self, temperature: float, top_p: float) -> None:
        self._temperature, self._top_p = temperature, top_p

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[B, V] zero at the drawn token and minus infinity elsewhere."""
        logs = (scores.float() / self._temperature).log_softmax(dim=-1)
        likely, tokens = logs.topk(min(_LIKELY, logs.shape[-1]))
        drawn = self._draw(likely, tokens)
        uncovered = likely.exp().sum(dim=-1) < self._top_p
        if uncovered.any():
            drawn[uncovered] = self._draw(*logs[uncovered].sort(dim=-1, descending=True))
        return torch.full_like(scores, -torch.inf).scatter(-1, drawn, 0.0)

    def _draw(self, logs: Tensor, tokens: Tensor) -> Tensor:
        """[B, 1] of ``tokens`` [B, K], whose log probabilities descend."""
        mass = logs.exp()
        before = mass.cumsum(dim=-1) - mass
        return tokens.gather(-1, torch.multinomial(mass.masked_fill(before >= self._top_p, 0.0), 1))


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
    target: HFTarget,
    *,
    temperature: float = 1.0,
    top_p: float = 0.95,
    batch_size: int = 32,
    seed: int = 0,
    first_batch: int = 0,
    known: Iterable[str] = (),
) -> Iterator[list[str]]:
    """Texts that a user might write, each one once: the new ones of one batch after another, without end.

    A batch is drawn from ``seed`` and its number, so that ``first_batch`` and the texts ``known`` before it go on where
    another call stopped.
    """
    prefix = torch.tensor([user_prefix(target)] * batch_size, device=target.device)
    model: Any = target.model
    draw = LogitsProcessorList([NucleusDraw(temperature, top_p)])
    seen = set(known)
    for batch in count(first_batch):
        torch.manual_seed(seed * 1_000_003 + batch)
        written = model.generate(
            input_ids=prefix,
            attention_mask=torch.ones_like(prefix),
            do_sample=False,
            logits_processor=draw,
            max_new_tokens=_MOST_TOKENS,
            eos_token_id=list(target.spec.eos_ids),
            pad_token_id=target.spec.eos_ids[0],
        )
        texts = []
        for row in written[:, prefix.shape[1] :].tolist():
            end = next((place for place, token in enumerate(row) if token in target.spec.eos_ids), None)
            # A text that was cut is no prompt.
            if end is None or end < _LEAST_TOKENS:
                continue
            text = target.tokenizer.decode(row[:end], skip_special_tokens=True).strip()
            if text and text not in seen:
                seen.add(text)
                texts.append(text)
        yield texts


def _write_file(options: argparse.Namespace) -> int:
    """Writes the file, batch by batch beside it until it is whole; returns how many prompts it holds.

    A call that was stopped goes on behind its last whole batch.
    """
    settings = {
        name: getattr(options, name) for name in ("temperature", "top_p", "batch_size", "seed", "compute_dtype")
    }
    settings["target"] = weights_fingerprint(options.target)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    partial = options.out.with_name(f".{options.out.name}.{digest}.partial")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = _whole_batches(partial)
    first_batch = _batch_of(lines[-1]) + 1 if lines else 0
    target = load_target(options.target, device=options.device, dtype=COMPUTE_DTYPES[options.compute_dtype])
    batches = write_prompts(
        target,
        temperature=options.temperature,
        top_p=options.top_p,
        batch_size=options.batch_size,
        seed=options.seed,
        first_batch=first_batch,
        known=[json.loads(line)["messages"][0]["content"] for line in lines],
    )
    partial.write_text("".join(lines), encoding="utf-8")
    with Progress() as progress, partial.open("a", encoding="utf-8") as stream:
        shown = progress.add_task("writing prompts", total=options.count, completed=len(lines))
        empty = 0
        for batch, texts in zip(count(first_batch), batches, strict=False):
            if len(lines) >= options.count:
                break
            empty = 0 if texts else empty + 1
            if empty == _EMPTY_BATCHES:
                raise NothingNewError(
                    f"the last {empty} batches brought no new prompt behind the {len(lines)} in {partial}; raise "
                    "--temperature or --top-p, or ask for fewer with --count"
                )
            new = [_line(batch, number, text) for number, text in enumerate(texts)]
            stream.write("".join(new))
            stream.flush()
            lines += new
            progress.update(shown, completed=len(lines))
    lines = lines[: options.count]
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(options.out)
    return len(lines)


def _line(batch: int, number: int, text: str) -> str:
    message = {"role": "user", "content": text}
    return json.dumps({"key": f"self-{batch:05d}-{number:03d}", "source": "self", "messages": [message]}) + "\n"


def _batch_of(line: str) -> int:
    return int(json.loads(line)["key"].split("-")[1])


def _whole_batches(partial: Path) -> list[str]:
    """Lines of an unfinished file but for those of its last batch, which may be cut."""
    if not partial.is_file():
        return []
    lines = [line for line in partial.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("}\n")]
    return [line for line in lines if _batch_of(line) < _batch_of(lines[-1])]


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the file; a user's error ends it with one sentence and exit code 1."""
    parser = argparse.ArgumentParser(
        prog="python -m fovea.artifacts.prompts",
        description="Prompts that a language model writes itself. A call that was stopped goes on where it was.",
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
    for name in ("count", "batch_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    if not options.temperature > 0:
        parser.error("--temperature must be above 0: at 0 the model writes one prompt only")
    if not 0 < options.top_p <= 1:
        parser.error("--top-p must be in (0, 1]")
    try:
        written = _write_file(options)
    except (CheckpointError, UnsupportedTargetError, NothingNewError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{written} prompts in {options.out}")


if __name__ == "__main__":
    main()
