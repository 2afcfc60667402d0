"""From chat turns to token ids: the chat template, cut into segments around the assistant's answers.

The template is rendered with a unique marker in the place of every answer, which cuts the text into segments. An
answer begins where the generation prompt ends: what the template writes between the two, such as a space, is part of
the answer's first token when the target answers. The whole text is tokenised at once, so its ids are those of the
processor, and every token belongs to the segment or the answer that it lies in. Answers given as ids stand in the place
of a stand-in word's tokens: they are never re-tokenised, and no search through ids is needed to find them again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from fovea.targets.chat_template import ChatTemplate, PromptError
from fovea.targets.conversation import Conversation
from fovea.targets.messages import MessageError, checked_turns

#: Stands for an answer whose ids are given while the text around it is tokenised.
_STAND_IN = "Yes"


@dataclass(frozen=True)
class PromptTokens:
    """Ids of a conversation, one placeholder id per image, and which of them belong to an answer.

    Of an answer that is empty, or a text of spaces, no token does: its end alone would teach to say nothing.
    """

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
        self._template = ChatTemplate(renderer, sees=image_token is not None)
        self._tokenizer = tokenizer
        self._image_token = image_token
        self._eos_ids = frozenset(eos_ids)
        controls = {str(token) for token in (*tokenizer.all_special_tokens, image_token) if token}
        longest_first = sorted(controls, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first))) if controls else None

    def tokens(self, conversation: Conversation, answers: Sequence[Sequence[int]] | None = None) -> PromptTokens:
        """Ids of ``conversation``; ``answers`` as in :meth:`fovea.targets.base.Target.encode`.

        Raises:
            PromptError: turns that cannot be read (see :func:`fovea.targets.messages.checked_turns`), control tokens in
                a text, other number of answers than turns ask for, or a template that fails or drops what it was given.
        """
        turns = self._checked(conversation, own_answers=answers is None)
        if answers is not None:
            turns = _with_answers(turns, len(answers), conversation.key)
        segments, leads = self._segments(turns, conversation)
        if answers is None:
            texts = [self._text(turn["content"]) for turn in turns if turn["role"] == "assistant"]
        else:
            texts = [_STAND_IN] * len(answers)
        spoken = [lead + text for lead, text in zip(leads, texts, strict=True)]
        pieces = self._tokenize([text for pair in zip(segments, [*spoken, ""], strict=True) for text in pair])
        around, filled = pieces[::2], pieces[1::2]

        ids, mask = list(around[0]), [False] * len(around[0])
        for turn, segment in enumerate(around[1:]):
            if answers is None:
                answer, ends = filled[turn], bool(segment) and segment[0] in self._eos_ids
                says = bool(texts[turn].strip())
            else:
                last = turn + 1 == len(answers) and turns[-1]["role"] == "assistant"
                answer, segment, ends = self._given(list(answers[turn]), segment, last)
                says = bool(answer)
            ids += answer + segment
            mask += [says] * len(answer) + [says and ends and not place for place in range(len(segment))]
        return PromptTokens(ids, mask)

    def _given(self, answer: list[int], segment: list[int], last: bool) -> tuple[list[int], list[int], bool]:
        """A given answer without its end token, what follows it, and whether that begins with the answer's end token.

        An answer without one was cut: the end token that the template writes behind it is not its own. If the template
        writes another, or none, the last answer ends as the target ended it; an earlier end leaves no trace, as in a
        chat.
        """
        if not answer or answer[-1] not in self._eos_ids:
            return answer, segment, False
        answer, end = answer[:-1], answer[-1]
        if segment[:1] == [end]:
            return answer, segment, True
        return (answer, [end], True) if last else (answer, segment, False)

    # -- what is refused ----------------------------------------------------------------------------------------

    def _checked(self, conversation: Conversation, own_answers: bool) -> list[dict[str, Any]]:
        """The turns with their contents as lists of parts; refuses what no template could render right.

        The texts of assistant turns matter only if they are the answers.
        """
        key = conversation.key
        if conversation.fault:
            raise PromptError(f"conversation '{key}': {conversation.fault}")
        try:
            turns = checked_turns(conversation.messages, len(conversation.images))
        except MessageError as error:
            raise PromptError(f"conversation '{key}': {error}") from error
        if conversation.images and self._image_token is None:
            raise PromptError(f"conversation '{key}' has images and the target reads text only; use a VLM target")
        for number, turn in enumerate(turns, 1):
            found = self._control.search(self._text(turn["content"])) if self._control else None
            if found and (own_answers or turn["role"] != "assistant"):
                raise PromptError(
                    f"conversation '{key}', turn {number}: the text holds '{found.group()}', which the tokenizer would "
                    "read as a control token; remove or rewrite it"
                )
        return turns

    # -- rendering ----------------------------------------------------------------------------------------------

    def _segments(self, turns: list[dict[str, Any]], conversation: Conversation) -> tuple[list[str], list[str]]:
        """The rendered template, split where the answers go, and what leads up to each answer.

        There is one more segment than there are answers. A segment ends where the generation prompt ends; a lead is
        the space that the template writes behind that.
        """
        texts = [part["text"] for turn in turns for part in turn["content"] if part["type"] == "text"]
        marker = "answer-goes-here"
        while any(marker in text for text in texts):
            marker += "-"
        marker = f"[{marker}]"
        messages = [
            turn | {"content": [{"type": "text", "text": marker}]} if turn["role"] == "assistant" else turn
            for turn in turns
        ]
        answered = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
        rendered = self._template.render(
            messages, generation_prompt=turns[-1]["role"] != "assistant", key=conversation.key
        )
        segments = rendered.split(marker)
        dropped = [t for turn in turns if turn["role"] != "assistant" for t in self._texts(turn) if t not in rendered]
        images = rendered.count(self._image_token) if self._image_token else 0
        if dropped or len(segments) != len(answered) + 1 or images != len(conversation.images):
            what = f"the text '{dropped[0][:40]}'" if dropped else "an answer or an image"
            raise PromptError(
                f"conversation '{conversation.key}': the chat template of the checkpoint loses {what}; "
                "it may be made for another message format: give the checkpoint the chat_template of its chat model"
            )
        leads = []
        for place, number in enumerate(answered):
            before = marker.join(segments[: place + 1])
            prompt = self._template.render(messages[:number], generation_prompt=True, key=conversation.key)
            lead = before.removeprefix(prompt)
            leads.append(lead if lead.isspace() and segments[place].endswith(lead) else "")
        trimmed = [segment.removesuffix(lead) for segment, lead in zip(segments, [*leads, ""], strict=True)]
        return trimmed, leads

    @staticmethod
    def _texts(turn: dict[str, Any]) -> list[str]:
        return [part["text"].strip() for part in turn["content"] if part["type"] == "text"]

    @staticmethod
    def _text(parts: list[dict[str, Any]]) -> str:
        return "".join(part["text"] for part in parts if part["type"] == "text")

    def _tokenize(self, pieces: list[str]) -> list[list[int]]:
        """Ids of each of ``pieces``, segments and answers by turns, which are tokenised as one text.

        A token that reaches into an answer is the answer's. The tokenizer's BOS is added unless the template wrote it.
        """
        text = "".join(pieces)
        bos = getattr(self._tokenizer, "bos_token", None)
        add = not (bos and text.startswith(bos))
        read = self._tokenizer(text, add_special_tokens=add, return_offsets_mapping=True)
        ends = list(accumulate(map(len, pieces)))
        ids: list[list[int]] = [[] for _ in pieces]
        place = 0
        for token, (start, end) in zip(read["input_ids"], read["offset_mapping"], strict=True):
            while end > ends[place] and (start >= ends[place] or place % 2 == 0):
                place += 1
            ids[place].append(token)
        return ids


def _with_answers(turns: list[dict[str, Any]], count: int, key: str) -> list[dict[str, Any]]:
    """The turns with an empty assistant turn as answer to each of the first ``count`` user turns, and no other.

    Where it stands see :func:`fovea.targets.conversation.prompts_of`.
    """
    asked = sum(turn["role"] == "user" for turn in turns)
    if count not in (asked, asked - 1):
        raise PromptError(
            f"conversation '{key}' has {asked} user turns; give {asked} or {asked - 1} answers, not {count}"
        )
    out: list[dict[str, Any]] = []
    waiting = False
    for turn in [*turns, None]:
        if waiting and count and (turn is None or turn["role"] != "system"):
            out.append({"role": "assistant", "content": []})
            count, waiting = count - 1, False
        if turn is not None and turn["role"] != "assistant":
            out.append(turn)
            waiting = waiting or turn["role"] == "user"
    return out
