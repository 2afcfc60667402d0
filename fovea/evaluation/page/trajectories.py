"""What the viewer of the page steps through: the kept answers of every evaluation, pictures included, each once."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from fovea.evaluation.page.entries import Entry, labelled

#: What the viewer does without.
_UNUSED = frozenset(("tokens", "choices"))


def viewer_data(entries: Sequence[Entry]) -> str:
    """JSON for a ``script`` element; empty if no evaluation kept an answer.

    ``entries``: ``label`` and ``trajectories``, as :mod:`fovea.evaluation.trajectory_files` describes them, without
    token ids and with places in ``pictures`` instead of file names. ``pictures``: ``data``, a data URI, and size.
    """
    pictures: dict[str, dict[str, Any]] = {}
    shown = []
    for entry in labelled([entry for entry in entries if entry.trajectories]):
        own = []
        for record in entry.trajectories:
            places = [_place(entry.folder / name, pictures) for name in record["pictures"]]
            rounds = [{k: v for k, v in one.items() if k not in _UNUSED} for one in record["rounds"]]
            own.append({k: v for k, v in record.items() if k not in _UNUSED} | {"pictures": places, "rounds": rounds})
        shown.append({"label": entry.label, "trajectories": own})
    if not shown:
        return ""
    content = {"entries": shown, "pictures": list(pictures.values())}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    # Inside a script element nothing may look like its end, nor like the begin of a comment.
    return text.replace("<", "\\u003c")


def _place(path: Path, pictures: dict[str, dict[str, Any]]) -> int:
    """Place of the picture at ``path`` among ``pictures``, to which it is added if it is new."""
    content = path.read_bytes()
    kind = "png" if path.suffix == ".png" else "jpeg"
    data = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    if data not in pictures:
        with Image.open(path) as image:
            pictures[data] = {"data": data, "width": image.width, "height": image.height}
    return list(pictures).index(data)
