"""Capture: one row an answer and layer, the mean over the answer's tokens, reduced in the workers."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from steercap.errors import InvalidFile
from steercap.formats.base import read_tensors, write_tensors
from steercap.persona.flight import each_of
from steercap.persona.folder import RunFolder
from steercap.persona.progress import Count, Report
from steercap.persona.records import Records, Response
from steercap.persona.settings import PersonaSettings
from steercap.tables import PART_RECORDS
from steercap.vectors import Exchange, mean_rows

if TYPE_CHECKING:
    from steercap.model import SteerModel

VERSION: Final = 1


class RowsHeader(msgspec.Struct, frozen=True):
    """The header of a file of rows.

    Args:
        version: of the file.
        layers: what the second axis of the tensor `rows`, float32 [answers, layers, hidden], is.
        ids: of the answers, in the order of the rows.
        prompts: SHA-256 of the token ids that were read for each, in hexadecimal.
    """

    version: int
    layers: tuple[int, ...]
    ids: tuple[str, ...]
    prompts: tuple[str, ...]


async def capture(
    model: SteerModel,
    settings: PersonaSettings,
    folder: RunFolder,
    records: Records,
    report: Report | None,
) -> None:
    """Have the model read the kept answers, and write their rows to `rows/<trait>.safetensors`.

    As in Chen et al., Persona Vectors: prompt and answer are read once more, and the rows of the answer's tokens are
    averaged. Rows that the folder holds are not read again; those of answers that are no longer kept stay there.

    Args:
        model, settings, folder: of the run.
        records: all answers, and those whose rows are wanted.
        report: told how far it is.

    Raises:
        The errors of `SteerModel.generate`.
    """
    if not folder.is_done("capture"):
        folder.begin("capture")
    parts = folder.parts("capture")
    have = _ids(_whole(folder)) if folder.is_done("capture") else set()
    left = _ids(sorted(parts.glob("*.safetensors")))  # of a process that was killed
    have |= left
    todo = [one for one in records.kept if one.id not in have]
    count = Count("capture", len(records.kept), len(records.kept) - len(todo), report)
    if todo or left or not folder.is_done("capture"):
        answers = {response.id: response for response in records.responses}
        await _read(model, settings, parts, [answers[one.id] for one in todo], count)
        _join(folder, list(answers))
        folder.finish("capture")


def load_rows(path: str | Path) -> tuple[RowsHeader, torch.Tensor]:
    """Read a file of rows.

    Returns:
        Its header, and float32 [answers, layers, hidden].

    Raises:
        InvalidFile: no such file, or not of rows, or of a newer version.
    """
    header, tensors = read_tensors(Path(path))
    rows = tensors.get("rows")
    known = _header(Path(path), header)
    if rows is None or rows.dim() != 3 or rows.shape[:2] != (len(known.ids), len(known.layers)):
        raise InvalidFile(f"{path} does not hold the rows that its header names; capture them again")
    return known, rows


def rows_file(folder: RunFolder, trait: str) -> Path:
    """Where the rows of a trait are; a file each, since all of them may not fit in memory."""
    return folder.path / "rows" / f"{trait}.safetensors"


async def _read(
    model: SteerModel, settings: PersonaSettings, parts: Path, todo: Sequence[Response], count: Count
) -> None:
    async def read(chunk: Sequence[Response]) -> None:
        rows = await mean_rows(
            model,
            [Exchange(_prompt(settings, response), response.token_ids) for response in chunk],
            layers=settings.layers,
            site=settings.site,
        )
        header = RowsHeader(
            VERSION,
            rows.layers,
            tuple(response.id for response in chunk),
            tuple(digest.hex() for digest in rows.prompts),
        )
        write_tensors(parts / f"{uuid.uuid4().hex}.safetensors", header, {"rows": rows.values})
        count.add(len(chunk))

    chunks = [todo[first : first + PART_RECORDS] for first in range(0, len(todo), PART_RECORDS)]
    await each_of(chunks, read, max(1, settings.max_in_flight // PART_RECORDS))


def _prompt(settings: PersonaSettings, response: Response) -> list[dict[str, str]]:
    question = {"role": "user", "content": response.question_text}
    return [{"role": "system", "content": response.system_prompt}, question] if settings.read_system else [question]


def _join(folder: RunFolder, order: Sequence[str]) -> None:
    """Write the rows of each trait as one file, in the order of the answers."""
    files = defaultdict(list)
    for path in [
        *(_whole(folder) if folder.is_done("capture") else ()),
        *folder.parts("capture").glob("*.safetensors"),
    ]:
        for place, name in enumerate(_ids_of(path)):
            files[name.split("/")[0]].append((path, place))
    ranks = {name: rank for rank, name in enumerate(order)}
    for trait, places in files.items():
        read = {path: load_rows(path) for path in {path for path, _ in places}}
        found = {
            (header := read[path][0]).ids[place]: (header.prompts[place], read[path][1][place])
            for path, place in places
        }
        ids = sorted(found, key=ranks.__getitem__)
        (layers,) = {header.layers for header, _ in read.values()}
        header = RowsHeader(VERSION, layers, tuple(ids), tuple(found[name][0] for name in ids))
        write_tensors(rows_file(folder, trait), header, {"rows": torch.stack([found[name][1] for name in ids])})


def _whole(folder: RunFolder) -> list[Path]:
    return sorted((folder.path / "rows").glob("*.safetensors"))


def _ids(paths: Sequence[Path]) -> set[str]:
    return {name for path in paths for name in _ids_of(path)}


def _ids_of(path: Path) -> tuple[str, ...]:
    return _header(path, read_tensors(path, tensors=False)[0]).ids


def _header(path: Path, text: str) -> RowsHeader:
    try:
        header = msgspec.json.decode(text, type=RowsHeader)
    except msgspec.MsgspecError as error:
        raise InvalidFile(f"{path} holds no rows of answers: {error}") from error
    if header.version != VERSION:
        raise InvalidFile(f"{path} holds rows in version {header.version}; this steercap reads {VERSION}")
    return header
