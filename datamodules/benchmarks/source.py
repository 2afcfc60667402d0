"""A published benchmark as a source of conversations: ``python evaluate.py benchmark=chartqa benchmark.folder=...``."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from datamodules.benchmarks.catalog import BENCHMARKS
from datamodules.benchmarks.entry import Benchmark, Layout, Placed, Record, get, refuse
from datamodules.benchmarks.tables import HUB, hub_records, table_records
from datamodules.conversation_source import ConversationSource, SourceError, content_hash
from fovea.targets.conversation import Conversation

logger = logging.getLogger(__name__)

_TABLES = (".parquet", ".arrow", ".tsv")
#: Bytes at either end of a large file that stand for it in a digest; a table keeps its offsets in the last ones.
_SAMPLE = 1 << 16


class BenchmarkConversations(ConversationSource):
    """Prompts of a benchmark in one of the layouts in which it is published, in the order of its files.

    The folder holds the authors' files, or a snapshot of its data set on the hub (parquet, or arrow as ``save_to_disk``
    writes it), or a TSV file as VLMEvalKit has it. It may name one of these files, or be ``hf://datasets/<name>``.

    Args:
        benchmark: one of :data:`~datamodules.benchmarks.catalog.BENCHMARKS`.
        folder: of the files.
        split: which of its splits.
        subsets: folders below it, or configurations on the hub, that are read one after another.
        image_root: what the paths of the pictures are relative to, if that is not the folder of the annotation file.
        instruction: stands last in every prompt, in the place of the authors' request for a short answer; "published"
            takes that one, None leaves the bare question.
        options: whether multiple-choice options are shown.
        categories: whether each category is a source of its own (``mme/existence``), reported apart.
        with_images: leave records without a picture out.
        limit: take only the first so many.

    Raises:
        SourceError: for another benchmark, a file that is not what it should be, an identifier that comes twice, or a
            picture that does not exist; of a record file and line are named.
        FileNotFoundError: the folder does not hold the files; the message says which are looked for.
    """

    pictures_required = True

    def __init__(
        self,
        benchmark: str,
        folder: Path | str,
        split: str,
        subsets: Sequence[str] = (),
        image_root: Path | str | None = None,
        instruction: str | None = None,
        options: bool = True,
        categories: bool = True,
        with_images: bool = True,
        limit: int | None = None,
    ) -> None:
        if benchmark not in BENCHMARKS:
            raise SourceError(f"no benchmark is called '{benchmark}'; choose from: {', '.join(sorted(BENCHMARKS))}")
        if limit is not None and limit < 1:
            raise SourceError(f"limit must be at least 1, got {limit}")
        self.name, self.benchmark = benchmark, BENCHMARKS[benchmark]
        self.folder, self.split, self.subsets = str(folder), split, list(subsets)
        self.image_root = Path(image_root) if image_root else None
        self.instruction, self.options, self.categories = instruction, options, categories
        self.with_images, self.limit = with_images, limit
        self._remote = self.folder.startswith(HUB)
        self._files = {} if self._remote else {s: find(self.benchmark, folder, split, s) for s in self.subsets or [""]}

    def _read(self) -> list[Conversation]:
        items: list[Conversation] = []
        places: list[str] = []
        left_out: Counter[str] = Counter()
        keys = _Keys(self.name, self.benchmark.shared)
        for place, folder, record, number in self._records():
            try:
                if why := self._unwanted(record):
                    left_out[why] += 1
                    continue
                item = self._conversation(record, folder, number, keys)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise refuse(place, self.benchmark.title, record, error) from error
            if self.with_images and not item.images:
                left_out["without a picture"] += 1
                continue
            items.append(item)
            places.append(place)
            if len(items) == self.limit:
                break
        self._places, self._left_out = places, left_out
        if not items:
            raise SourceError(f"{self}: there is no prompt: {self._account(0)}")
        self._tell_of_repeated(items)
        return items

    def _records(self) -> Iterator[tuple[str, Path, Record, int]]:
        """Where a record stands, the folder of its file, the record, and its number in its subset from 1."""
        if self._remote:
            for subset in self.subsets or [None]:
                records = hub_records(self.folder, subset, self.split)
                for number, (place, record) in enumerate(records, 1):
                    yield f"{self.folder}, {place}", Path(), _of_subset(record, subset), number
            return
        for subset, found in self._files.items():
            number = 0
            for part in found:
                path = part.files[0]
                for place, record in part.records():
                    number += 1
                    yield f"{path}, {place}", path.parent, _of_subset(record, subset), number

    def _unwanted(self, record: Record) -> str | None:
        """Why a record is no prompt of the split."""
        field = self.benchmark.split
        if field is not None and record.get(field, self.split) != self.split:
            return "of another split"
        return None if self.benchmark.keep(record) else "with a video or of another kind"

    def _tell_of_repeated(self, items: Sequence[Conversation]) -> None:
        """Warns of records that ask the same of the same picture file: without identifiers nothing else tells."""
        first: dict[str, int] = {}
        repeated = []
        for index, item in enumerate(items):
            files = bool(item.images) and all(isinstance(image, Path) for image in item.images)
            if files and first.setdefault(asked := f"{item.images}{item.messages}", index) != index:
                repeated.append((index, first[asked]))
        if repeated:
            other, one = (self._places[index] for index in repeated[0])
            message = "%s: %d records ask what another one asks of the same picture, and are kept; the first: %s as %s"
            logger.warning(message, self, len(repeated), other, one)

    def _conversation(self, record: Record, folder: Path, number: int, keys: _Keys) -> Conversation:
        entry = self.benchmark
        images = entry.images(record, self.image_root or folder)
        names = entry.names(record, images)
        parts, order = entry.content(entry.text(record, self.instruction, self.options), len(images))
        subset = record.get(_SUBSET, "")
        given = get(record, entry.key) if entry.key is not None else None
        name = f"{subset}/{self.split}/{number}".lstrip("/") if given is None else str(given)
        category = get(record, entry.category) if entry.category is not None else None
        answer = get(record, entry.answer) if entry.answer is not None else None
        return Conversation(
            key=keys.key(name, subset),
            messages=[{"role": "user", "content": parts}],
            images=tuple(images[place] for place in order),
            source=f"{self.name}/{category}" if self.categories and category else self.name,
            answer=None if answer is None else str(answer),
            meta={"id": name, "images": [names[place] for place in order]}
            | ({"category": str(category)} if category else {}),
        )

    def digest(self) -> str:
        """Changes with the settings and the files; of a large one its size and its ends are looked at."""
        settings = (self.name, self.split, self.subsets, self.instruction, self.options, self.categories)
        parts: list[str | bytes] = [
            f"{settings}, {self.with_images}, {self.limit}",
            self.folder if self._remote else "",
        ]
        for path in (path for found in self._files.values() for part in found for path in part.files):
            for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
                parts += [file.name, *_ends(file)]
        return content_hash(*parts)

    def __str__(self) -> str:
        return f"{self.benchmark.title} in {self.folder}"


class _Keys:
    """Keys of a benchmark's records, made of the authors' identifiers.

    Where one identifier is shared by several questions, the second has ``/2`` behind it, which is no turn's mark. Of
    several subsets with the same identifiers the later ones put their name before. Other doubled ones stay doubled, and
    are refused.
    """

    def __init__(self, benchmark: str, shared: bool) -> None:
        self._benchmark, self._shared = benchmark, shared
        self._seen: dict[str, tuple[str, int]] = {}

    def key(self, name: str, subset: str) -> str:
        if self._seen.get(name, (subset, 0))[0] != subset:
            name = f"{subset}/{name}"
        count = self._seen.get(name, (subset, 0))[1] + 1
        self._seen[name] = (subset, count)
        return f"{self._benchmark}/{name}" + (f"/{count}" if self._shared and count > 1 else "")


#: Field that says which of several subsets a record belongs to.
_SUBSET = "__subset__"


def _of_subset(record: Record, subset: str | None) -> Record:
    return {**record, _SUBSET: subset} if subset else record


@dataclass(frozen=True)
class Found:
    """Files that are read together: one of the authors', or the shards of a table."""

    files: tuple[Path, ...]
    records: Callable[[], Iterator[Placed]]


