"""From conversations to what a target teaches about them, one batch at a time; for export and online training alike."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fovea.artifacts.config import ExportConfig
from fovea.targets.base import Encoded, Target
from fovea.targets.chat_template import PromptError
from fovea.targets.conversation import Conversation
from fovea.targets.images import BrokenImageError
from fovea.targets.teacher_batch import TeacherSample, supervised_positions

logger = logging.getLogger(__name__)


class Taught(NamedTuple):
    """A conversation, as the target read it, and what it teaches."""

    conversation: Conversation
    encoded: Encoded
    sample: TeacherSample


class ConversationTeacher:
    """Lets ``target`` answer and teach.

    Conversations with a broken picture, with a prompt that the target cannot read, longer than ``max_tokens``, or
    without a supervised token give no sample; each is reported once and kept with its reason.

    Args:
        target: answers and teaches.
        config: how; ``strict`` lets a broken picture or an unreadable prompt raise its error.
        keep_answers: remember the target's answers by key, for data that come again every epoch.

    Attributes:
        skipped: reason by key of the conversations that gave no sample.
    """

    def __init__(self, target: Target, config: ExportConfig, *, keep_answers: bool = False) -> None:
        self.target, self.config = target, config
        self.skipped: dict[str, str] = {}
        self._answers: dict[str, list[list[int]]] | None = {} if keep_answers else None

    def teach(self, batch: Sequence[Conversation]) -> list[Taught]:
        """What the conversations in ``batch`` teach, in their order; those that teach nothing are left out."""
        readable = self._readable([(c, None) for c in batch if c.key not in self.skipped])
        if self.config.answers == "target" and readable:
            read = [conversation for conversation, _ in readable]
            readable = self._readable(zip(read, self._answer(read), strict=True))
        useful = [(c, encoded) for c, encoded in readable if self._teaches(c, encoded)]
        if not useful:
            return []
        layers = self.config.feature_layers
        asked = {"feature_layers": layers} if layers else {}
        samples = self.target.teach([encoded for _, encoded in useful], self.config.mid_layers, **asked)
        return [Taught(c, encoded, sample) for (c, encoded), sample in zip(useful, samples, strict=True)]

    def _readable(
        self, batch: Iterable[tuple[Conversation, list[list[int]] | None]]
    ) -> list[tuple[Conversation, Encoded]]:
        """The conversations that can be read, with the answers given to them."""
        readable = []
        for conversation, answers in batch:
            try:
                readable.append((conversation, self.target.encode(conversation, answers)))
            except (BrokenImageError, PromptError) as error:
                if self.config.strict:
                    raise
                kind = "broken picture" if isinstance(error, BrokenImageError) else "unreadable"
                self._skip(conversation.key, f"{kind}: {error}")
        return readable

    def _answer(self, conversations: Sequence[Conversation]) -> list[list[list[int]]]:
        config = self.config
        if self._answers is None:
            return self.target.answer(conversations, config.max_new_tokens, config.batch_size)
        new = [conversation for conversation in conversations if conversation.key not in self._answers]
        if new:
            given = self.target.answer(new, config.max_new_tokens, config.batch_size)
            self._answers |= {c.key: answers for c, answers in zip(new, given, strict=True)}
        return [self._answers[conversation.key] for conversation in conversations]

    def _teaches(self, conversation: Conversation, encoded: Encoded) -> bool:
        limit = self.config.max_tokens
        if not supervised_positions(encoded.answer_mask).any():
            self._skip(conversation.key, "no supervised token: no answer, or an empty one")
        elif limit is not None and len(encoded.ids) > limit:
            self._skip(conversation.key, f"too long: {len(encoded.ids)} tokens, max_tokens is {limit}")
        return conversation.key not in self.skipped

    def _skip(self, key: str, reason: str) -> None:
        logger.warning("conversation '%s' gives no sample: %s", key, reason)
        self.skipped[key] = reason
