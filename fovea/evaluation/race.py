"""One answer by every decoder, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.proposer import Proposer, Recalling, Remembering
from fovea.decoding.selection import Selection
from fovea.decoding.speculative import generate
from fovea.decoding.trace import GenerationTrace
from fovea.decoding.transformers_generate import generate_transformers
from fovea.evaluation.losslessness import compare
from fovea.evaluation.prompts import UnreadablePrompt, encode_prompt, user_turns
from fovea.evaluation.results import PromptResult
from fovea.evaluation.speed_config import SpeedConfig
from fovea.evaluation.unfinished import Answered
from fovea.targets.base import Encoded
from fovea.targets.conversation import Conversation
from fovea.targets.hf import HFTarget


class Race:
    """Answers prompts with every decoder; the one that starts changes from prompt to prompt."""

    def __init__(
        self, target: HFTarget, proposer: Proposer, config: SpeedConfig, selection: Selection, method: str
    ) -> None:
        self.target = target
        self.proposer = proposer
        self.config = config
        self.selection = selection
        self.method = method
        self._run = 0

    def warm_up(self, conversations: Sequence[Conversation]) -> None:
        """Answers the first readable conversations for nothing."""
        short = replace(self.config, max_new_tokens=min(self.config.warmup_tokens, self.config.max_new_tokens))
        race, warm = Race(self.target, self.proposer, short, self.selection, self.method), 0
        for conversation in conversations:
            if warm == self.config.warmup_prompts:
                break
            try:
                warm += len(list(race.run(conversation, with_transformers=self.config.transformers_prompts > 0))) > 0
            except UnreadablePrompt:
                continue

    @property
    def can_go_on(self) -> bool:
        """Whether what the proposer knows behind some answers can be made again from them."""
        return isinstance(self.proposer, Recalling) or not isinstance(self.proposer, Remembering)

    def pass_over(self, answered: Answered) -> None:
        """Goes on as behind the conversation that was ``answered`` before."""
        self._run += len(answered.prompts)
        if isinstance(self.proposer, Recalling):
            for prompt in answered.prompts:
                self.proposer.recall(prompt.speculative.tokens)

    def answered(self, conversation: Conversation, with_transformers: bool) -> Answered:
        """The conversation answered, as far as it can be read."""
        prompts: list[PromptResult] = []
        try:
            prompts.extend(self.run(conversation, with_transformers))
        except UnreadablePrompt as error:
            return Answered(conversation.key, prompts, str(error))
        return Answered(conversation.key, prompts)

    def run(self, conversation: Conversation, with_transformers: bool) -> Iterator[PromptResult]:
        """A result per user turn.

        Raises:
            UnreadablePrompt: the target cannot answer a turn.
        """
        answers: list[list[int]] = []
        for prompt in user_turns(conversation):
            encoded = encode_prompt(self.target, prompt, answers, self.config.max_new_tokens)
            traces = self._traces(encoded, conversation.source, with_transformers)
            autoregressive, speculative = traces["autoregressive"], traces["speculative"]
            comparison = compare(
                self.target,
                encoded,
                autoregressive.tokens,
                speculative.tokens,
                selection=self.selection,
                max_new_tokens=self.config.max_new_tokens,
            )
            yield PromptResult(speculative, autoregressive, comparison, traces.get("transformers"))
            answers.append(autoregressive.tokens)

    def _traces(self, encoded: Encoded, source: str, with_transformers: bool) -> dict[str, GenerationTrace]:
        limits: dict[str, Any] = {
            "max_new_tokens": self.config.max_new_tokens,
            "selection": self.selection,
            "source": source,
        }
        decoders: dict[str, Callable[[], GenerationTrace]] = {
            "autoregressive": lambda: generate_autoregressive(self.target, encoded, **limits),
            "speculative": lambda: generate(self.target, self.proposer, encoded, method=self.method, **limits),
        }
        if with_transformers:
            decoders["transformers"] = lambda: generate_transformers(self.target, encoded, **limits)
        names = list(decoders)
        first = self._run % len(names)
        self._run += 1
        return {name: decoders[name]() for name in names[first:] + names[:first]}
