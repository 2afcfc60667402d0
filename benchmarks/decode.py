"""Where the time of a speculative round goes: draft, verify, and the rest (tree, bookkeeping, Python).

    python benchmarks/decode.py
    python benchmarks/decode.py --size qwen25vl-7b --device cuda --dtype bf16
    python benchmarks/decode.py --size llava15-7b --device cuda --dtype bf16

A Qwen2.5-VL or LLaVA-1.5 of random weights is decoded with an untrained FOVEA drafter of two blocks, beside our
autoregressive loop and transformers' ``generate``. Nothing has to be trained: what a round costs does not depend on
what the weights say.
Since nothing that such a drafter proposes would be right, a share of the tree is replaced by the target's own answer,
so that rows are accepted, caches compacted and several pairs committed, as with a trained drafter.

*Forwards* are the drafter's passes (embedding, blocks, correction, LM head) and the target's (decoder, LM head). *Rest*
is everything else between the prefill and the end, the ranking of children and all conversions among it. Configurations
take turns within every repeat, and medians over repeats are shown. On a GPU every forward is synchronised at both ends
for the split, so that no Python hides behind a kernel: there the rest is an upper bound.

The last columns say what the decode speedup would be at a tau of 2, 3 and 4: tau * t_ar / round, with t_ar of our
autoregressive loop per token. On a GPU the peak memory of an answer is shown, weights of target and drafters included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from untrained_target import SIZES, build_request, build_target

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.growth import TreeConfig
from fovea.decoding.speculative import generate
from fovea.decoding.transformers_generate import generate_transformers
from fovea.decoding.tree import DraftTree
from fovea.drafters.fovea import FoveaConfig, FoveaDrafter
from fovea.drafters.proposer import NeuralProposer
from fovea.planning.memory import GIB
from fovea.targets.base import Encoded, Prefill
from fovea.targets.hf import HFTarget

#: Committed tokens per round for which the speedup is told.
TAUS = (2, 3, 4)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class AcceptedProposer:
    """Lets a proposer draft and then writes the true answer over the upper part of its deepest path."""

    def __init__(self, proposer: NeuralProposer, answer: list[int], accept: int) -> None:
        self.proposer = proposer
        self.answer = answer
        self.accept = accept
        self.max_drafts = proposer.max_drafts
        self.clock: ForwardClock | None = None
        self._committed = 0

    def start(self, prefill: Prefill) -> None:
        """Starts over."""
        self._committed = 0
        self.proposer.start(prefill)

    def commit(self, tokens: Tensor, states: Tensor) -> None:
        """Passes them on; the first ones end the prefill, whose passes do not count."""
        if self.clock and not self._committed:
            self.clock.reset()
        self._committed += len(tokens)
        self.proposer.commit(tokens, states)

    def propose(self) -> DraftTree:
        """The proposer's tree with ``accept`` right tokens, or as many as it is deep."""
        tree = self.proposer.propose()
        start = time.perf_counter()
        path, row = [], int(tree.depths.argmax())
        while row > 0:
            path.append(row)
            row = tree.parents[row]
        following = self.answer[self._committed : self._committed + self.accept]
        for row, token in zip(reversed(path), following, strict=False):
            siblings = tree.parents == tree.parents[row]
            tree.tokens[siblings & (tree.tokens == token)] = tree.tokens[row]
            tree.tokens[row] = token
        if self.clock:
            self.clock.seconds["script"] += time.perf_counter() - start
        return tree


class ForwardClock:
    """Adds up the seconds spent inside the drafter's and the target's passes, and on this benchmark's own script."""

    def __init__(self, device: torch.device) -> None:
        self.reset()
        self._cuda = device.type == "cuda"

    def reset(self) -> None:
        """Starts at zero."""
        self.seconds = {"draft": 0.0, "verify": 0.0, "script": 0.0}

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            result = call(*args, **kwargs)
            if self._cuda:
                torch.cuda.synchronize()
            self.seconds[part] += time.perf_counter() - start
            return result

        return run

    @contextmanager
    def watching(self, target: HFTarget, drafter: FoveaDrafter) -> Any:
        """Times the passes of both while the context lasts."""
        watched = [(drafter, name, "draft") for name in ("forward", "score", "logits", "embed")]
        watched += [(target, name, "verify") for name in ("extend", "lm_head")]
        for owner, name, part in watched:
            setattr(owner, name, self._timed(part, getattr(owner, name)))
        try:
            yield self
        finally:
            for owner, name, _ in watched:
                delattr(owner, name)


def tree_of(text: str) -> TreeConfig:
    """The tree that ``width/depth/nodes`` describes."""
    width, depth, nodes = (int(part) for part in text.split("/"))
    return TreeConfig(width, depth, nodes)


