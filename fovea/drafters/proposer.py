"""Neural drafters in the proposer's seat: context cache, tree passes, and what the trace records.

Legend: ``k`` newly committed tokens, ``f`` frontier nodes, ``w`` children per node, ``D`` hidden width.

The drafter's cache holds one row per committed pair, made from the target's *true* states. Rows of the tree lie pending
behind them and are dropped when the tree is finished; accepted tokens come back by ``commit`` with true states.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fovea.decoding.growth import TreeConfig, grow
from fovea.decoding.tree import DraftTree
from fovea.drafters.fovea import FoveaDrafter
from fovea.targets.base import Prefill
from fovea.targets.kv_cache import KVCache
from fovea.visual.memory import VisualMemory
from fovea.visual.prefix import kept_in_prefix
from fovea.visual.retrieval import Retrieved


class NeuralProposer:
    """Drafts trees with a :class:`FoveaDrafter`, one request at a time."""

    def __init__(self, drafter: FoveaDrafter, tree: TreeConfig) -> None:
        self.drafter = drafter
        self.tree = tree
        self.max_drafts = tree.max_drafts
        self.memory: VisualMemory | None = None
        #: What the nodes of the last tree retrieved, pass by pass.
        self.evidence: list[Retrieved] = []

    @torch.inference_mode()
    def start(self, prefill: Prefill) -> None:
        drafter = self.drafter
        tree_rows = 1 + self.tree.width * self.tree.passes
        self.cache = KVCache(
            drafter.cache_layers,
            drafter.spec.num_kv_heads,
            drafter.spec.head_dim,
            prefill.capacity + tree_rows,
            dtype=drafter.dtype,
            device=drafter.device,
        )
        self._pairs: list[tuple[Tensor, Tensor]] = []
        positions = drafter.draft_positions(prefill.positions)
        self._next_position = int(positions.max()) + 1
        self.memory = drafter.remember(prefill.visual)
        embeds = prefill.embeds[1:].to(drafter.dtype)
        states = prefill.hidden[:-1].to(drafter.dtype)
        rotation = drafter.rotary(positions[:, 1:], drafter.dtype)
        if drafter.config.visual_prefix != "full":
            kept = torch.ones_like(prefill.is_visual)
            config = drafter.config
            kept[prefill.is_visual] = kept_in_prefix(prefill.visual, config.visual_prefix, config.visual_prefix_ratio)
            (rows,) = kept[1:].nonzero(as_tuple=True)
            embeds, states, rotation = embeds[rows], states[rows], rotation.at(rows)
        if len(embeds):
            drafter(embeds[None], states[None], rotation, self._attend_causally)
            self.cache.advance(len(embeds))
            self.cache.keep(range(len(embeds)))

    def commit(self, tokens: Tensor, states: Tensor) -> None:
        self._pairs.append((tokens, states))

    def propose(self) -> DraftTree:
        root = int(self._pairs[-1][0][-1])
        tree = grow(root, self._expand, self.tree)
        self.drop_tree()
        if self.evidence:
            cardinalities = torch.cat([torch.stack((e.k, e.k_raw), dim=1) for e in self.evidence])
            tree.retrieval.extend((k, k_raw) for k, k_raw in cardinalities.tolist())
        return tree

    @torch.inference_mode()
    def node_logits(self, tokens: np.ndarray, parents: np.ndarray, depth: int) -> Tensor:
        """Draft logits [f, V] of one pass, in the order of depths: ``tokens`` [f] below ``parents`` [f] of the last.

        Depth 0 runs all pairs committed since the last tree, the root's being the last, and commits them.
        """
        drafter = self.drafter
        if depth == 0:
            h = self._run_committed()
        else:
            ids = torch.from_numpy(tokens).to(drafter.device)
            states = self._states if len(self._states) == 1 else self._states[torch.from_numpy(parents)]
            rotation = drafter.rotary.text(self._root_position + depth, 1, drafter.dtype, drafter.device)
            self._mask = self._tree_mask(parents, depth)
            h, _ = drafter(
                drafter.embed(ids)[None], states.expand(len(tokens), -1)[None], rotation, self._attend_to_cache
            )
            self.cache.advance(len(tokens))
        root = self.evidence[0].selected if self.evidence else None
        scored = drafter.score(h[0], depth, self.memory, root)
        self._states = scored.passed_on
        if scored.retrieved is not None:
            self.evidence.append(scored.retrieved)
        return drafter.logits(scored.hat)

    def drop_tree(self) -> None:
        """Forgets the rows of the tree; the context stays."""
        self.cache.keep(())

    def _expand(self, tokens: np.ndarray, parents: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        return best_children(self.node_logits(tokens, parents, depth), self.tree.width)

    def _run_committed(self) -> Tensor:
        """Runs the committed pairs behind the context; h [1, 1, D] of the root."""
        drafter = self.drafter
        tokens, states = self._pairs[0] if len(self._pairs) == 1 else map(torch.cat, zip(*self._pairs, strict=True))
        self._pairs = []
        self.evidence = []
        count = len(tokens)
        rotation = drafter.rotary.text(self._next_position, count, drafter.dtype, drafter.device)
        self._mask = self._causal_mask(count)
        h, _ = drafter(drafter.embed(tokens)[None], states.to(drafter.dtype)[None], rotation, self._attend_to_cache)
        self.cache.advance(count)
        self.cache.keep(range(count))
        self._next_position += count
        self._root_position = self._next_position - 1
        return h[:, -1:]

    def _tree_mask(self, parents: np.ndarray, depth: int) -> Tensor | None:
        """Additive mask over context and tree rows: a node sees the context, its ancestors and itself."""
        count = len(parents)
        seen = np.eye(count, dtype=bool)
        if depth > 1:
            seen = np.concatenate((self._seen[parents], seen), axis=1)
        self._seen = seen
        return None if seen.all() else self._additive(seen)

    def _causal_mask(self, count: int) -> Tensor | None:
        return None if count == 1 else self._additive(np.tri(count, dtype=bool))

    def _additive(self, seen: np.ndarray) -> Tensor:
        """[1, 1, Q / H * f, rows] of ``seen`` [f, rows behind the context]; the heads of a group are stacked."""
        spec = self.drafter.spec
        mask = np.zeros((spec.num_heads // spec.num_kv_heads, len(seen), self.cache.length + seen.shape[1]), np.float32)
        mask[:, :, self.cache.length :][:, ~seen] = -np.inf
        return torch.from_numpy(mask.reshape(1, 1, -1, mask.shape[2])).to(self.drafter.device, self.drafter.dtype)

    def _attend_to_cache(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of a few rows to the cache; the query heads of a group are stacked as rows of their key head."""
        all_keys, all_values = self.cache.append(layer, keys, values)
        stacked = queries.reshape(1, all_keys.shape[1], -1, queries.shape[3])
        return F.scaled_dot_product_attention(stacked, all_keys, all_values, attn_mask=self._mask).view(queries.shape)

    def _attend_causally(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.cache.append(layer, keys, values)
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)


def best_children(logits: Tensor, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``width`` best ids [f, w] of ``logits`` [f, V] and their log-probabilities [f, w], equal ones by lower id.

    ``torch.topk`` breaks ties as it likes, so rows in which it met one are ranked again.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    width = min(width, logits.shape[-1])
    # One more than asked: a tie at the cut shows.
    values, ids = (part.cpu().numpy() for part in log_probs.topk(min(width + 1, logits.shape[-1])))
    tied = (values[:, 1:] == values[:, :-1]).any(axis=1)
    if tied.any():
        for row in tied.nonzero()[0]:
            least = float(values[row, width - 1])
            candidates = (log_probs[row] >= least).nonzero()[:, 0]
            order = log_probs[row, candidates].sort(descending=True, stable=True).indices[:width]
            ids[row, :width] = candidates[order].cpu().numpy()
            values[row, :width] = log_probs[row, candidates[order]].cpu().numpy()
    return ids[:, :width], values[:, :width]