def find(benchmark: Benchmark, folder: Path | str, split: str, subset: str = "") -> list[Found]:
    """The files of a split.

    Raises:
        FileNotFoundError: naming the files that are looked for.
    """
    place = Path(folder) / subset
    if place.is_file():
        return _named_file(benchmark, place)
    patterns = [layout.pattern.replace("{split}", split) for layout in benchmark.layouts]
    for above in ("", "*/"):  # an unpacked archive brings a folder of its own
        readers = zip(patterns, benchmark.layouts, strict=True)
        own = [_own(path, layout) for p, layout in readers for path in _paths(place, above + p, layout.beside)]
        if own:
            return own
    if shards := _tables(place, split):
        return [_table(shards)]
    tables = [f"{split}-*.parquet", "arrow files of save_to_disk", f"or a TSV of '{split}'"]
    looked_for = ", ".join([" and ".join(patterns), *tables] if patterns else tables)
    state = "holds none of" if place.is_dir() else "does not exist; it should hold"
    raise FileNotFoundError(f"no {benchmark.title} there: {place} {state} {looked_for}")


def _paths(place: Path, pattern: str, beside: str | None) -> list[Path]:
    return [path for path in sorted(place.glob(pattern)) if beside not in path.relative_to(place).parts]


def _own(path: Path, layout: Layout) -> Found:
    return Found((path,), lambda: layout.read(path))


