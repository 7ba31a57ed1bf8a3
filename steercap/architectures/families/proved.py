"""What was proved of which architectures, as a run of `scripts/prove_models.py` wrote it beside this file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

PATH: Final = Path(__file__).parent / "proved.json"


class Same(msgspec.Struct, frozen=True):
    """How near the worst row of a site is to transformers' row.

    Args:
        cosine: least cosine.
        error: greatest error of an element, over the norm of transformers' row.
    """

    cosine: float
    error: float


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What became of one tiny model.

    Args:
        name: of its configuration, see `testing.architectures`.
        model_type, architecture: transformers' names.
        device: "cpu" or "cuda".
        vllm: its version.
        family: that knows the classes of its layers, "" where what they take and give was derived.
        code: these classes, and the fingerprint of each one's `forward`.
        dtype: that it was run in.
        sites: that can be read and edited.
        lens: by how much the lens did not close at start, relative to the spread of the logits.
        rows: by site and part of the sequence, the worst row against transformers'; empty where transformers' could
            not be compared with.
        edits: by operation, the worst row of all sites, likewise.
        refused: why it cannot be served here; "" if it can.
    """

    name: str
    model_type: str = ""
    architecture: str = ""
    device: str = "cpu"
    vllm: str = ""
    family: str = ""
    code: dict[str, str] = {}
    dtype: str = ""
    sites: tuple[str, ...] = ()
    lens: float = 0.0
    rows: dict[str, Same] = {}
    edits: dict[str, float] = {}
    refused: str = ""

    @property
    def against_transformers(self) -> bool:
        """Whether its rows were compared with transformers'."""
        return bool(self.rows)

    @property
    def worst(self) -> Same | None:
        """The worst row of all sites."""
        if not self.rows:
            return None
        found = self.rows.values()
        return Same(min(one.cosine for one in found), max(one.error for one in found))


@cache
def records() -> tuple[Record, ...]:
    """What was proved; nothing if no run has written it."""
    return tuple(msgspec.json.decode(PATH.read_bytes(), type=list[Record])) if PATH.exists() else ()


def verified(code: Mapping[str, str]) -> bool:
    """Whether rows of layers of just this code were compared with transformers'.

    Args:
        code: classes of layers, as families name them, and the fingerprint of each one's `forward`.
    """
    known = {pair for one in records() if one.against_transformers for pair in one.code.items()}
    return bool(code) and all(code.values()) and set(code.items()) <= known


def columns(record: Record) -> tuple[str, ...]:
    """A record as a row of a table: see `TITLES`."""
    if record.refused:
        said = ("refused", "", "", "", "")
    else:
        worst = record.worst
        rows = f"{worst.error:.0e}" if worst else "lens alone"
        edits = f"{max(record.edits.values()):.0e}" if record.edits else ""
        said = (record.family or "derived", ", ".join(record.sites), rows, edits, f"{record.lens:.0e}")
    where = f"{record.vllm} {record.device}".strip()
    return (record.architecture or record.name, ", ".join(record.code), *said, record.dtype, where)


TITLES: Final = ("architecture", "layers", "family", "sites", "rows", "edits", "lens", "dtype", "vLLM")


def markdown(found: Sequence[Record]) -> str:
    """Records as a table of a page, those that can be served before the others, which say why not."""
    served, refused = _parted(found)
    lines = ["| " + " | ".join(TITLES) + " |", "|" + "---|" * len(TITLES)]
    lines += ["| " + " | ".join(columns(one)) + " |" for one in served]
    if refused:
        lines += ["", "| architecture | configuration | refused or not proved, and why |", "|---|---|---|"]
    lines += [f"| {one.architecture or one.model_type} | {one.name} | {_in_a_cell(one.refused)} |" for one in refused]
    return "\n".join(lines) + "\n"


def _parted(found: Iterable[Record]) -> tuple[list[Record], list[Record]]:
    ordered = sorted(found, key=lambda one: (one.architecture.lower(), one.name, one.device))
    return [one for one in ordered if not one.refused], [one for one in ordered if one.refused]


def _in_a_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:300]
