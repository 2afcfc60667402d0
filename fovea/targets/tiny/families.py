"""Conversations about drawn pictures, in families of questions, split into training and held-out scenes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal

import numpy as np

from fovea.targets.conversation import Conversation
from fovea.targets.tiny.banners import Banner
from fovea.targets.tiny.scenes import Board, Chart, Pair, Scene, Strings, Table, Text, Turn

Split = Literal["train", "heldout"]
Sampler = Callable[[np.random.Generator], Scene]
#: What is drawn: pictures of up to eight by eight cells; of three by three; of three by three, wide and tall ones.
Pictures = Literal["grids", "boards", "banners"]

#: One scene in this many is held out.
_HELD_OUT_SHARE = 8


def _strings(rng: np.random.Generator) -> Strings:
    return Strings.sample(rng, 3 if rng.random() < 0.5 else 8)


_GRIDS: dict[str, Sampler] = {
    "caption": Board.sample,
    "colour": Board.sample,
    "count": Board.sample,
    "place": Board.sample,
    "sign": Board.with_sign,
    "chart": Chart.sample,
    "strings": _strings,
    "table": Table.sample,
    "text": Text.sample,
    "pair": Pair.sample,
}
_BOARDS = {name: sampler for name, sampler in _GRIDS.items() if name != "table"} | {"strings": Strings.sample}
#: What each family's questions are about.
FAMILIES: dict[Pictures, dict[str, Sampler]] = {
    "grids": _GRIDS,
    "boards": _BOARDS,
    "banners": {**_BOARDS, "banner": Banner.sample},
}


def split_of(scene: Scene) -> Split:
    """The split that owns ``scene``, by a hash of its content; a scene of several pictures asks for all of them."""
    digest = hashlib.blake2b(repr(scene).encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "little") % _HELD_OUT_SHARE == 0 else "train"


def sample_scene(sampler: Sampler, split: Split, rng: np.random.Generator) -> Scene:
    """A scene of ``split`` all of whose pictures belong to it."""
    while True:
        scene = sampler(rng)
        if all(split_of(part) == split for part in scene.parts()):
            return scene


def conversations(split: Split, count: int, seed: int, pictures: Pictures = "grids") -> list[Conversation]:
    """``count`` conversations, the families of ``pictures`` in turn; the same arguments give the same bytes.

    A training conversation asks several questions about its pictures, the first one of its family, and answers
    them. A held-out one asks a single question, of its family, and keeps the right answer in ``answer``.
    """
    rng = np.random.default_rng([seed, int(split == "heldout")])
    families = list(FAMILIES[pictures].items())
    return [_conversation(*families[i % len(families)], split, f"{split}-{seed}-{i}", rng) for i in range(count)]


def _conversation(family: str, sampler: Sampler, split: Split, key: str, rng: np.random.Generator) -> Conversation:
    scene = sample_scene(sampler, split, rng)
    images = scene.draw(rng)
    turns = shuffled_turns(scene, rng)
    turns.sort(key=lambda turn: turn.family != family)
    asked = turns[:1] if split == "heldout" else turns
    messages = []
    for index, turn in enumerate(asked):
        content: list[dict[str, str]] = [{"type": "image"} for _ in images] if index == 0 else []
        messages.append({"role": "user", "content": [*content, {"type": "text", "text": turn.question}]})
        if split == "train":
            messages.append({"role": "assistant", "content": turn.answer})
    return Conversation(key=f"{key}-{family}", messages=messages, images=images, source=family, answer=asked[0].answer)


def shuffled_turns(scene: Scene, rng: np.random.Generator) -> list[Turn]:
    """The turns of ``scene`` in random order."""
    turns = scene.turns(rng)
    return [turns[i] for i in rng.permutation(len(turns))]
