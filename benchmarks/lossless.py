"""Losslessness under scripted drafters: right ones, wrong ones, and ones that are right down to a depth.

    python benchmarks/lossless.py
    python benchmarks/lossless.py benchmark=mmspec benchmark.folder=<folder> decode.temperature=0.7 decode.top_p=0.8

Takes the settings of evaluate.py, of which it uses model, benchmark, decode and speed.prompts; no checkpoint. Every
prompt is answered by the autoregressive loop, by transformers' generate, and by the speculative loop with each drafter,
which is told the autoregressive answer and follows it, or not. Answers are counted that equal the autoregressive one,
that leave it at a near-tie, and that differ without an explanation; one of the last makes the exit code 1.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fovea.app import sources, targets
from fovea.app.devices import device_of
from fovea.app.launch import composed
from fovea.app.settings import Settings, read_settings
from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.proposer import Proposer
from fovea.decoding.scripted import OracleProposer, RandomProposer
from fovea.decoding.selection import Selection, resolve
from fovea.decoding.speculative import generate
from fovea.decoding.trace import GenerationTrace
from fovea.decoding.transformers_generate import generate_transformers
from fovea.evaluation.losslessness import compare
from fovea.evaluation.prompts import balanced, user_turns
from fovea.targets.conversation import Conversation
from fovea.targets.hf import HFTarget
from fovea.targets.load import load_generation_config, load_spec

#: Children of each right node in a scripted tree; more would only add wrong ones.
WIDTH = 3


def drafters(answer: list[int], vocab_size: int, depth: int) -> Iterator[tuple[str, Proposer]]:
    """The drafters by name; all know ``answer``. Trees have ``depth`` levels."""
    yield "random tree", RandomProposer(vocab_size=vocab_size, nodes=12)
    yield "random tree, 7 of 10 right", RandomProposer(vocab_size=vocab_size, nodes=20, answer=answer, hit_rate=0.7)
    yield "oracle chain", OracleProposer(answer, vocab_size=vocab_size, depth=depth)
    yield "oracle tree", OracleProposer(answer, vocab_size=vocab_size, depth=depth, width=WIDTH)
    yield "anti-oracle", OracleProposer(answer, vocab_size=vocab_size, depth=depth, width=WIDTH, wrong_from=1)
    for level in range(2, depth + 1):
        tree = OracleProposer(answer, vocab_size=vocab_size, depth=depth, width=WIDTH, wrong_from=level)
        yield f"wrong from depth {level}", tree


def answered(
    target: HFTarget, conversation: Conversation, settings: Settings, selection: Selection, depth: int
) -> Iterator[tuple[str, str, GenerationTrace]]:
    """(drafter, outcome, trace) for every user turn and every drafter.

    Raises:
        ValueError: a turn cannot be read.
    """
    earlier: list[list[int]] = []
    cap = settings.speed.max_new_tokens
    for prompt in user_turns(conversation):
        encoded = target.encode(prompt, earlier)
        baseline = generate_autoregressive(target, encoded, max_new_tokens=cap, selection=selection)
        traces = {"transformers": generate_transformers(target, encoded, max_new_tokens=cap, selection=selection)}
        for name, proposer in drafters(baseline.tokens, target.spec.vocab_size, depth):
            traces[name] = generate(target, proposer, encoded, max_new_tokens=cap, selection=selection)
        for name, trace in traces.items():
            verdict = compare(target, encoded, baseline.tokens, trace.tokens, max_new_tokens=cap, selection=selection)
            if verdict.outcome != "exact":
                print(f"{name}: {verdict}")
            yield name, verdict.outcome, trace
        earlier.append(baseline.tokens)


def main() -> int:
    """Prints the table; the exit code."""
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return 0
    cfg = composed("evaluate", sys.argv[1:])
    settings = read_settings(cfg)
    targets.require_target(cfg.model)
    sources.require_sources(cfg, settings)
    checkpoint, device = targets.find_target(cfg, settings.target_recipe), device_of(cfg.trainer.accelerator)
    selection = resolve(settings.selection, load_generation_config(checkpoint), load_spec(checkpoint))
    target = targets.loader(checkpoint, cfg.model.dtype, device, to_device=True)()

    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    rounds: dict[str, list[int]] = defaultdict(list)
    unreadable = 0
    prompts = balanced(sources.prompts(cfg), settings.speed.prompts)
    for conversation in track(prompts, console=Console(stderr=True), transient=True):
        try:
            for name, outcome, trace in answered(target, conversation, settings, selection, settings.tree.passes):
                outcomes[name][outcome] += 1
                rounds[name] += [done.committed for done in trace.rounds]
        except ValueError as error:
            unreadable += 1
            print(f"left out: {error}")

    dtype = str(target.dtype).removeprefix("torch.")
    print(f"\n{cfg.model.name} ({dtype}), {cfg.benchmark.name}: {len(prompts) - unreadable} conversations, torch "
          f"{torch.__version__}; {selection.describe()}")  # fmt: skip
    print(f"{'drafter':<28} {'answers':>8} {'exact':>6} {'ties':>5} {'unexplained':>12} {'tau':>6}")
    for name, counts in outcomes.items():
        tau = f"{sum(rounds[name]) / len(rounds[name]):.2f}" if rounds[name] else "-"
        exact, ties, unexplained = (counts[outcome] for outcome in ("exact", "tie", "unexplained"))
        print(f"{name:<28} {counts.total():>8} {exact:>6} {ties:>5} {unexplained:>12} {tau:>6}")
    return int(any(counts["unexplained"] for counts in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
