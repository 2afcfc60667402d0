"""Records of tables: parquet and arrow files, TSV with pictures in base64, and data sets of the Hugging Face hub.

All are read by the ``datasets`` library, which maps them into memory: texts are read a batch at a time, and a picture
only when somebody opens it. A record is a mapping from column to value in which pictures are
:class:`~fovea.targets.conversation.StoredImage`.
"""

from __future__ import annotations

import ast
import base64
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.benchmarks.entry import Placed
from datamodules.benchmarks.sheets import sheet
from datamodules.conversation_source import SourceError
from fovea.targets.conversation import StoredImage

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "hf://datasets/"
#: What arrow calls a column of pictures as ``datasets`` stores them: their bytes, or else the path of a file.
_STORED = {"bytes", "path"}
#: A shorter text in the place of a picture is the index of the record that holds it.
_SHORTEST_PICTURE = 64
_BATCH = 256


def table_records(files: Sequence[Path]) -> Iterator[Placed]:
    """Records of parquet, arrow or TSV files of one kind, or of the one folder that ``save_to_disk`` wrote.

    Raises:
        SourceError: the files cannot be read, or the library is not installed.
    """
    library, first = _library(), files[0]
    name = f"{first.parent.name}/{first.name}"  # subjects of MMMU have files of one name
    lines = sheet(first) if first.suffix == ".tsv" else None
    try:
        if first.is_dir():
            dataset = library.load_from_disk(str(first))
        elif lines is not None:
            dataset = _tsv(library, first, lines.columns)
        else:
            kind = first.suffix[1:]
            dataset = library.load_dataset(kind, data_files=[str(file) for file in files], split="train")
    except Exception as error:  # a cut file, a full disk: the library has no one error for it
        raise SourceError(f"{first} cannot be read as a table ({_first_line(error)}); download it anew") from error
    if lines is None:
        return _records(dataset, name)
    if len(dataset) != len(lines.rows):
        raise SourceError(f"{first} has {len(lines.rows)} rows, of which {len(dataset)} can be read; download it anew")
    return _records(dataset, name, in_text="image", lines=lines.rows)


def hub_records(address: str, subset: str | None, split: str) -> Iterator[Placed]:
    """Records of ``hf://datasets/<owner>/<name>[@revision]``; downloaded once, then from the library's cache.

    Raises:
        SourceError: there is no such data set, split or network.
    """
    library = _library()
    name, _, revision = address.removeprefix(HUB).partition("@")
    try:
        dataset = library.load_dataset(name, subset, split=split, revision=revision or None)
    except Exception as error:
        where = f"{address}{f', subset {subset}' if subset else ''}, split {split}"
        raise SourceError(f"{where} cannot be loaded ({_first_line(error)}); name a local folder instead") from error
    return _records(dataset, f"{name}{f'/{subset}' if subset else ''}")


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise SourceError("tables are read by the datasets library: pip install -e '.[benchmarks]'") from error
    return datasets


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _tsv(library: Any, file: Path, columns: Sequence[str]) -> Dataset:
    """All columns as they are written: a text "None" or "NA" is an option like others."""
    features = library.Features({name: library.Value("large_string") for name in columns})
    return library.load_dataset(
        "csv",
        data_files=[str(file)],
        split="train",
        delimiter="\t",
        features=features,
        keep_default_na=False,
        encoding="utf-8-sig",
    )


def _records(
    dataset: Dataset, name: str, in_text: str | None = None, lines: Sequence[int] | None = None
) -> Iterator[Placed]:
    """Records of a data set; the column ``in_text`` holds pictures in base64, ``lines`` are those of its text."""
    import datasets

    table = dataset.data.table
    pictures = [field.name for field in table.schema if field.name == in_text or _holds_pictures(field.type)]
    labels = {n: feature for n, feature in dataset.features.items() if isinstance(feature, datasets.ClassLabel)}
    texts = table.select([column for column in table.column_names if column not in pictures])
    columns = {column: table.column(column) for column in pictures}
    rows: dict[str, int] = {}
    if in_text in columns and "index" in table.column_names:
        rows = {str(index): row for row, index in enumerate(table.column("index").to_pylist())}
    row = 0
    for batch in texts.to_batches(max_chunksize=_BATCH):
        for record in batch.to_pylist():
            place = f"record {row + 1}" if lines is None else f"line {lines[row]}"
            for label, feature in labels.items():
                record[label] = None if record[label] is None else feature.int2str(record[label])
            for column, values in columns.items():
                where = f"{name}, {place}"
                if column == in_text:
                    record[column] = _in_text(values, row, rows, where)
                else:
                    record[column] = _in_column(values, row, where if len(columns) == 1 else f"{where}, {column}")
            yield place, record
            row += 1


def _holds_pictures(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _holds_pictures(kind.value_type)
    if pa.types.is_struct(kind):
        return {field.name for field in kind} == _STORED
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _in_column(column: Any, row: int, name: str) -> list[StoredImage]:
    """Pictures of one cell: none, one or a list."""
    import pyarrow as pa

    cell = column[row]
    if not cell.is_valid:
        return []
    if isinstance(cell, pa.ListScalar | pa.LargeListScalar):
        return [
            StoredImage(f"{name}, picture {place + 1}", partial(_encoded, column, row, place), _origin(cell[place]))
            for place in range(len(cell))
        ]
    return [StoredImage(name, partial(_encoded, column, row, None), _origin(cell))]


def _origin(cell: Any) -> str | None:
    """The file that a picture of a table was made of, if the table tells."""
    import pyarrow as pa

    return cell["path"].as_py() if isinstance(cell, pa.StructScalar) else None


def _encoded(column: Any, row: int, place: int | None) -> bytes:
    cell = column[row] if place is None else column[row][place]
    value = cell.as_py()
    if isinstance(value, dict):
        value = value["bytes"] if value["bytes"] is not None or not value["path"] else Path(value["path"]).read_bytes()
    if value is None:
        raise ValueError("it is empty")
    return value


def _in_text(column: Any, row: int, rows: dict[str, int], name: str) -> list[StoredImage]:
    """Pictures written out in base64, as a list of several, or as the index of the record that holds them."""
    cell = column[row]
    content = cell.as_buffer() if cell.is_valid else b""
    if not len(content):
        return []
    if len(content) <= _SHORTEST_PICTURE and (held := rows.get(bytes(content).decode())) is not None and held != row:
        return _in_text(column, held, {}, name)
    if bytes(content[:1]) != b"[":
        return [StoredImage(name, partial(_decoded, column, row, None))]
    count = len(ast.literal_eval(cell.as_py()))
    return [
        StoredImage(f"{name}, picture {place + 1}", partial(_decoded, column, row, place)) for place in range(count)
    ]


def _decoded(column: Any, row: int, place: int | None) -> bytes:
    text = column[row].as_py()
    text = text if place is None else ast.literal_eval(text)[place]
    text = "".join(text.split())  # some are written in lines, and without their padding
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
