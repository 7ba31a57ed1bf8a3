"""Summary of a data set of activations, for `steercap inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.filesize import decimal

from steercap.cli.tables import facts
from steercap.core.display import layers_by_site

if TYPE_CHECKING:
    from rich.console import RenderableType

    from steercap.lab.datasets import DatasetFolder, Receipt


def inspected_dataset(path: Path, *, verify: bool) -> tuple[dict[str, Any], list[RenderableType]]:
    """Describe a data set, as a document and as tables; `verify` compares the SHA-256 of its files, not their sizes
    alone.

    Raises:
        InvalidFile: it cannot be read.
    """
    from steercap.lab.datasets import DatasetFolder

    folder = DatasetFolder.open(path)
    receipts = folder.receipts()
    wrong = folder.wrong(receipts.values(), content=verify)
    totals, definition = folder.totals(), folder.definition
    is_whole = totals is not None and not wrong
    whole = folder.wrong_whole([*receipts.values()]) if verify and is_whole else ""
    known = {
        "kind": "data set of activations",
        "model": definition.model.get("name", ""),
        "layers": layers_by_site(one.point for one in definition.points),
        "codec": ", ".join(dict.fromkeys(str(point.coding) for point in definition.points)),
        "row": f"{definition.row_bytes:,} bytes at all points",
        **{name: _said(value) for name, value in definition.asked.items()},
        **_counted(receipts),
        "complete": "yes" if totals is not None else "no; the call that began it resumes it",
        "files": "; ".join(wrong.values())
        or whole
        or (
            "equal to their receipts, by SHA-256"
            if verify
            else ("equal to their receipts, by size; --verify reads them")
        ),
        "sha256": "" if totals is None else totals.sha256,
    }
    document = {
        **known,
        "wrong": {str(number): why for number, why in wrong.items()} | ({"whole": whole} if whole else {}),
        "definition": msgspec.to_builtins(definition),
        "totals": None if totals is None else msgspec.to_builtins(totals),
    }
    return document, [facts(str(path), known), *_norms(folder, complete=is_whole and not whole)]


def _counted(receipts: dict[int, Receipt]) -> dict[str, str]:
    found = list(receipts.values())
    return {
        "shards": f"{len(found):,}, {decimal(sum(receipt.bytes for receipt in found))}",
        "documents": f"{sum(receipt.documents for receipt in found):,}",
        "tokens": f"{sum(receipt.tokens for receipt in found):,} read, {sum(receipt.rows for receipt in found):,} kept",
    }


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {said}" for name, said in value.items() if said not in (None, {}, ""))
    return "" if value in (None, False) else str(value)


def _norms(folder: DatasetFolder, *, complete: bool) -> list[RenderableType]:
    """Return a table of the norms of each point's rows; none for a data set that is incomplete or damaged."""
    from rich.table import Table

    if not complete or not folder.definition.statistics_every:
        return []
    table = Table(title="norms", title_justify="left")
    for name in ("point", "looked at", "mean", "least", "greatest", "zeros"):
        table.add_column(name, justify="left" if name == "point" else "right")
    for point, found in folder.merged(known.point for known in folder.definition.points).items():
        numbers = (f"{float(one):.4g}" for one in (found.norm_mean, found.norm_min, found.norm_max))
        table.add_row(str(point), f"{int(found.count):,}", *numbers, f"{float(found.zeros):.2%}")
    return [table]