def measure(args: argparse.Namespace) -> None:
    """Runs everything in turns and prints the table."""
    device, dtype, size = torch.device(args.device), DTYPES[args.dtype], SIZES[args.size]
    target = build_target(size, device, dtype)
    encoded = build_request(target, size)
    decode = {"max_new_tokens": args.new_tokens, "eos_ids": ()}
    answer = generate_autoregressive(target, encoded, **decode).tokens

    drafters: dict[str, FoveaDrafter] = {}
    for name, depth in (("fovea", 1), ("fixed_prefix", -1)):
        torch.manual_seed(2)
        config = FoveaConfig(num_blocks=2, depth=7, max_correction_depth=depth, retrieval=size.retrieval)
        drafters[name] = FoveaDrafter(target.spec, config, target.head).to(device, dtype).eval()
    trees = {text: tree_of(text) for text in args.trees}

    samples: dict[tuple[str, str], dict[str, list[float]]] = {}
    per_token: dict[str, list[float]] = {"autoregressive": [], "transformers": []}
    peaks = dict.fromkeys(per_token, 0)
    for repeat in range(args.repeats + 1):
        for name, loop in (("autoregressive", generate_autoregressive), ("transformers", generate_transformers)):
            trace = loop(target, encoded, **decode)
            per_token[name].append(1e3 * (trace.total_s - trace.prefill_s) / (len(trace.tokens) - 1))
            peaks[name] = max(peaks[name], trace.peak_memory_bytes)
        for tree_name, tree in trees.items():
            for drafter_name, drafter in drafters.items():
                proposer = AcceptedProposer(NeuralProposer(drafter, tree), answer, args.accept)
                figures = measure_rounds(target, drafter, proposer, encoded, decode, answer)
                into = samples.setdefault((tree_name, drafter_name), {})
                for figure, value in figures.items():
                    into.setdefault(figure, []).append(value)
        if repeat == 0:  # a warm-up
            samples.clear()
            for values in per_token.values():
                values.clear()
    report(args, samples, per_token, peaks)


def measure_rounds(
    target: HFTarget,
    drafter: FoveaDrafter,
    proposer: AcceptedProposer,
    encoded: Encoded,
    decode: dict[str, Any],
    answer: list[int],
) -> dict[str, float]:
    """Milliseconds per round: the phases of one answer, and the passes within the rounds of a second one."""
    whole = generate(target, proposer, encoded, **decode)
    rounds = whole.rounds
    clock = proposer.clock = ForwardClock(target.device)
    with clock.watching(target, drafter):
        split = generate(target, proposer, encoded, **decode)
    proposer.clock = None
    if target.dtype == torch.float32 and split.tokens != answer:
        raise AssertionError("the speculative answer is not the autoregressive one")
    count = len(split.rounds)
    inside = {part: 1e3 * seconds / count for part, seconds in clock.seconds.items()}
    return {
        "nodes": 1 + statistics.mean(r.draft_nodes for r in rounds),
        "accepted": statistics.mean(r.accepted for r in rounds),
        "round": 1e3 * statistics.mean(r.total_s for r in rounds),
        "draft": 1e3 * statistics.mean(r.draft_s for r in rounds),
        "verify": 1e3 * statistics.mean(r.verify_s for r in rounds),
        "draft_passes": inside["draft"],
        "verify_passes": inside["verify"],
        "peak": whole.peak_memory_bytes / GIB,
        "rest": 1e3 * (split.total_s - split.prefill_s) / count - sum(inside.values()),
    }


def report(
    args: argparse.Namespace,
    samples: dict[tuple[str, str], dict[str, list[float]]],
    per_token: dict[str, list[float]],
    peaks: dict[str, int],
) -> None:
    """Prints medians over repeats."""
    threads = f", {torch.get_num_threads()} threads" if args.device == "cpu" else ""
    print(f"{args.size}, {args.dtype} on {args.device}{threads}, torch {torch.__version__}; medians of {args.repeats}")
    token_ms = {name: statistics.median(values) for name, values in per_token.items()}
    for name, value in token_ms.items():
        peak = f", at most {peaks[name] / GIB:.2f} GiB" if peaks[name] else ""
        print(f"{name:>16}: {value:7.2f} ms per token{peak}")
    figures = ("nodes", "accepted", "round", "draft", "verify", "draft_passes", "verify_passes", "rest")
    titles = ("nodes", "accepted", "round ms", "draft", "verify", "draft fwd", "verify fwd", "rest")
    print(
        f"\n{'tree':>8} {'drafter':>13}",
        *(f"{title:>10}" for title in titles),
        f"{'rest/fwd':>10}",
        f"{'verify/AR':>10}",
        *(f"{f'x, tau {tau}':>10}" for tau in TAUS),
        *([f"{'peak GiB':>10}"] if any(peaks.values()) else []),
    )
    medians = {}
    for (tree, drafter), values in samples.items():
        row = medians[tree, drafter] = {figure: statistics.median(values[figure]) for figure in (*figures, "peak")}
        share = row["rest"] / (row["draft_passes"] + row["verify_passes"])
        relative = row["verify"] / token_ms["autoregressive"]
        print(
            f"{tree:>8} {drafter:>13}",
            *(f"{row[figure]:>10.2f}" for figure in figures),
            f"{share:>10.1%}",
            f"{relative:>10.2f}",
            *(f"{tau * token_ms['autoregressive'] / row['round']:>10.2f}" for tau in TAUS),
            *([f"{row['peak']:>10.2f}"] if any(peaks.values()) else []),
        )
    print()
    for tree in args.trees:
        ours, prefix = (samples[tree, name]["draft"] for name in ("fovea", "fixed_prefix"))
        added = statistics.median(a / b - 1 for a, b in zip(ours, prefix, strict=True))
        print(
            f"{tree:>8}: the correction adds {added:+.1%} to the draft time of fixed_prefix (median of paired repeats)"
        )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument(
        "--trees", nargs="+", default=["10/7/60", "6/6/40", "3/4/12"], help="width/depth/nodes of each tree"
    )
    parser.add_argument("--accept", type=int, default=3, help="draft tokens made right in every tree; 0 for none")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=9, help="measured repeats, behind one that warms up")
    return parser.parse_args()


if __name__ == "__main__":
    measure(parse())
