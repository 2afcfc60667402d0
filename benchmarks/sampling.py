"""The law of sampled answers: how far the frequencies of many are from the exact joint law of their first tokens.

    python benchmarks/sampling.py --draws 200000

The target is a table over a vocabulary of six, a third of whose entries are impossible, so that nuclei are small and
residuals empty; its exact law is computed with transformers' warpers, context by context. Every answer is a request of
its own, decoded by the real loop with a drafter of each kind. Beside each distance stands what exact draws would have
on average, at most sqrt(outcomes / draws) / 2, and the largest that chance explains but for one time in 10^9.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.growth import TreeConfig, grow
from fovea.decoding.proposer import Proposer
from fovea.decoding.scripted import OracleProposer, RandomProposer
from fovea.decoding.selection import Selection, SelectionConfig, resolve
from fovea.decoding.speculative import generate
from fovea.decoding.tree import DraftTree
from fovea.drafters.jacobi_lookahead import JacobiConfig
from fovea.drafters.pld import PLDConfig
from fovea.drafters.training_free import LookaheadConfig, TrainingFree
from fovea.drafters.trie_lookahead import TrieConfig
from fovea.targets.base import Encoded, Prefill, RopeSpec, TargetSpec

VOCAB, TOKENS = 6, 3


class TableTarget:
    """Logits by the answer so far; what follows its first three tokens is uniform. Keeps texts, not keys."""

    def __init__(self, seed: int) -> None:
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.spec = TargetSpec(
            "table", 1, 1, 1, 1, 1, 1, VOCAB, 1e-6, False, RopeSpec(theta=1e4), max_positions=99, eos_ids=()
        )
        random = np.random.default_rng(seed)
        self.contexts = [c for length in range(TOKENS) for c in product(range(VOCAB), repeat=length)]
        self.row = {context: row for row, context in enumerate(self.contexts)}
        table = 0.8 * random.normal(size=(len(self.contexts) + 1, VOCAB)).astype(np.float32)
        table[random.random(table.shape) < 1 / 3] = -np.inf
        table[np.isinf(table).all(1)] = 0.0
        table[-1] = 0.0
        self.logits = torch.from_numpy(table)
        self.encoded = torch.zeros(1, dtype=torch.int64)

    def request(self, key: str) -> Encoded:
        """A prompt of one token."""
        nothing = torch.zeros(1, dtype=torch.bool)
        return Encoded(key, self.encoded, self.encoded[None], nothing, 1, nothing)

    def prefill(self, encoded: Encoded, max_new_tokens: int, draft_rows: int = 0) -> tuple[Any, Any]:
        """No text yet."""
        state = SimpleNamespace(
            text=(), pending=[], text_positions=lambda offsets: offsets[None], read=lambda hidden: hidden
        )
        hidden, none = torch.zeros(1, 1, dtype=torch.int64), encoded.is_visual
        return state, Prefill(encoded.ids, encoded.positions, hidden, hidden, hidden[:0], none, capacity=99)

    def extend(self, state: Any, ids: Tensor, positions: Tensor, tree_mask: Tensor | None = None) -> Tensor:
        """[n, 1] row of the table behind each node."""
        tokens = ids.tolist()
        seen = (
            tree_mask.tolist()
            if tree_mask is not None
            else [[j <= i for j in range(len(tokens))] for i in range(len(tokens))]
        )
        state.pending = [tuple(t for t, s in zip(tokens, row, strict=True) if s) for row in seen]
        rows = [self.row.get(state.text + path, len(self.contexts)) for path in state.pending]
        return torch.tensor(rows)[:, None]

    def commit(self, state: Any, rows: Sequence[int]) -> None:
        """Keeps the path to the last of the rows."""
        state.text += state.pending[rows[-1]]

    def lm_head(self, hidden: Tensor) -> Tensor:
        """[..., V] logits of rows of the table."""
        return self.logits[hidden[..., 0]]

    def law(self, selection: Selection) -> np.ndarray:
        """[V, V, V] exact law of the first three tokens."""
        scores = self.logits
        for warper in selection.warpers(self, self.request(""), (), TOKENS):  # type: ignore[arg-type]
            scores = warper(None, scores)  # type: ignore[arg-type]
        probs = scores.double().softmax(-1).numpy()
        joint = np.zeros((VOCAB,) * TOKENS)
        for a, b in product(range(VOCAB), repeat=2):
            joint[a, b] = probs[0, a] * probs[self.row[a,], b] * probs[self.row[a, b]]
        return joint


class TableDrafter:
    """Grows a tree as a neural drafter does; its probabilities are those of another table."""

    def __init__(self, seed: int, tree: TreeConfig) -> None:
        self.log_probs = np.random.default_rng(seed).normal(size=(7, VOCAB)) - 3
        self.tree, self.max_drafts = tree, tree.max_drafts
        self.order = np.argsort(-self.log_probs, axis=1)[:, : tree.width]

    def start(self, prefill: Any) -> None:
        """Nothing to remember."""

    def commit(self, tokens: Tensor, states: Tensor) -> None:
        """The last one is the root."""
        self.root = int(tokens[-1])

    def propose(self) -> DraftTree:
        """Children depend on their parent's token and its depth."""

        def expand(tokens: np.ndarray, parents: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
            rows = (tokens + depth) % 7
            return self.order[rows], np.take_along_axis(self.log_probs[rows], self.order[rows], 1)

        return grow(self.root, expand, self.tree)


def drafters(spec: TargetSpec, likely: Sequence[int] = ()) -> dict[str, Callable[[], Proposer | None]]:
    """One of each kind; None is the autoregressive loop. ``likely`` serves as the right answer."""
    jacobi = JacobiConfig(level=3, window=2, guess_set=2, pool_from_prompt=True)
    told: dict[str, Any] = {"answer": likely, "vocab_size": VOCAB}
    return {
        "none": lambda: None,
        "chain": lambda: OracleProposer(**told, depth=3),
        "tree": lambda: OracleProposer(**told, depth=2, width=3),
        "never-right": lambda: OracleProposer(**told, depth=2, width=2, wrong_from=1),
        "wrong-from-2": lambda: OracleProposer(**told, depth=2, width=2, wrong_from=2),
        "random-tree": lambda: RandomProposer(vocab_size=VOCAB, nodes=6),
        "grown-tree": lambda: TableDrafter(1, TreeConfig(width=3, depth=1, nodes=10)),
        "prompt-lookup": lambda: TrainingFree("pld", PLDConfig(2, 3, "cut")).proposer(spec),
        # It remembers what was drawn for the requests before.
        "lookahead-trie": lambda: TrainingFree("lookahead", LookaheadConfig(trie=TrieConfig(8, 3))).proposer(spec),
        "lookahead-jacobi": lambda: TrainingFree("lookahead", LookaheadConfig("jacobi", jacobi=jacobi)).proposer(spec),
    }


def main() -> int:
    """Prints the table; 1 if a distance is larger than accepted, or the impossible happened."""
    known = list(drafters(TableTarget(0).spec))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200_000, help="answers per drafter")
    parser.add_argument("--drafters", nargs="+", default=known, choices=known, metavar="NAME")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.8)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0, help="of the table and of the draws")
    parser.add_argument("--at-most", type=float, default=0.01, help="largest total variation that is accepted")
    args = parser.parse_args()

    torch.set_num_threads(1)
    target: Any = TableTarget(args.seed)
    config = SelectionConfig(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed)
    selection = resolve(config, None, target.spec)
    joint = target.law(selection)
    outcomes = int((joint > 0).sum())
    expected = math.sqrt(outcomes / args.draws) / 2
    limit = expected + math.sqrt(math.log(1e9) / (2 * args.draws))
    print(f"{args.draws} answers of {TOKENS} tokens each, {outcomes} possible outcomes; {selection.describe()}")
    print(f"exact draws: {expected:.4f} at most on average, {limit:.4f} but for one time in 10^9")
    print(f"{'drafter':<20} {'total variation':>16} {'impossible':>11} {'accepted':>9} {'us/answer':>10}")
    worst, impossible = 0.0, 0
    made = drafters(target.spec, [int(token) for token in np.unravel_index(joint.argmax(), joint.shape)])
    for name in args.drafters:
        proposer, counts, accepted = made[name](), np.zeros_like(joint), 0
        start = time.perf_counter()
        for number in range(args.draws):
            # A key of its own for every drafter too: the same noise would make all rows of the table equal.
            request, decode = target.request(f"{name} {number}"), {"max_new_tokens": TOKENS, "selection": selection}
            if proposer is None:
                trace = generate_autoregressive(target, request, **decode)
            else:
                trace = generate(target, proposer, request, **decode)
            counts[tuple(trace.tokens)] += 1
            accepted += sum(done.accepted for done in trace.rounds)
        seconds = time.perf_counter() - start
        distance = 0.5 * float(np.abs(counts / args.draws - joint).sum())
        worst, never = max(worst, distance), int(counts[joint == 0].sum())
        impossible += never
        figures = f"{distance:>16.4f} {never:>11} {accepted / args.draws:>9.2f} {1e6 * seconds / args.draws:>10.0f}"
        print(f"{name:<20} {figures}", flush=True)
    return int(worst > args.at_most or impossible > 0)


if __name__ == "__main__":
    sys.exit(main())
