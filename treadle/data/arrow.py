"""`ArrowSource`: rows of Arrow tables, whatever file they came from. Cells become plain Python."""

# pyarrow.compute makes its functions when it is imported, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from treadle.data.columns import Layout, TableConfig, layout
from treadle.data.source import Order, Row, RowSource
from treadle.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from treadle.data.rendering import Renderer


class ArrowSource(RowSource):
    """A subclass passes every batch through `_check` when it is made, and reads one row at a time later."""

    def __init__(self, config: TableConfig, renderer: Renderer, order: Order) -> None:
        super().__init__(renderer, order)
        self._config = config
        self._names: list[str] = []
        self._layout: Layout | None = None

    @abstractmethod
    def _read(self, number: int) -> tuple[str, pa.RecordBatch | pa.Table]:
        """The name of a row, and a table that holds it alone."""

    def row(self, number: int) -> Row:
        name, table = self._read(number)
        assert self._layout is not None, "rows are read after they were checked"
        try:
            return self._layout.row(name, _cells(table))
        except ValueError as error:
            raise DataError(f"{name}: {error}") from None

    def _check(self, batch: pa.RecordBatch, where: str, first: int) -> None:
        """Check rows `first`, `first` + 1, … of the file `where`. Raises DataError for the first that is unusable."""
        if not batch.num_rows:
            return
        try:
            batch.validate(full=True)
            if self._layout is None:
                self._layout = layout(self._config, _columns(batch.schema), _cells(batch.slice(0, 1)), where)
            prompts = _column(batch, self._layout.prompt)
            if self._layout.json or not _surely_prompts(prompts):
                for prompt in _plain(prompts):
                    self._layout.prompt_of(prompt)
            for column in batch.columns:
                if "time" in (kind := str(column.type)) or "date" in kind or "duration" in kind:
                    _plain(column)
        except ValueError as error:
            if batch.num_rows == 1:
                raise DataError(f"{where}: row {first} (counted from 0): {error}") from None
            for number in range(batch.num_rows):  # which one?
                self._check(batch.slice(number, 1), where, first + number)
            raise

    def _check_names(self, names: list[str], where: str) -> None:
        """All files of a data set have the same columns, and each column once. Raises DataError."""
        twins = sorted({name for name in names if names.count(name) > 1})
        if twins:
            raise DataError(f"{where}: there are two columns {twins[0]!r}")
        self._names = self._names or names
        if sorted(names) != sorted(self._names):
            raise DataError(
                f"{where}: the columns are {', '.join(names)}, those of the first file are {', '.join(self._names)}: "
                "all files of a data set have the same"
            )


def _cells(table: pa.RecordBatch | pa.Table) -> dict[str, Any]:
    return _plain(table)[0]


def _plain(values: pa.RecordBatch | pa.Table | pa.Array) -> list[Any]:
    """As Python has them. Raises ValueError for a date after the year 9999 or a time zone that nobody knows."""
    try:
        return values.to_pylist()
    except (ArithmeticError, LookupError) as error:
        raise ValueError(f"a cell has no value in Python ({type(error).__name__}: {error})") from error


def _columns(schema: pa.Schema) -> dict[str, tuple[str, ...]]:
    """Every column, and every field of columns of records, by dotted name."""
    import pyarrow as pa

    found: dict[str, tuple[str, ...]] = {name: (name,) for name in schema.names}

    def fields(of: pa.DataType, path: tuple[str, ...]) -> None:
        if isinstance(of, pa.StructType):
            for field in of:
                inner = (*path, field.name)
                found.setdefault(".".join(inner), inner)
                fields(field.type, inner)

    for field in schema:
        fields(field.type, (field.name,))
    return found


def _column(batch: pa.RecordBatch, path: tuple[str, ...]) -> pa.Array:
    import pyarrow.compute as pc

    name, *inner = path
    column = batch.column(name)
    return pc.struct_field(column, inner) if inner else column  # type: ignore[return-value]


def _surely_prompts(column: pa.Array) -> bool:
    """Whether a quick look shows that all cells are good prompts. False says nothing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_list(column.type):
        return _all_filled(column)
    messages = column.flatten()  # type: ignore[attr-defined]
    if not pa.types.is_struct(messages.type) or column.null_count or messages.null_count:
        return False
    if messages.type.get_field_index("role") < 0 or messages.type.get_field_index("content") < 0:
        return False
    roles, length = messages.field("role"), pc.list_value_length(column)
    if not (_all_filled(roles) and _all_filled(messages.field("content")) and pc.min(length).as_py() > 0):
        return False
    last = roles.take(pc.subtract(pc.cumulative_sum(length), 1))
    return not pc.any(pc.equal(last, "assistant")).as_py()


def _all_filled(column: pa.Array) -> bool:
    """Whether all cells are text, and none is blank."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_string(column.type) or column.null_count:
        return False
    length = pc.utf8_length(pc.utf8_trim_whitespace(column))
    return bool(pc.all(pc.greater(length, 0)).as_py())
