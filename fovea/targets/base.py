"""The Target contract: a frozen vision-language model that teaches, prefills and verifies.

Legend: ``T`` prompt tokens, ``n`` new tokens, ``A`` rotary axes (3 for M-RoPE, else 1), ``N`` visual tokens,
``D`` hidden width, ``V`` vocabulary. Decoding handles one request at a time, so there is no batch axis here.

Everything that belongs to a request lives in a :class:`TargetState` that the caller holds; a target keeps nothing
between calls, so requests may interleave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from fovea.targets.conversation import Conversation
from fovea.targets.head import TargetHead
from fovea.targets.kv_cache import KVCache
from fovea.targets.teacher_batch import TeacherSample


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the target's text model."""

    theta: float
    #: Frequencies (half the head width) per axis for M-RoPE; None for one axis.
    mrope_section: tuple[int, ...] | None = None

    @property
    def axes(self) -> int:
        """Rotary axes A of a position."""
        return len(self.mrope_section) if self.mrope_section else 1


@dataclass(frozen=True)
class TargetSpec:
    """The numbers of a target that a drafter is built from; plain types, stored in checkpoints."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    qkv_bias: bool
    rope: RopeSpec
    max_positions: int
    eos_ids: tuple[int, ...]
    #: Token ids that stand for images in the prompt and are never generated.
    placeholder_ids: tuple[int, ...] = ()


#: Left, top, right and bottom edge of a part of a picture, as shares of its width and height.
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class View:
    """The part of a picture that a grid of visual tokens shows.

    Attributes:
        image: number of the picture in the prompt, from 0.
        box: the part; it reaches beyond 0 and 1 where the target padded the picture.
        line_ends: columns at the right of the grid that mark the end of a row and show nothing.
    """

    image: int
    box: Box = (0.0, 0.0, 1.0, 1.0)
    line_ends: int = 0


@dataclass(frozen=True)
class Encoded:
    """A conversation as the target reads it: ids, positions and vision inputs; CPU tensors, no batch axis.

    Attributes:
        ids: [T] int64, image placeholders expanded to one id per visual token.
        positions: [A, T] int64 rotary positions.
        answer_mask: [T] bool, true where the *token* belongs to an assistant answer, its end token included.
        next_position: rotary position of the token that would follow.
        is_visual: [T] bool, true at image positions.
        vision: keyword arguments of the vision tower, empty for text.
        grids: rows and columns of each grid of visual tokens, in the order of the prompt; the tokens of a grid are in
            reading order. An image has one grid or several, such as the whole picture and then its tiles.
        views: per grid, what it shows.
        image_sizes: per image, (width, height) in pixels as given.
    """

    key: str
    ids: Tensor
    positions: Tensor
    answer_mask: Tensor
    next_position: int
    is_visual: Tensor
    vision: Mapping[str, Tensor] = field(default_factory=dict)
    grids: tuple[tuple[int, int], ...] = ()
    views: tuple[View, ...] = ()
    image_sizes: tuple[tuple[int, int], ...] = ()

    def followed_by(self, tokens: Sequence[int]) -> Encoded:
        """The same with text ``tokens`` of an answer behind it."""
        count, nothing = len(tokens), torch.zeros(len(tokens), dtype=torch.bool)
        behind = self.next_position + torch.arange(count)
        return replace(
            self,
            ids=torch.cat((self.ids, torch.tensor(tokens, dtype=self.ids.dtype))),
            positions=torch.cat((self.positions, behind.expand(len(self.positions), -1)), dim=1),
            answer_mask=torch.cat((self.answer_mask, ~nothing)),
            next_position=self.next_position + count,
            is_visual=torch.cat((self.is_visual, nothing)),
        )


@dataclass
class TargetState:
    """All that a request in progress needs; the caller holds it."""

    cache: KVCache
    #: Rotary position minus cache slot for text behind the prompt: an image takes more slots than positions.
    rope_delta: int
    axes: int
    #: Layers whose outputs the drafter reads, see :mod:`fovea.targets.feature_layers`.
    feature_layers: tuple[int, ...] = ()
    #: [n, k D] outputs of these layers for the rows of the last pass, pending ones; None without such layers.
    features: Tensor | None = None

    @property
    def length(self) -> int:
        """Committed tokens in the cache."""
        return self.cache.length

    def read(self, hidden: Tensor) -> Tensor:
        """[n, F] what the drafter reads of the last pass, whose states f are ``hidden`` [n, D]."""
        return hidden if self.features is None else self.features

    def text_positions(self, offsets: Tensor) -> Tensor:
        """[A, n] rotary positions of text ``offsets`` [n] tokens behind the committed rows (0 is the next one)."""
        return (offsets + (self.length + self.rope_delta)).expand(self.axes, -1)


@dataclass(frozen=True)
class Prefill:
    """What a prefill leaves for the drafter: one row per prompt token, and the visual tokens.

    Attributes:
        ids: [T] int64.
        positions: [A, T] int64.
        embeds: [T, D] merged input embeddings; visual tokens at image positions.
        hidden: [T, D] states f, after the final norm.
        visual: [N, D] projected visual tokens of all images, in prompt order; N = 0 for text.
        is_visual: [T] bool.
        capacity: tokens that the request may reach, prompt and pending draft tokens included.
        answer_mask: [T] bool, tokens of answers that the prompt holds; None if it holds none.
        importance: gives [N] float32, how much the target attends to each visual token, see
            :func:`fovea.targets.importance.visual_importance`; computed when it is asked for. None where it is not
            known.
        visual_attention: gives [R, N] float32, how much the last layer's attention of the tokens at places [R] goes to
            each visual token, averaged over heads; computed when it is asked for. None where it is not known.
        features: [T, k D] outputs of the k feature layers side by side; None if none were asked for.
    """

    ids: Tensor
    positions: Tensor
    embeds: Tensor
    hidden: Tensor
    visual: Tensor
    is_visual: Tensor
    capacity: int
    answer_mask: Tensor | None = None
    importance: Callable[[], Tensor] | None = None
    visual_attention: Callable[[Tensor], Tensor] | None = None
    features: Tensor | None = None

    @property
    def read(self) -> Tensor:
        """[T, F] the states that the drafter reads: features where it asked for some, else f."""
        return self.hidden if self.features is None else self.features


class Target(Protocol):
    """A frozen VLM. Implementations are plain objects, never submodules of a trained module."""

    spec: TargetSpec

    @property
    def device(self) -> torch.device:
        """Where the target is; all it returns is there."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, cache and states."""
        ...

    @property
    def head(self) -> TargetHead:
        """What a drafter shares of it, in the same memory."""
        ...

    def encode(self, conversation: Conversation, answers: Sequence[Sequence[int]] | None = None) -> Encoded:
        """Chat template, tokenizer, image processor and positions; a trailing user turn gets a generation prompt.

        ``answers`` are token ids that stand in place of the assistant turns: one list per user turn, or one fewer, so
        that the last user turn is a prompt. An end token that closes an answer is part of it; an answer without one
        was cut, and the end token that the chat template puts behind it is not marked as the answer's.
        """
        ...

    def prefill(
        self, encoded: Encoded, max_new_tokens: int, draft_rows: int = 0, feature_layers: Sequence[int] = ()
    ) -> tuple[TargetState, Prefill]:
        """Runs vision tower and prompt; the cache has room for ``max_new_tokens`` and ``draft_rows`` pending rows.

        Outputs of ``feature_layers`` are in the prefill, and after every :meth:`extend` in the state.
        """
        ...

    def extend(self, state: TargetState, ids: Tensor, positions: Tensor, tree_mask: Tensor | None = None) -> Tensor:
        """States f [n, D] of ``ids`` [n] at ``positions`` [A, n] behind the committed rows; the rows stay pending.

        ``tree_mask`` [n, n] bool: row i sees itself and its ancestors; None is causal. All see the committed rows.
        """
        ...

    def commit(self, state: TargetState, rows: Sequence[int]) -> None:
        """Keeps the pending rows ``rows`` in that order and drops the others."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., D] of text ids."""
        ...

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of states f."""
        ...

    def teach(
        self, batch: Sequence[Encoded], mid_layers: Sequence[int], *, feature_layers: Sequence[int] = ()
    ) -> list[TeacherSample]:
        """One forward pass over complete conversations; what they teach a drafter, one sample per conversation."""
        ...

    def answer(
        self, conversations: Sequence[Conversation], max_new_tokens: int, batch_size: int
    ) -> list[list[list[int]]]:
        """The target's own greedy answers: per conversation, one list of token ids per user turn.

        Assistant turns of the conversation are ignored; every later turn sees the target's own earlier answers. An
        answer ends with its end token unless ``max_new_tokens`` cut it.

        Each token is the argmax of the model's own logits, whatever processors or temperature a later evaluation
        decodes with: so artifacts serve all of them, and stored states give back the answers (the teacher gate).
        """
        ...
