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
from fovea.drafters.base import Context, Drafter
from fovea.drafters.rotary import Rotation
from fovea.targets.base import Prefill
from fovea.targets.kv_cache import KVCache
from fovea.visual.memory import VisualMemory
from fovea.visual.retrieval import Retrieved

#: On a CPU ``torch.topk`` keeps a heap where a row has this many entries for each one asked for, and in shorter rows
#: selects among all, which takes three times as long.
_HEAP_FROM = 64


class NeuralProposer:
    """Drafts trees with a :class:`Drafter`, one request at a time."""

    def __init__(self, drafter: Drafter, tree: TreeConfig) -> None:
        self.drafter = drafter
        self.tree = tree
        self.max_drafts = tree.max_drafts
        self.feature_layers = drafter.feature_layers
        self.memory: VisualMemory | None = None
        #: What the nodes of the last tree retrieved, pass by pass.
        self.evidence: list[Retrieved] = []
        #: Sums over the pictures of the request, see :class:`fovea.drafters.base.Context`.
        self.notes: dict[str, float] = {}

    @torch.inference_mode()
    def start(self, prefill: Prefill) -> None:
        drafter = self.drafter
        # A module looks its properties up among parameters; in every pass of every round that adds up.
        self._dtype, self._device = drafter.dtype, drafter.device
        self._token_ids = None if drafter.token_ids is None else drafter.token_ids.cpu().numpy()
        self._group = drafter.spec.num_heads // drafter.num_kv_heads
        width = self.tree.width
        self._others_hidden = np.where(np.eye(width, dtype=bool), np.float32(0.0), np.float32(-np.inf))
        self._later_hidden = _hiding_later_rows(self.tree.passes + 1)  # as many tokens as a round commits
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self.memory = drafter.remember(prefill.visual)
        context = drafter.context(prefill)
        self.notes = {name: figures.sum().item() for name, figures in context.notes.items()}
        self._next_position, self._carried = context.next_position, None
        if context.carried_next is not None:
            self._carried = context.carried_next.expand(1, 1, -1)
        rows = len(context.embeds)
        left_out = len(prefill.ids) - 1 - rows
        tree_rows = 1 + self.tree.width * self.tree.passes
        self.cache = KVCache(
            drafter.cache_layers,
            drafter.num_kv_heads,
            drafter.spec.head_dim,
            prefill.capacity - left_out + tree_rows,
            dtype=drafter.dtype,
            device=drafter.device,
        )
        self._read(context)

    def commit(self, tokens: Tensor, states: Tensor) -> None:
        self._pairs.append((tokens, states))

    def propose(self) -> DraftTree:
        root = int(self._pairs[-1][0][-1])
        tree = grow(root, self._expand, self.tree)
        self.drop_tree()
        if self.evidence:
            # One tensor and one copy to the host, which waits for a device that has finished the tree anyway.
            numbers = torch.cat([e.k for e in self.evidence] + [e.k_raw for e in self.evidence]).tolist()
            nodes = len(numbers) // 2
            tree.retrieval.extend(zip(numbers[:nodes], numbers[nodes:], strict=True))
        return tree

    @torch.inference_mode()
    def node_logits(self, tokens: np.ndarray, parents: np.ndarray, depth: int) -> Tensor:
        """Draft logits [f, W] of one pass, in the order of depths: ``tokens`` [f] below ``parents`` [f] of the last.

        Depth 0 runs all pairs committed since the last tree, the root's being the last, and commits them.
        """
        drafter = self.drafter
        if depth == 0:
            h = self._run_committed()
        else:
            ids, above = (torch.from_numpy(rows).to(self._device) for rows in (tokens, parents))
            rotation = drafter.rotary.text(self._root_position + depth, 1, self._dtype, self._device)
            self._mask = self._tree_mask(parents)
            h = self._run(drafter.embed(ids), self._states.index_select(0, above), rotation)
            self.cache.advance(len(tokens))
        root = self.evidence[0].selected if self.evidence else None
        scored = drafter.score(h.squeeze(0), depth, self.memory, root)
        self._states = scored.passed_on
        if scored.retrieved is not None:
            self.evidence.append(scored.retrieved)
        return drafter.logits(scored.hat)

    def drop_tree(self) -> None:
        """Forgets the rows of the tree; the context stays."""
        self.cache.keep(())

    def _expand(self, tokens: np.ndarray, parents: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        ids, log_probs = best_children(self.node_logits(tokens, parents, depth), self.tree.width)
        return ids if self._token_ids is None else self._token_ids[ids], log_probs

    def _run_committed(self) -> Tensor:
        """Runs the committed pairs behind the context; h [1, 1, D] of the root."""
        drafter = self.drafter
        tokens, states = self._pairs[0] if len(self._pairs) == 1 else map(torch.cat, zip(*self._pairs, strict=True))
        self._pairs = []
        self.evidence = []
        count = len(tokens)
        rotation = drafter.rotary.text(self._next_position, count, self._dtype, self._device)
        self._mask = self._causal_mask(count)
        h = self._run(drafter.embed(tokens), drafter.inject(states), rotation)
        self.cache.advance(count)
        self.cache.keep(range(count))
        self._hidden = np.zeros((1, self.cache.length), dtype=np.float32)
        self._next_position += count
        self._root_position = self._next_position - 1
        return h[:, -1:]

    def _read(self, context: Context) -> None:
        """Runs the rows of the context, and commits them."""
        rows = len(context.embeds)
        if not rows:
            return
        self.drafter(
            context.embeds[None],
            context.states[None],
            self.drafter.rotary(context.positions, self._dtype),
            self._attend_causally,
            is_visual=context.is_visual[None],
            carried=None if context.carried is None else context.carried[None],
        )
        self.cache.advance(rows)
        self.cache.keep(range(rows))

    def _run(self, embeds: Tensor, states: Tensor, rotation: Rotation) -> Tensor:
        """h [1, n, D] of text rows behind the context."""
        carried = None if self._carried is None else self._carried.expand(-1, len(embeds), -1)
        inputs = embeds.unsqueeze(0), states.unsqueeze(0), rotation
        return self.drafter(*inputs, self._attend_to_cache, carried=carried)[0]

    def _tree_mask(self, parents: np.ndarray) -> Tensor | None:
        """Additive mask over context and tree rows: a node sees what its parent sees, and itself."""
        if self.tree.width == 1:
            return None
        own = self._others_hidden[: len(parents), : len(parents)]
        self._hidden = np.concatenate((self._hidden[parents], own), axis=1)
        return self._stacked(self._hidden)

    def _causal_mask(self, count: int) -> Tensor | None:
        if count == 1:
            return None
        if count > len(self._later_hidden):
            self._later_hidden = _hiding_later_rows(count)
        hidden = np.zeros((count, self.cache.length + count), dtype=np.float32)
        hidden[:, self.cache.length :] = self._later_hidden[:count, :count]
        return self._stacked(hidden)

    def _stacked(self, hidden: np.ndarray) -> Tensor:
        """[1, 1, Q / H * f, rows] of ``hidden`` [f, rows]: once for every query head of a group."""
        stacked = np.concatenate((hidden,) * self._group)[None, None]
        return torch.from_numpy(stacked).to(self._device, self._dtype)

    def _attend_to_cache(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of a few rows to the cache; the query heads of a group are stacked as rows of their key head."""
        all_keys, all_values = self.cache.append(layer, keys, values)
        stacked = queries.reshape(1, keys.shape[1], -1, keys.shape[3])
        return F.scaled_dot_product_attention(stacked, all_keys, all_values, attn_mask=self._mask).view(queries.shape)

    def _attend_causally(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.cache.append(layer, keys, values)
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)


def _hiding_later_rows(count: int) -> np.ndarray:
    """[count, count] additive causal mask."""
    return np.triu(np.full((count, count), -np.inf, dtype=np.float32), 1)


def best_children(logits: Tensor, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``width`` best ids [f, w] of ``logits`` [f, V] and their log-probabilities [f, w], equal ones by lower id.

    ``torch.topk`` breaks ties as it likes, so rows in which it met one are ranked again.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    entries = logits.shape[-1]
    width = min(width, entries)
    # One more than asked: a tie at the cut shows.
    asked = min(width + 1, entries)
    missing = _HEAP_FROM * asked - entries
    padded = log_probs
    if asked > width and missing > 0 and logits.is_cpu:
        padded = F.pad(log_probs, (0, missing), value=-torch.inf)
    values, ids = (part.cpu().numpy() for part in padded.topk(asked))
    tied = values[:, 1:] == values[:, :-1]
    if tied.any():
        for row in tied.any(axis=1).nonzero()[0]:
            least = float(values[row, width - 1])
            candidates = (log_probs[row] >= least).nonzero()[:, 0]
            order = log_probs[row, candidates].sort(descending=True, stable=True).indices[:width]
            ids[row, :width] = candidates[order].cpu().numpy()
            values[row, :width] = log_probs[row, candidates[order]].cpu().numpy()
    return ids[:, :width], values[:, :width]
