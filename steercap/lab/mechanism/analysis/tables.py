"""pyarrow tables of the analysis, with their origin in the schema's metadata, and their rows for pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Final

from steercap.core.extras import extra
from steercap.core.values import plain
from steercap.errors import InvalidSpec
from steercap.files.tables import export_table

if TYPE_CHECKING:
    import pyarrow as pa

#: Metadata key in the schema under which a table's origin is stored.
KEY: Final = b"steercap"
#: Default maximum of rows in the text of a table.
ROWS: Final = 20


def table_of(columns: Mapping[str, Sequence[Any]], **about: Any) -> pa.Table:
    """Build a table with its origin in the schema's metadata.

    Args:
        columns: columns by name, all of one length: lists or NumPy arrays.
        **about: origin of the table, in JSON-compatible values, or NumPy's of these.
    """
    with extra("analysis"):
        import pyarrow as pa

    return described(pa.table(dict(columns)), **about)


def described(table: pa.Table, **about: Any) -> pa.Table:
    """Return a table with the origin `about`, JSON-compatible values, as the only metadata of its schema."""
    return table.replace_schema_metadata({KEY: json.dumps(about, default=plain).encode()})


def about(table: pa.Table) -> dict[str, Any]:
    """Read the origin of an analysis table: model, site, layer, number of random vectors, and the like.

    Args:
        table: table from any function of the analysis, also after filtering, sorting, or writing to and from Parquet.

    Raises:
        InvalidSpec: the table is not an analysis table.
    """
    known = (getattr(getattr(table, "schema", None), "metadata", None) or {}).get(KEY)
    if known is None:
        raise InvalidSpec(
            "this is not a table of steercap.lab.mechanism.analysis: its schema does not say what it was made of"
        )
    found: dict[str, Any] = json.loads(known)
    return found


def rows_of(table: pa.Table, *columns: str, maker: str) -> list[dict[str, Any]]:
    """Return the rows of a table as dictionaries, for a picture; the error names `maker`, functions that make such.

    Raises:
        InvalidSpec: the table lacks a column, or has no rows.
    """
    names = list(getattr(table, "column_names", ()))
    if missing := [column for column in columns if column not in names]:
        raise InvalidSpec(f"this picture takes a table of {maker}, and the one given lacks {', '.join(missing)}")
    if not table.num_rows:
        raise InvalidSpec(f"this picture takes a table of {maker}, and the one given has no rows")
    found: list[dict[str, Any]] = table.to_pylist()
    return found


def save_table(table: pa.Table, path: str | Path) -> Path:
    """Write a table to one file, atomically, and return its path.

    Args:
        table: any table; its origin is written to Parquet, but not to CSV.
        path: file to write, `.parquet` or `.csv`.

    Raises:
        InvalidFile: the file has another suffix.
    """
    return export_table(path, table)


def as_text(table: pa.Table, rows: int = ROWS) -> str:
    """Format the first rows of a table in aligned columns, numbers to four digits, without pandas.

    Args:
        table: any table.
        rows: maximum number of rows.
    """
    some = table.slice(0, rows)
    cells = [[_shown(value) for value in some.column(name).to_pylist()] for name in table.column_names]
    widths = [max(map(len, (name, *column))) for name, column in zip(table.column_names, cells, strict=True)]
    lines = zip(*([name, *column] for name, column in zip(table.column_names, cells, strict=True)), strict=True)
    text = "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)
    return text if table.num_rows <= rows else f"{text}\n… {table.num_rows - rows:,} more rows"


def once(compared: int) -> float:
    """Return the |z| that, on average, one of `compared` standard normal values exceeds."""
    return NormalDist().inv_cdf(1 - 0.5 / max(compared, 2))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return repr(value)[1:-1] if isinstance(value, str) else str(value)
