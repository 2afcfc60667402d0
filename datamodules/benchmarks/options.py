"""The options of multiple-choice questions, which are a list in one field of a record, or texts in a field each."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: Fields that a TSV of VLMEvalKit has, as many of them as the longest question has options.
_LETTERS = tuple("ABCDEFGHI")
#: Field in which MathVista and MMMU say whether a question has options.
_KIND = "question_type"


def choices(
    *fields: str, listed: str | None = None, letters: str = "AB", free: str | None = None
) -> Callable[[Mapping[str, Any]], list[str]]:
    """What finds the options of a record, in order. Empty ones may stand last, and are none.

    It raises KeyError if a field that belongs to the options is missing, and ValueError if an option is empty before
    another one, whose letter would be wrong, or if a question that must have options has none.

    Args:
        fields: those of the authors' files with an option each; all must be there.
        listed: the authors' field with a list of options; tables write it as a text.
        letters: fields that must be there in a record that has neither; those up to the last one of I follow.
        free: what ``question_type`` calls a question without options; a record that does not say of what type it is
            may have none too. Without ``free`` no question may.
    """

    def found(record: Mapping[str, Any]) -> list[str]:
        kind = record.get(_KIND)
        if free is not None and kind == free and not any(name in record for name in (listed, *fields, *_LETTERS)):
            return []
        names, values = stored(record)
        texts = [text_of(value) for value in values]
        count = max((place for place, text in enumerate(texts, 1) if text), default=0)
        if "" in texts[:count]:
            hole, last = names[texts.index("")], names[count - 1]
            raise ValueError(f"option '{hole}' is empty and '{last}' behind it is not; mend the record or take it out")
        if not count and (free is None or kind not in (None, free)):
            raise ValueError(f"no option in '{names[0] if names else listed}'; mend the record or take it out")
        return texts[:count]

    def stored(record: Mapping[str, Any]) -> tuple[list[str], Sequence[Any]]:
        """Where each option stands, and what stands there."""
        if listed is not None and listed in record:
            values = _list(record[listed], listed)
            return [f"{listed}[{place}]" for place in range(len(values))], values
        lettered = [place for place, name in enumerate(_LETTERS, 1) if name in record]
        if lettered and not any(name in record for name in fields):
            names = [*_LETTERS[: max(len(letters), *lettered)]]
        else:
            names = [listed] if listed else [*(fields or letters)]
        return names, [record[name] for name in names]

    return found


def text_of(value: Any) -> str:
    """What stands in a field; empty if nothing does, for which tables write "nan"."""
    text = "" if value is None else str(value).strip()
    return "" if text == "nan" else text


def _list(value: Any, name: str) -> Sequence[Any]:
    try:
        values = ast.literal_eval(value) if isinstance(value, str) else value
    except (SyntaxError, ValueError):
        values = value
    if values is None:
        return []
    if not isinstance(values, list | tuple):
        raise ValueError(f"'{name}' is no list of options but {value!r:.60}")
    return values
