"""What pictures show and what may be asked about them: each scene draws itself and answers questions about itself.

A scene is plain content, without the small accidents of its drawing (offsets, ground): equal scenes are the same
picture for the purpose of keeping training and held-out pictures apart.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

from fovea.targets.tiny.drawing import COLOURS, DIGITS, LETTERS, SHAPES, Canvas

NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ROW_NAMES = ("top", "middle", "bottom")
COLUMN_NAMES = ("left", "centre", "right")


class Turn(NamedTuple):
    """A question, its answer, and the family that both belong to."""

    family: str
    question: str
    answer: str


class Scene(Protocol):
    """Content of a conversation."""

    def draw(self, rng: np.random.Generator) -> tuple[Image.Image, ...]:
        """The pictures, in the order in which the conversation shows them."""
        ...

    def turns(self, rng: np.random.Generator) -> list[Turn]:
        """Questions with answers, every family that suits the scene at least once."""
        ...

    def parts(self) -> tuple[Scene, ...]:
        """The scenes that must not be known to the other split: those of the single pictures."""
        ...


@dataclass(frozen=True)
class Thing:
    """A coloured shape in a cell."""

    colour: str
    shape: str
    place: tuple[int, int]

    @property
    def name(self) -> str:
        """Colour and shape."""
        return f"{self.colour} {self.shape}"

    @property
    def named(self) -> str:
        """The name with its article."""
        return f"{'an' if self.colour == 'orange' else 'a'} {self.name}"


def _pick(rng: np.random.Generator, options) -> str:
    return options[rng.integers(len(options))]


def random_string(rng: np.random.Generator, length: int, alphabet: str = LETTERS + DIGITS) -> str:
    """``length`` characters of ``alphabet``."""
    return "".join(alphabet[i] for i in rng.integers(len(alphabet), size=length))


def _things(rng: np.random.Generator, places: list[tuple[int, int]]) -> tuple[Thing, ...]:
    """Two to five things in different cells of ``places``, in reading order."""
    colours, shapes = list(COLOURS), list(SHAPES)
    chosen = sorted(rng.choice(len(places), size=rng.integers(2, 6), replace=False))
    return tuple(Thing(_pick(rng, colours), _pick(rng, shapes), places[i]) for i in chosen)


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _counted(number: int, noun: str) -> str:
    plural = noun if number == 1 else noun + ("es" if noun.endswith("s") else "s")
    return f"{NUMBER_WORDS[number]} {plural}"


@dataclass(frozen=True)
class Board:
    """Shapes in a grid of three by three and, on some boards, a sign along the lower edge."""

    things: tuple[Thing, ...]
    sign: str

    @staticmethod
    def sample(rng: np.random.Generator) -> Board:
        """Two to five things; about every second board has a sign."""
        if rng.random() < 0.5:
            return Board.with_sign(rng)
        return Board(_things(rng, [(row, column) for row in range(3) for column in range(3)]), "")

    @staticmethod
    def with_sign(rng: np.random.Generator) -> Board:
        """Two to five things in the upper rows and a sign of three characters."""
        return Board(_things(rng, [(row, column) for row in range(2) for column in range(3)]), random_string(rng, 3))

    def draw(self, rng: np.random.Generator) -> tuple[Image.Image, ...]:
        canvas = Canvas(3, 3, rng)
        for thing in self.things:
            canvas.shape(thing.place, thing.shape, thing.colour)
        for column, character in enumerate(self.sign):
            canvas.glyph((2, column), character)
        if self.sign:
            canvas.frame((2, 0), 3)
        return (canvas.image(),)

    def caption(self) -> str:
        """Count, colours, shapes and places in reading order, then the sign: 30 to 80 tokens."""
        named = [f"{thing.named} at the {_place_name(thing.place)}" for thing in self.things]
        sign = f"The sign says {self.sign}." if self.sign else "There is no sign."
        return f"The picture shows {_counted(len(self.things), 'shape')}: {_listed(named)}. {sign}"

    def parts(self) -> tuple[Scene, ...]:
        return (self,)

    def turns(self, rng: np.random.Generator) -> list[Turn]:
        thing, other = (self.things[i] for i in rng.choice(len(self.things), size=2, replace=False))
        noun = _pick(rng, [thing.shape, _pick(rng, SHAPES)])
        turns = [
            Turn("caption", "Describe the picture.", self.caption()),
            Turn("colour", f"What colour is the shape at the {_place_name(thing.place)}?", f"It is {thing.colour}."),
            Turn("place", f"What is at the {_place_name(other.place)}?", f"There is {other.named}."),
            Turn("count", "How many shapes are there?", f"There are {_counted(len(self.things), 'shape')}."),
            Turn("count", f"How many {_counted(0, noun)[3:]} are there?", self._count(noun)),
        ]
        if sum(thing.name == t.name for t in self.things) == 1:
            turns.append(Turn("place", f"Where is the {thing.name}?", f"It is at the {_place_name(thing.place)}."))
        if self.sign:
            turns.append(Turn("sign", "What does the sign say?", f"The sign says {self.sign}."))
        return turns

    def _count(self, noun: str) -> str:
        number = Counter(thing.shape for thing in self.things)[noun]
        return f"There {'is' if number == 1 else 'are'} {_counted(number, noun)}."


def _place_name(place: tuple[int, int]) -> str:
    row, column = place
    return "centre" if place == (1, 1) else f"{ROW_NAMES[row]} {COLUMN_NAMES[column]}"


@dataclass(frozen=True)
class Chart:
    """Three bars of different colours, one to six half cells high."""

    bars: tuple[tuple[str, int], ...]

    @staticmethod
    def sample(rng: np.random.Generator) -> Chart:
        """Heights are drawn independently, so bars may be equal."""
        colours = rng.permutation(list(COLOURS))[:3]
        return Chart(
            tuple(
                (str(colour), int(height)) for colour, height in zip(colours, rng.integers(1, 7, size=3), strict=True)
            )
        )

    def draw(self, rng: np.random.Generator) -> tuple[Image.Image, ...]:
        canvas = Canvas(3, 3, rng)
        for column, (colour, height) in enumerate(self.bars):
            canvas.bar((2, column), height, colour)
        return (canvas.image(),)

    def parts(self) -> tuple[Scene, ...]:
        return (self,)

    def turns(self, rng: np.random.Generator) -> list[Turn]:
        colour, height = self.bars[rng.integers(3)]
        heights = [height for _, height in self.bars]
        turns = [
            Turn("chart", "Read the bar chart.", f"The bars are {_listed([f'{c} {h}' for c, h in self.bars])}."),
            Turn("chart", f"How high is the {colour} bar?", f"The {colour} bar is {height} high."),
        ]
        if heights.count(max(heights)) == 1:
            top_colour, top = max(self.bars, key=lambda bar: bar[1])
            turns.append(Turn("chart", "Which bar is the highest?", f"The {top_colour} bar, with {top}."))
        return turns


@dataclass(frozen=True)
class Strings:
    """Rows of random characters on a grid of cells."""

    rows: tuple[str, ...]
    columns: int

    @staticmethod
    def sample(rng: np.random.Generator, size: int = 3) -> Strings:
        """A ``size`` x ``size`` grid; the rows of a large one have four to eight characters each."""
        lengths = rng.integers(min(3, size), size + 1, size=size)
        return Strings(tuple(random_string(rng, int(length)) for length in lengths), size)

    def draw(self, rng: np.random.Generator) -> tuple[Image.Image, ...]:
        canvas = Canvas(len(self.rows), self.columns, rng)
        for row, text in enumerate(self.rows):
            for column, character in enumerate(text):
                canvas.glyph((row, column), character)
        return (canvas.image(),)

    def parts(self) -> tuple[Scene, ...]:
        return (self,)

    def turns(self, rng: np.random.Generator) -> list[Turn]:
        row = int(rng.integers(len(self.rows)))
        first = int(rng.integers(max(1, len(self.rows) - 4)))
        last = min(len(self.rows), first + 5)
        return [
            Turn("strings", f"Read line {row + 1}.", self.rows[row]),
            Turn("strings", f"Read lines {first + 1} to {last}.", " ".join(self.rows[first:last])),
        ]


@dataclass(frozen=True)
class Table:
    """Two-digit numbers in rows that are named by letters and columns that are named by digits."""

    names: str
    numbers: tuple[tuple[str, ...], ...]

    @staticmethod
    def sample(rng: np.random.Generator, size: int = 8) -> Table:
        """Three to ``size`` - 1 rows and three to five columns."""
        rows, columns = int(rng.integers(3, size)), int(rng.integers(3, 6))
        names = "".join(sorted(rng.permutation(list(LETTERS))[:rows]))
        return Table(names, tuple(tuple(random_string(rng, 2, DIGITS) for _ in range(columns)) for _ in range(rows)))

    def draw(self, rng: np.random.Generator) -> tuple[Image.Image, ...]:
        canvas = Canvas(8, 8, rng)
        for column in range(len(self.numbers[0])):
            canvas.glyph((0, column + 1), str(column + 1))
        for row, (name, numbers) in enumerate(zip(self.names, self.numbers, strict=True), start=1):
            canvas.glyph((row, 0), name)
            for column, number in enumerate(numbers, start=1):
                canvas.glyph((row, column), number)
        return (canvas.image(),)

    def parts(self) -> tuple[Scene, ...]:
        return (self,)

    def turns(self, rng: np.random.Generator) -> list[Turn]:
        row, column = int(rng.integers(len(self.names))), int(rng.integers(len(self.numbers[0])))
        lines = [f"{name}: {' '.join(numbers)}" for name, numbers in zip(self.names, self.numbers, strict=True)]
        return [
            Turn("table", f"Read row {self.names[row]} of the table.", lines[row]),
            Turn("table", f"Read column {column + 1} of the table.", " ".join(line[column] for line in self.numbers)),
            Turn("table", "Read the table.", "; ".join(lines[:4]) + "."),
        ]


@dataclass(frozen=True)
class Pair:
    """Two boards, of which the questions ask one or both."""

    first: Board
    second: Board

    @staticmethod
    def sample(rng: np.random.Generator) -> Pair:
        """Boards with signs."""
        return Pair(Board.with_sign(rng), Board.with_sign(rng))

    def draw(self, rng: np.random.Generator) -> tuple[Image.Image, ...]:
        return self.first.draw(rng) + self.second.draw(rng)

    def parts(self) -> tuple[Scene, ...]:
        return (self.first, self.second)

    def turns(self, rng: np.random.Generator) -> list[Turn]:
        which = int(rng.integers(2))
        board, word = (self.first, self.second)[which], ("first", "second")[which]
        return [
            Turn("pair", "Read both signs.", f"The signs say {self.first.sign} and {self.second.sign}."),
            Turn("pair", f"Describe the {word} picture.", board.caption()),
            Turn("pair", f"What does the {word} sign say?", f"The sign says {board.sign}."),
        ]


@dataclass(frozen=True)
class Text:
    """A string to copy or turn round, and a number to count from; no picture."""

    string: str
    start: int

    @staticmethod
    def sample(rng: np.random.Generator) -> Text:
        """Four to eight characters."""
        return Text(random_string(rng, int(rng.integers(4, 9))), int(rng.integers(1, 60)))

    def draw(self, rng: np.random.Generator) -> tuple[Image.Image, ...]:
        return ()

    def parts(self) -> tuple[Scene, ...]:
        return (self,)

    def turns(self, rng: np.random.Generator) -> list[Turn]:
        counted = " ".join(str(self.start + step) for step in range(8))
        return [
            Turn("text", f"Repeat {self.string} twice.", f"{self.string} {self.string}"),
            Turn("text", f"Count from {self.start} to {self.start + 7}.", counted),
        ]
