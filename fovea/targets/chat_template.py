"""A checkpoint's chat template: which one it is, in which form it takes messages, and what it writes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from jinja2 import TemplateError

#: A message's content as a template may take it: a list of parts, or one string.
Form = Literal["parts", "text"]

_REMEDY = "give the checkpoint's folder the chat_template.jinja of its chat model"
_PROBE = "a-text-to-look-for"
# The probe inside a printed part, in Python's or in JSON's spelling.
_PRINTED = re.compile(rf"""['"]text['"]\s*:\s*['"]{_PROBE}""")


class PromptError(ValueError):
    """A conversation that the target cannot read; the message names its key and the remedy."""


def find_chat_template(renderer: Any) -> str:
    """The chat template of a processor, or else of its tokenizer; of several by name it is the one called "default".

    Raises:
        PromptError: neither has one, or none of several is called so.
    """
    template = getattr(renderer, "chat_template", None)
    template = template or getattr(getattr(renderer, "tokenizer", None), "chat_template", None)
    if not template:
        raise PromptError(
            "the checkpoint has no chat template; add chat_template.jinja to its folder, as its model card has it"
        )
    if not isinstance(template, dict):
        return template
    if "default" not in template:
        raise PromptError(
            f"the checkpoint has chat templates called {', '.join(sorted(template))} and none called default; "
            "save the one for chats as chat_template.jinja in its folder"
        )
    return template["default"]


class ChatTemplate:
    """What renders the messages of one checkpoint.

    A target that reads text only is given strings. One that sees is given lists of parts, as transformers has it for
    processors. Its template may be that of its language model all the same, made for strings: then a message without
    pictures is given as a string, as a user of transformers would write it for this template, and one with pictures is
    refused, for there is no place for them. Which of the two a template takes is tried out, once for each role.

    Args:
        renderer: processor or tokenizer, whose ``apply_chat_template`` renders.
        sees: whether the target reads pictures.
    """

    def __init__(self, renderer: Any, *, sees: bool) -> None:
        self._renderer, self._sees = renderer, sees
        self._template = find_chat_template(renderer)
        self._forms: dict[str, Form | None] = {}

    def render(self, turns: Sequence[dict[str, Any]], *, generation_prompt: bool, key: str) -> str:
        """The text of ``turns`` (see :func:`fovea.targets.messages.checked_turns`).

        Raises:
            PromptError: naming ``key``: the template refuses the turns, fails on them, or takes no such content.
        """
        try:
            messages = [{"role": turn["role"], "content": self._content(turn)} for turn in turns]
            return self._apply(messages, generation_prompt)
        except PromptError as error:
            raise PromptError(f"conversation '{key}': {error}") from error
        except TemplateError as error:
            raise PromptError(
                f"conversation '{key}': the chat template of the checkpoint refuses it: {error}"
            ) from error
        except Exception as error:  # a template is a program and fails as one
            raise PromptError(
                f"conversation '{key}': the chat template of the checkpoint fails on it ({type(error).__name__}: "
                f"{error}); it may be made for another message format: {_REMEDY}"
            ) from error

    def _content(self, turn: dict[str, Any]) -> list[dict[str, Any]] | str:
        role, parts = turn["role"], turn["content"]
        form = self._form(role) if self._sees else "text"
        if form == "parts":
            return parts
        if form is None:
            raise PromptError(f"the chat template of the checkpoint prints the parts of messages as code; {_REMEDY}")
        if any(part["type"] != "text" for part in parts):
            raise PromptError(f"it has pictures, and the chat template of the checkpoint takes texts only; {_REMEDY}")
        return "".join(part["text"] for part in parts)

    def _form(self, role: str) -> Form | None:
        """How the contents of ``role`` are given; None if parts are printed as they are and a string is no good."""
        if role not in self._forms:
            as_parts = self._tried(role, [_text_part(_PROBE)])
            printed = _PRINTED.search(as_parts) is not None
            if _PROBE in as_parts and not printed:
                self._forms[role] = "parts"
            elif _PROBE in self._tried(role, _PROBE):
                self._forms[role] = "text"
            else:  # the template's own words against what it is really given tell more
                self._forms[role] = None if printed else "parts"
        return self._forms[role]

    def _tried(self, role: str, content: list[dict[str, Any]] | str) -> str:
        """What the template writes for a message of ``role``; nothing if it fails."""
        messages = [{"role": role, "content": content}]
        if role != "user":
            asked = {"role": "user", "content": "Yes" if self._form("user") == "text" else [_text_part("Yes")]}
            messages = [*messages, asked] if role == "system" else [asked, *messages]
        try:
            return self._apply(messages, generation_prompt=False)
        except Exception:  # in whatever way
            return ""

    def _apply(self, messages: list[dict[str, Any]], generation_prompt: bool) -> str:
        return self._renderer.apply_chat_template(
            messages, chat_template=self._template, tokenize=False, add_generation_prompt=generation_prompt
        )


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
