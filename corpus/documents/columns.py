"""Documents in a column of Parquet files, and of the Arrow files of Hugging Face datasets.

A column of strings has texts. A column of lists of integers has token ids. Both need pyarrow.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from corpus.documents.unit import FileRef, Unit
from corpus.errors import InputError

_ROWS, _BATCH_BYTES = 512, 16 << 20
"""Rows of Parquet that are read at a time, and about their bytes."""


def need_pyarrow(path: str | Path) -> Any:
    """The package pyarrow. Raises InputError, naming ``path``, where it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise InputError(
            f"data.source: {path} needs pyarrow: pip install -e '.[data]' in Convoy's checkout"
        ) from None
    return pyarrow


def open_zstd(path: Path) -> io.BufferedReader:
    """A file that zstd has compressed, to read."""
    return io.BufferedReader(need_pyarrow(path).input_stream(str(path), compression="zstd"))


def column_units(kind: str, file: FileRef, column: str) -> Iterator[Unit]:
    """A unit for each row group of a Parquet file; one for an Arrow file."""
    pyarrow = need_pyarrow(file.path)
    if kind == "arrow":
        yield Unit(kind, (file,))
        return
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file.path) as parquet:
            _check_column(file, parquet.schema_arrow, column)
            first = 0
            for group in range(parquet.num_row_groups):
                rows = parquet.metadata.row_group(group).num_rows
                yield Unit(kind, (file,), group, group + 1, first, rows)
                first += rows
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"data.source: {file.path} cannot be read: {_line(error)}") from None


def column_documents(
    unit: Unit, column: str, most_bytes: int
) -> Iterator[tuple[str, str | np.ndarray | int | None]]:
    """The name, and the text or the token ids, of each row; None for a null, and the number of
    bytes for a text of more than ``most_bytes``."""
    pyarrow, file, number = need_pyarrow(unit.files[0].path), unit.files[0], unit.first
    try:
        for values in _columns(pyarrow, unit, column):
            lists = pyarrow.types.is_list(values.type) or pyarrow.types.is_large_list(values.type)
            for value in values:
                number += 1
                name = f"{file.name}#{number}"
                if not value.is_valid:
                    yield name, None
                elif lists:
                    yield name, value.values.to_numpy(zero_copy_only=False)
                else:
                    size = value.as_buffer().size
                    yield name, value.as_py() if size <= most_bytes else size
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"data.source: {file.path} cannot be read: {_line(error)}") from None


def _columns(pyarrow: Any, unit: Unit, column: str) -> Iterator[Any]:
    file = unit.files[0]
    if unit.kind == "parquet":
        from pyarrow.parquet import ParquetFile

        with ParquetFile(file.path) as parquet:
            for group in range(unit.start, unit.stop):
                meta = parquet.metadata.row_group(group)
                row_bytes = max(1, meta.total_byte_size // max(1, meta.num_rows))
                rows = max(1, min(_ROWS, _BATCH_BYTES // row_bytes))
                for batch in parquet.iter_batches(rows, row_groups=[group], columns=[column]):
                    yield batch.column(0)
        return
    with pyarrow.memory_map(file.path) as source:
        try:
            reader: Any = pyarrow.ipc.open_stream(source)
            batches = iter(reader)
        except pyarrow.ArrowInvalid:
            source.seek(0)
            reader = pyarrow.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        _check_column(file, reader.schema, column)
        for batch in batches:
            yield batch.column(reader.schema.get_field_index(column))


def _check_column(file: FileRef, schema: Any, column: str) -> None:
    pyarrow = need_pyarrow(file.path)
    if column not in schema.names:
        names = ", ".join(schema.names)
        raise InputError(
            f"data.text_field ({column}) must be a column of {file.path}; it has {names}"
        )
    kind, types = schema.field(column).type, pyarrow.types
    is_text = types.is_string(kind) or types.is_large_string(kind)
    is_tokens = (types.is_list(kind) or types.is_large_list(kind)) and types.is_integer(
        kind.value_type
    )
    if not (is_text or is_tokens):
        raise InputError(
            f"data.text_field ({column}) must be a column of texts or of lists of token ids in "
            f"{file.path}; it has {kind}"
        )


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
