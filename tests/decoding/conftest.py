"""A target and a drafter made of tables, so that the loops can be judged without any model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from fovea.decoding.growth import grow_passes
from fovea.decoding.tree import DraftTree
from fovea.targets.base import Encoded, Prefill, RopeSpec, TargetSpec, TargetState
from fovea.targets.kv_cache import KVCache

MODULUS = 257
#: Rotary positions of the table target lag behind its cache slots, as they do behind an image.
ROPE_DELTA = -3


def next_state(state: int, token: int) -> int:
    return (31 * state + token + 1) % MODULUS


def text_state(tokens: list[int], state: int = 0) -> int:
    for token in tokens:
        state = next_state(state, token)
    return state


class TableTarget:
    """A Target whose logits are a table looked up by the state of the text, and whose "keys" are the tokens themselves.

    A wrong cache row, mask, order or position therefore changes what comes next, or fails an assertion at once.
    """

    def __init__(self, table: np.ndarray, eos_ids: tuple[int, ...] = (), max_positions: int = 4096) -> None:
        self.table = torch.from_numpy(table)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.spec = TargetSpec(
            architecture="table",
            hidden_size=1,
            intermediate_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            vocab_size=table.shape[1],
            rms_norm_eps=1e-6,
            qkv_bias=False,
            rope=RopeSpec(theta=1e4, mrope_section=(1, 1, 1)),
            max_positions=max_positions,
            eos_ids=eos_ids,
        )
        self.extended_rows: list[int] = []
        self.cache_lengths: list[int] = []

    def encode_ids(self, ids: list[int], key: str = "request") -> Encoded:
        positions = (torch.arange(len(ids)) + ROPE_DELTA).expand(3, -1)
        nothing = torch.zeros(len(ids), dtype=torch.bool)
        return Encoded(key, torch.tensor(ids), positions, nothing, len(ids) + ROPE_DELTA, nothing)

    def prefill(self, encoded: Encoded, max_new_tokens: int, draft_rows: int = 0) -> tuple[TargetState, Prefill]:
        rows = encoded.ids.shape[0]
        cache = KVCache(1, 1, 1, rows + max_new_tokens + draft_rows, dtype=torch.float32, device="cpu")
        state = TargetState(cache, ROPE_DELTA, axes=3)
        hidden = self.extend(state, encoded.ids, encoded.positions)
        cache.keep(range(rows))
        empty = torch.zeros(0, 1)
        return state, Prefill(
            encoded.ids, encoded.positions, hidden, hidden, empty, encoded.is_visual, capacity=cache.capacity
        )

    def extend(self, state: TargetState, ids: Tensor, positions: Tensor, tree_mask: Tensor | None = None) -> Tensor:
        rows = ids.shape[0]
        stored, _ = state.cache.append(0, ids.view(1, 1, rows, 1).float(), ids.view(1, 1, rows, 1).float())
        state.cache.advance(rows)
        committed = stored[0, 0, : state.length, 0].long().tolist()
        mask = torch.ones(rows, rows, dtype=torch.bool).tril() if tree_mask is None else tree_mask
        base = text_state(committed)
        states = []
        for row in range(rows):
            path = ids[mask[row]].tolist()
            assert positions[:, row].tolist() == [state.length + ROPE_DELTA + len(path) - 1] * 3
            states.append(text_state(path, base))
        self.extended_rows.append(rows)
        return torch.tensor(states, dtype=torch.float32)[:, None]

    def commit(self, state: TargetState, rows) -> None:
        state.cache.keep(rows)
        self.cache_lengths.append(state.length)

    def embed(self, ids: Tensor) -> Tensor:
        return ids[..., None].float()

    def lm_head(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[..., 0].long()]


@dataclass
class TableProposer:
    """Grows its tree from a table of draft log-probabilities; checks what the loop hands it."""

    table: np.ndarray
    width: int
    passes: int
    max_drafts: int

    def start(self, prefill: Prefill) -> None:
        self.state = text_state(prefill.ids.tolist())
        self.root_states: list[int] = []

    def commit(self, tokens: Tensor, states: Tensor) -> None:
        for token, hidden in zip(tokens.tolist(), states[:, 0].tolist(), strict=True):
            assert hidden == self.state, "the state handed over is not that of the token before"
            self.state, self.root = next_state(self.state, token), token

    def propose(self) -> DraftTree:
        self.root_states.append(self.state)
        frontier: list[int] = []

        def expand(tokens, parents, depth):
            nonlocal frontier
            if depth == 0:
                frontier = [self.state]
            else:
                frontier = [next_state(frontier[p], t) for p, t in zip(parents.tolist(), tokens.tolist(), strict=True)]
            rows = self.table[frontier]
            ids = np.argsort(-rows, axis=1, kind="stable")[:, : self.width]
            return ids, np.take_along_axis(rows, ids, axis=1)

        return grow_passes(self.root, expand, width=self.width, passes=self.passes, max_drafts=self.max_drafts)


@pytest.fixture(scope="session")
def table_target():
    """Makes table targets."""
    return TableTarget


@pytest.fixture(scope="session")
def table_proposer():
    """Makes table proposers."""
    return TableProposer
