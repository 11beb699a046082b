"""Parquet in and out, by pyarrow. Only imported where a file is Parquet."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from gristmill.bulk.disk import GrowingFile, disk_errors, put_name, sync
from gristmill.bulk.encoders import as_text, valid
from gristmill.bulk.files import Input
from gristmill.bulk.kinds import Format, Kind
from gristmill.bulk.layout import Layout
from gristmill.bulk.parts import Parts, part_name
from gristmill.bulk.rows import BEGINNING, Place, Row
from gristmill.console import needs_extra
from gristmill.errors import InputFileError

with needs_extra("bulk"):
    import pyarrow as pa
    import pyarrow.parquet as pq

BATCH_ROWS: Final = 512
COMPRESSION: Final = "zstd"

_KIND: Final = Kind(Format.PARQUET)
_RESULT_TYPES: Final = {
    "label": pa.string(),
    "score": pa.float64(),
    "scores": pa.list_(pa.struct([("label", pa.string()), ("score", pa.float64())])),
    "error": pa.string(),
    "model": pa.string(),
    "tokens": pa.int64(),
    "truncated": pa.bool_(),
}
_LENGTH: Final = 8  # bytes before each batch of an open part


class ParquetReader:
    """Rows of a Parquet file; an end place counts rows.

    ``converted`` are the columns that rows have as Python values (None: all); what else an output wants of a
    row it finds in ``Row.batch``. ``columns`` of None reads all.
    """

    columns: tuple[str, ...] | None

    def __init__(
        self,
        source: Input,
        start: Place = BEGINNING,
        *,
        columns: Sequence[str] | None = None,
        converted: Sequence[str] | None = None,
    ) -> None:
        if source.piped:
            raise InputFileError("Parquet cannot be read from standard input: name a file")
        self._start = start
        self._source = source
        self._raw = source.open()
        try:
            self._file = pq.ParquetFile(self._raw)
        except (pa.ArrowException, OSError) as error:
            self._raw.close()
            raise InputFileError(f"{source.name} is not a usable Parquet file: {error}") from error
        self.schema = pa.schema([_undictionaried(field) for field in self._file.schema_arrow])
        self.columns = tuple(self.schema.names)
        self._wanted = None if columns is None else [name for name in self.columns if name in columns]
        self._converted = converted
        self._rows = start.offset

    @property
    def taken(self) -> int:
        rows = self._file.metadata.num_rows
        return (self._source.size_bytes or 0) * self._rows // rows if rows else 0

    def __iter__(self) -> Iterator[Row]:
        groups: list[int] = []
        behind = 0
        for number in range(self._file.num_row_groups):
            rows = self._file.metadata.row_group(number).num_rows
            if groups or behind + rows > self._start.offset:
                groups.append(number)
            else:
                behind += rows
        skip = self._start.offset - behind
        batches = self._file.iter_batches(BATCH_ROWS, row_groups=groups, columns=self._wanted)
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                raise InputFileError(f"{self._source.name} cannot be read: {error}") from error
            if batch is None:
                return
            if skip < batch.num_rows:
                yield from self._of(_undictionaried_batch(batch.slice(skip)))
            skip = max(skip - batch.num_rows, 0)

    def _of(self, batch: Any) -> Iterator[Row]:
        names = batch.schema.names if self._converted is None else self._converted
        values = _plain(batch.select([name for name in batch.schema.names if name in names])).to_pylist()
        size = batch.nbytes // batch.num_rows
        for index, row in enumerate(values):
            self._rows += 1
            end = Place(self._start.file, self._rows, self._rows)
            yield Row(row, self._rows, end, size=size, batch=batch, index=index)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._raw.close()


def _undictionaried(field: Any) -> Any:
    """Return a field of values: which dictionaries there are depends on how rows are cut into batches."""
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    return pa.field(field.name, kind, field.nullable)


def _undictionaried_batch(batch: Any) -> Any:
    arrays = [
        array.dictionary_decode() if pa.types.is_dictionary(array.type) else array for array in batch.columns
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(map(_undictionaried, batch.schema)))


def _plain(batch: Any) -> Any:
    """Return ``batch`` with times in microseconds: Python has no nanoseconds."""
    arrays, fields = [], []
    for field, array in zip(batch.schema, batch.columns, strict=True):
        kind = field.type
        if pa.types.is_timestamp(kind) and kind.unit == "ns":
            kind = pa.timestamp("us", kind.tz)
        elif pa.types.is_time64(kind):
            kind = pa.time64("us")
        elif pa.types.is_duration(kind):
            kind = pa.duration("us")
        arrays.append(array if kind == field.type else array.cast(kind, safe=False))
        fields.append(pa.field(field.name, kind))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


class ParquetParts(Parts):
    """Parts of one row group each. An open part is a file of record batches; its mark is its size in bytes.

    ``fields`` are the input's columns to pass on, with their types; ``width`` the number of floats of an
    embedding. See :class:`~gristmill.bulk.parts.Parts`.
    """

    def __init__(self, folder: Path, fields: Sequence[Any], layout: Layout, width: int | None) -> None:
        super().__init__(folder, _KIND)
        self._fields = list(fields)
        self._layout = layout
        types = dict(_RESULT_TYPES)
        if width is not None:
            types["embedding"] = pa.list_(pa.float32(), width)
        self._results = [pa.field(layout.prefix + name, types[name]) for name in layout.names]
        self._schema = pa.schema([*self._fields, *self._results])
        self._rows: list[tuple[Row, Mapping[str, Any]]] = []

    def open(self, number: int, mark: int) -> None:
        self._name(number)
        self._file = GrowingFile(self._growing, mark)
        self._rows = []

    def add(self, row: Row, results: Mapping[str, Any]) -> None:
        self._rows.append((row, results))
        if len(self._rows) == BATCH_ROWS:
            self._flush()

    def save(self) -> int:
        self._flush()
        return self._open_file().sync()

    def seal(self) -> None:
        self._flush()
        self._close_synced()
        with disk_errors(self._final):
            # In one piece: how the rows came to be in batches must not show in the file.
            table = pa.Table.from_batches(self._batches(), schema=self._schema).combine_chunks()
            temporary = self._final.with_name(self._final.name + ".tmp")
            with temporary.open("wb") as sink:
                pq.write_table(table, sink, compression=COMPRESSION, row_group_size=max(table.num_rows, 1))
                sync(sink)
            put_name(temporary, self._final)

    def join(self, count: int, target: Path) -> None:
        """Write the parts 0 to ``count`` - 1 as one file, a row group each."""
        with disk_errors(target), target.open("wb") as sink:
            with pq.ParquetWriter(sink, self._schema, compression=COMPRESSION) as writer:
                for number in range(count):
                    with pq.ParquetFile(self._folder / part_name(number, _KIND)) as part:
                        table = part.read(use_threads=False).cast(self._schema)
                    if table.num_rows:
                        writer.write_table(table.combine_chunks(), row_group_size=table.num_rows)
            sync(sink)

    def _flush(self) -> None:
        if not self._rows:
            return
        arrays = [*self._passed(), *self._added()]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._schema) as stream:
            stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        message = sink.getvalue()
        self._open_file().write(message.size.to_bytes(_LENGTH, "little") + message.to_pybytes())
        self._rows = []

    def _batches(self) -> Iterator[Any]:
        with self._growing.open("rb") as file:
            while length := file.read(_LENGTH):
                message = pa.py_buffer(file.read(int.from_bytes(length, "little")))
                yield from pa.ipc.open_stream(message)

    def _passed(self) -> list[Any]:
        if not self._fields:
            return []
        if self._rows[0][0].batch is None:
            rows = [row.values or {} for row, _ in self._rows]
            return [_column(rows, field) for field in self._fields]
        # The input's own arrays, not Python's idea of them: every type passes as it is.
        slices, start = [], 0
        for i in range(1, len(self._rows) + 1):
            first = self._rows[start][0]
            if i == len(self._rows) or self._rows[i][0].batch is not first.batch:
                names = [field.name for field in self._fields]
                slices.append(first.batch.slice(first.index, i - start).select(names))
                start = i
        table = pa.Table.from_batches(slices, schema=pa.schema(self._fields)).combine_chunks()
        return [column.chunk(0) for column in table.columns]

    def _added(self) -> list[Any]:
        added = []
        for field in self._results:
            values = [results.get(field.name) for _, results in self._rows]
            if pa.types.is_fixed_size_list(field.type):
                added.append(_vectors(values, field.type))
            else:
                # No error is null here, where text formats have an empty cell.
                added.append(pa.array([None if value == "" else value for value in values], field.type))
        return added


def _vectors(values: Sequence[Any], kind: Any) -> Any:
    """Return embeddings, each a base64 tensor of the wire contract or None, as one array."""
    width = kind.list_size
    data = bytearray()
    for value in values:
        if value is None:
            data += bytes(4 * width)
            continue
        if value["dtype"] != "float32" or value["shape"] != [width]:
            raise InputFileError(
                f"an embedding has {value['shape']} of {value['dtype']}, at the beginning it was {width} of "
                "float32: the workers hold different models"
            )
        data += base64.b64decode(value["data"])
    floats = pa.Array.from_buffers(pa.float32(), len(values) * width, [None, pa.py_buffer(bytes(data))])
    missing = pa.array([value is None for value in values], pa.bool_())
    return pa.FixedSizeListArray.from_arrays(floats, width, mask=missing)


def _column(rows: Sequence[Mapping[str, Any]], field: Any) -> Any:
    values = [row.get(field.name) for row in rows]
    if field.type == pa.string():
        values = [None if value is None else valid(as_text(value)) for value in values]
    return pa.array(values, field.type)


def fields_of_text(columns: Sequence[str], types: Mapping[str, str]) -> list[Any]:
    """Return the fields of columns that come from text: strings, but for those that ``types`` names."""
    known = {"integer": pa.int64(), "number": pa.float64(), "truth": pa.bool_()}
    return [pa.field(name, known.get(types.get(name, ""), pa.string())) for name in columns]
