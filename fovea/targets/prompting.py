"""From chat turns to token ids: the chat template, cut into segments around the assistant's answers.

The template is rendered once with a unique marker in the place of every answer. The text between two markers is
tokenised alone, as a target reads it when it answers turn by turn, and the ids of the answers are put in between: so
they are never re-tokenised, and no search through ids is needed to find them again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fovea.targets.conversation import Conversation

_ROLES = ("system", "user", "assistant")


class PromptError(ValueError):
    """A conversation that the target cannot read; the message names its key and the remedy."""


def find_chat_template(renderer: Any) -> str:
    """The chat template of a processor, or else of its tokenizer.

    Raises:
        PromptError: neither has one.
    """
    template = getattr(renderer, "chat_template", None)
    template = template or getattr(getattr(renderer, "tokenizer", None), "chat_template", None)
    if not template:
        raise PromptError(
            "the checkpoint has no chat template; add chat_template.jinja to its folder, as its model card has it"
        )
    return template


@dataclass(frozen=True)
class PromptTokens:
    """Ids of a conversation, one placeholder id per image, and which of them belong to an answer."""

    ids: list[int]
    answer_mask: list[bool]


class ChatPrompt:
    """Chat template and tokenizer of one checkpoint.

    Args:
        renderer: what renders the chat template: the processor, or the tokenizer of a text-only model.
        tokenizer: its tokenizer.
        image_token: what the template writes for an image; None for a text-only model.
        eos_ids: token ids that end an answer.
    """

    def __init__(self, renderer: Any, tokenizer: Any, *, image_token: str | None, eos_ids: Sequence[int]) -> None:
        self._renderer = renderer
        self._template = find_chat_template(renderer)
        self._tokenizer = tokenizer
        self._image_token = image_token
        self._eos_ids = frozenset(eos_ids)
        controls = {str(token) for token in (*tokenizer.all_special_tokens, image_token) if token}
        longest_first = sorted(controls, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first))) if controls else None

    def tokens(self, conversation: Conversation, answers: Sequence[Sequence[int]] | None = None) -> PromptTokens:
        """Ids of ``conversation``; ``answers`` as in :meth:`fovea.targets.base.Target.encode`.

        Raises:
            PromptError: unknown role or part, video, control tokens in a text, other number of images or answers
                than turns ask for, nothing to read, or a template that drops what it was given.
        """
        messages = conversation.messages
        if answers is not None:
            messages = _with_answers(messages, len(answers), conversation.key)
        turns = self._checked(conversation, messages)
        segments = [self._tokenize(text, first=not at) for at, text in enumerate(self._segments(turns, conversation))]
        if answers is None:
            texts = [self._text(turn["content"]) for turn in turns if turn["role"] == "assistant"]
            filled = [(self._tokenize(text), True) for text in texts]
        else:
            ends = [segment[0] if segment else None for segment in segments[1:]]
            filled = [self._open(list(answer), end) for answer, end in zip(answers, ends, strict=True)]

        ids, mask = list(segments[0]), [False] * len(segments[0])
        for (answer, closed), segment in zip(filled, segments[1:], strict=True):
            is_end = closed and bool(segment) and segment[0] in self._eos_ids
            ids += answer + segment
            mask += [True] * len(answer) + [is_end and not place for place in range(len(segment))]
        return PromptTokens(ids, mask)

    def _open(self, answer: list[int], end: int | None) -> tuple[list[int], bool]:
        """A given answer without its end token, and whether that was ``end``, which the template writes itself.

        Another end token leaves no trace in the conversation, just as in a chat.
        """
        if answer and answer[-1] in self._eos_ids:
            return answer[:-1], answer[-1] == end
        return answer, False

    # -- what is refused ----------------------------------------------------------------------------------------

    def _checked(self, conversation: Conversation, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The turns with their contents as lists of parts; refuses what no template could render right."""
        key, turns, images, seen = conversation.key, [], 0, False
        for number, message in enumerate(messages, 1):
            role, content = message["role"], message["content"]
            if role not in _ROLES:
                raise PromptError(
                    f"conversation '{key}', turn {number}: unknown role '{role}'; use {', '.join(_ROLES)}"
                )
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
            for part in parts:
                if part["type"] == "video":
                    raise PromptError(f"conversation '{key}', turn {number}: video is not supported; use its frames")
                if part["type"] not in ("text", "image"):
                    raise PromptError(f"conversation '{key}', turn {number}: unknown part '{part['type']}'")
                if part["type"] == "text":
                    self._refuse_control_tokens(part["text"], key, number)
                    seen = seen or (role == "user" and bool(part["text"].strip()))
                else:
                    images += 1
                    seen = seen or role == "user"
            turns.append({"role": role, "content": parts})
        if not seen:
            raise PromptError(f"conversation '{key}' has no user turn with a text or an image; there is nothing to ask")
        if images != len(conversation.images):
            raise PromptError(
                f"conversation '{key}' has {len(conversation.images)} images and {images} image parts; "
                "write one part {'type': 'image'} where each image belongs"
            )
        if images and self._image_token is None:
            raise PromptError(f"conversation '{key}' has images and the target reads text only; use a VLM target")
        return turns

    def _refuse_control_tokens(self, text: str, key: str, number: int) -> None:
        found = self._control.search(text) if self._control else None
        if found:
            raise PromptError(
                f"conversation '{key}', turn {number}: the text holds '{found.group()}', which the tokenizer would "
                "read as a control token; remove or rewrite it"
            )

    # -- rendering ----------------------------------------------------------------------------------------------

    def _segments(self, turns: list[dict[str, Any]], conversation: Conversation) -> list[str]:
        """The rendered template, split where the answers go: one more segment than there are answers."""
        texts = [part["text"] for turn in turns for part in turn["content"] if part["type"] == "text"]
        marker = "answer-goes-here"
        while any(marker in text for text in texts):
            marker += "-"
        marker = f"[{marker}]"
        messages = [
            {"role": turn["role"], "content": self._content([{"type": "text", "text": marker}])}
            if turn["role"] == "assistant"
            else {"role": turn["role"], "content": self._content(turn["content"])}
            for turn in turns
        ]
        rendered = self._renderer.apply_chat_template(
            messages,
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=turns[-1]["role"] != "assistant",
        )
        segments = rendered.split(marker)
        dropped = [t for turn in turns if turn["role"] != "assistant" for t in self._texts(turn) if t not in rendered]
        answers = sum(turn["role"] == "assistant" for turn in turns)
        images = rendered.count(self._image_token) if self._image_token else 0
        if dropped or len(segments) != answers + 1 or images != len(conversation.images):
            what = f"the text '{dropped[0][:40]}'" if dropped else "an answer or an image"
            raise PromptError(
                f"conversation '{conversation.key}': the chat template of the checkpoint loses {what}; "
                "it may be made for another message format: give the checkpoint the chat_template of its chat model"
            )
        return segments

    def _content(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]] | str:
        """Parts as they are for a processor; text-only templates take strings."""
        return parts if self._image_token else self._text(parts)

    @staticmethod
    def _texts(turn: dict[str, Any]) -> list[str]:
        return [part["text"].strip() for part in turn["content"] if part["type"] == "text"]

    @staticmethod
    def _text(parts: list[dict[str, Any]]) -> str:
        return "".join(part["text"] for part in parts)

    def _tokenize(self, text: str, first: bool = False) -> list[int]:
        """Ids of ``text``; only the first segment may get the tokenizer's BOS, unless the template wrote it."""
        bos = getattr(self._tokenizer, "bos_token", None)
        add = first and not (bos and text.startswith(bos))
        return list(self._tokenizer(text, add_special_tokens=add)["input_ids"])


def _with_answers(messages: list[dict[str, Any]], count: int, key: str) -> list[dict[str, Any]]:
    """The messages with an empty assistant turn behind each of the first ``count`` user turns, and no other."""
    asked = sum(message["role"] == "user" for message in messages)
    if count not in (asked, asked - 1):
        raise PromptError(
            f"conversation '{key}' has {asked} user turns; give {asked} or {asked - 1} answers, not {count}"
        )
    out: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            continue
        out.append(message)
        if message["role"] == "user" and count:
            out.append({"role": "assistant", "content": ""})
            count -= 1
    return out