def _table(shards: list[Path]) -> Found:
    return Found(tuple(shards), lambda: table_records(shards))


def _named_file(benchmark: Benchmark, path: Path) -> list[Found]:
    if path.suffix in _TABLES:
        return [_table([path])]
    for layout in benchmark.layouts:
        if path.suffix == Path(layout.pattern).suffix:
            return [_own(path, layout)]
    raise FileNotFoundError(f"{path} is no file of {benchmark.title}; name one of {', '.join(_TABLES)}, or the folder")


def _tables(place: Path, split: str) -> list[Path]:
    """The shards of the table of a split, or the folder that ``save_to_disk`` wrote; empty if there is neither."""
    for folder in (place, place / split):
        if (folder / "state.json").is_file():
            return [folder]
    for suffix in (".parquet", ".arrow"):
        files = [
            path
            for path in sorted(place.rglob(f"*{suffix}"))
            if path.parent.name == split or path.stem == split or path.stem.startswith((f"{split}-", f"{split}_"))
        ]
        if len(folders := {str(path.parent.relative_to(place)) for path in files}) > 1:
            raise SourceError(
                f"{place} holds tables of '{split}' in several folders: {', '.join(sorted(folders))}; name one of them "
                "as the folder, or those to be read as subsets"
            )
        if files:
            return files
    sheets = sorted(place.glob("*.tsv"))
    ending = [path for path in sheets if path.stem.lower().endswith(split.lower())]
    named = [path for path in sheets if split.lower() in path.stem.lower()]
    sheets = ending or named or (sheets if len(sheets) == 1 else [])  # MME.tsv has no split
    if len(sheets) > 1:
        names = ", ".join(path.name for path in sheets)
        raise SourceError(f"{place} holds several tables of '{split}': {names}; name one of them as the folder")
    return sheets


def _ends(path: Path) -> tuple[str, bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_SAMPLE if path.suffix in _TABLES else -1)
        if size > len(head):
            file.seek(-min(_SAMPLE, size - len(head)), 2)
            head += file.read()
    return str(size), head
