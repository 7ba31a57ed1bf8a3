"""Stages "capture" and "vectors" of a run over traits.

"capture" writes one row per answer and layer, the mean over the answer's tokens, averaged in the workers; "vectors"
computes directions from the rows of kept answers, and tests them on held-out questions.
"""

from __future__ import annotations

import functools
import operator
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import torch

from steercap.concurrency.loops import each_of
from steercap.core.prompts import templated
from steercap.core.protocols import Count, ProgressCallback
from steercap.errors import InvalidFile
from steercap.files.base import read_tensors, write_tensors
from steercap.files.tables import PART_RECORDS
from steercap.lab.directions import Contrast, Exchange, Rows, mean_rows
from steercap.lab.directions.contrast import directions_of
from steercap.lab.directions.extraction import digest_of, labelled
from steercap.lab.personas.folder import StageFolder
from steercap.lab.personas.generate import messages_of
from steercap.lab.personas.records import SIGNS, Kept, Records, Response, RoleResponse, RunSettings, Sign
from steercap.lab.personas.settings import PersonaSettings
from steercap.steering.directions import DirectionSet

if TYPE_CHECKING:
    from steercap.model import SteerModel

VERSION: Final = 1


class RowsHeader(msgspec.Struct, frozen=True):
    """Base of the headers of files of rows; `version` is the version of the file format."""

    version: int


AnyHeader = TypeVar("AnyHeader", bound=RowsHeader)


class AnswerRowsHeader(RowsHeader, frozen=True):
    """Header of a file with the mean rows of a trait's answers.

    Args:
        layers: layer indices along the second axis of the tensor `rows`, float32 [answers, layers, hidden].
        ids: ids of the answers, in the order of the rows.
        prompts: SHA-256 of the token ids read for each answer, in hexadecimal.
    """

    layers: tuple[int, ...]
    ids: tuple[str, ...]
    prompts: tuple[str, ...]


async def capture(
    model: SteerModel,
    settings: PersonaSettings,
    folder: StageFolder,
    records: Records,
    *,
    room: Mapping[str, int],
    report: ProgressCallback | None,
) -> None:
    """Read the kept answers with the model, and write their rows to `rows/<trait>.safetensors`.

    As in Chen et al., Persona Vectors: prompt and answer are read once more, and the rows of the answer's tokens are
    averaged. Answers whose rows are in the folder are not read again; rows of answers no longer kept stay there.

    Args:
        model, settings, folder: model, settings and folder of the run.
        records: all answers, and the kept ones, whose rows are needed.
        room: number of tokens of each answer to read, by id; see `room_of`.
        report: callback for progress reports, None for none.

    Raises:
        The errors of `SteerModel.read`.
    """
    if not folder.is_done("capture"):
        folder.begin("capture")
        for trait in set(folder.traits) - folder.traits_of("capture"):
            rows_file(folder, trait).unlink(missing_ok=True)  # rows of other settings
    whole = [path for trait in folder.traits if (path := rows_file(folder, trait)).exists()]
    left = _ids([path for trait in folder.traits for path in _parts(folder, trait)])  # of a process that was killed
    have = _ids(whole) | left
    todo = [one for one in records.kept if one.id not in have]
    count = Count("capture", len(records.kept), len(records.kept) - len(todo), report)
    if todo or left or not folder.is_done("capture"):
        answers = {response.id: response for response in records.responses}
        await _read(model, settings, folder, [answers[one.id] for one in todo], room=room, count=count)
        _join(folder, list(answers))
        folder.finish("capture")


def room_of(
    tokenizer: Any,
    max_model_len: int,
    settings: RunSettings,
    responses: Sequence[Response | RoleResponse],
) -> dict[str, int]:
    """Return the number of tokens of each answer that can be read after its prompt, by id of the answer; 0 for none.

    A model that reads must generate one token too, so prompt and answer must be shorter than `max_model_len`. An answer
    that filled the context is read without its last token.
    """
    lengths: dict[tuple[str, str], int] = {}
    found = {}
    for response in responses:
        key = (response.system_prompt, response.question_text)
        if key not in lengths:
            lengths[key] = len(templated(tokenizer, prompt_of(settings, response), {}, spans=False)[0])
        found[response.id] = max(0, min(len(response.token_ids), max_model_len - 1 - lengths[key]))
    return found


def prompt_of(settings: RunSettings, response: Response | RoleResponse) -> list[dict[str, str]]:
    """Return the chat messages before an answer when it is read; with the system prompt if `settings.read_system`."""
    return messages_of(response.system_prompt if settings.read_system else "", response.question_text)


async def answer_rows(
    model: SteerModel,
    settings: RunSettings,
    responses: Sequence[Response | RoleResponse],
    room: Mapping[str, int],
) -> Rows:
    """Read answers with the model, in one batch, and return their mean rows, one per answer and layer.

    `room` is the number of tokens of each answer to read, by id; see `room_of`.

    Raises:
        The errors of `SteerModel.read`.
    """
    exchanges = [Exchange(prompt_of(settings, one), one.token_ids[: room[one.id]]) for one in responses]
    return await mean_rows(model, exchanges, layers=settings.layers, site=settings.site)


def read_rows(path: Path, kind: type[AnyHeader], *, tensors: bool = True) -> tuple[AnyHeader, dict[str, torch.Tensor]]:
    """Read the header of a file of rows, as the type `kind`, and its tensors by name; none if `tensors` is False.

    Raises:
        InvalidFile: the file is missing, its header is of another kind, or it is of another version.
    """
    text, found = read_tensors(path, tensors=tensors)
    try:
        header = msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise InvalidFile(f"{path} holds no rows of answers: {error}") from error
    if header.version != VERSION:
        raise InvalidFile(f"{path} holds rows in version {header.version}; this steercap reads {VERSION}")
    return header, found


def load_rows(path: str | Path) -> tuple[AnswerRowsHeader, torch.Tensor]:
    """Read a file with the mean rows of a trait's answers.

    Returns:
        The header, and the rows, float32 [answers, layers, hidden].

    Raises:
        InvalidFile: as for `read_rows`.
    """
    header, tensors = read_rows(Path(path), AnswerRowsHeader)
    rows = tensors.get("rows")
    if rows is None or rows.dim() != 3 or rows.shape[:2] != (len(header.ids), len(header.layers)):
        raise InvalidFile(f"{path} does not hold the rows that its header names; capture them again")
    return header, rows


def rows_file(folder: StageFolder, trait: str) -> Path:
    """Return the path of a trait's file of rows; each trait has a file, since all rows may not fit in memory."""
    return folder.path / "rows" / f"{trait}.safetensors"


async def _read(
    model: SteerModel,
    settings: PersonaSettings,
    folder: StageFolder,
    todo: Sequence[Response],
    *,
    room: Mapping[str, int],
    count: Count,
) -> None:
    async def read(chunk: Sequence[Response]) -> None:
        rows = await answer_rows(model, settings, chunk, room)
        header = AnswerRowsHeader(
            VERSION,
            rows.layers,
            tuple(response.id for response in chunk),
            tuple(digest.hex() for digest in rows.prompts),
        )
        place = folder.parts("capture", chunk[0].trait)
        write_tensors(place / f"{uuid.uuid4().hex}.safetensors", header, {"rows": rows.values})
        count.add(len(chunk))

    chunks = [
        mine[first : first + PART_RECORDS]
        for trait in folder.traits
        if (mine := [response for response in todo if response.trait == trait])
        for first in range(0, len(mine), PART_RECORDS)
    ]
    await each_of(chunks, read, max(1, settings.concurrency // PART_RECORDS))


def _join(folder: StageFolder, order: Sequence[str]) -> None:
    """Join the rows of each trait's parts and file in one file, with answers in `order`, a list of all ids."""
    ranks = {name: rank for rank, name in enumerate(order)}
    for trait in folder.traits:
        parts, path = _parts(folder, trait), rows_file(folder, trait)
        if not parts:
            continue
        read = [load_rows(file) for file in [*([path] if path.exists() else []), *parts]]
        found = {
            name: (header.prompts[place], rows[place]) for header, rows in read for place, name in enumerate(header.ids)
        }
        ids = sorted(found, key=ranks.__getitem__)
        (layers,) = {header.layers for header, _ in read}
        header = AnswerRowsHeader(VERSION, layers, tuple(ids), tuple(found[name][0] for name in ids))
        write_tensors(path, header, {"rows": torch.stack([found[name][1] for name in ids])})


def _parts(folder: StageFolder, trait: str) -> list[Path]:
    return sorted(folder.parts("capture", trait).glob("*.safetensors"))


def _ids(paths: Sequence[Path]) -> set[str]:
    return {name for path in paths for name in read_rows(path, AnswerRowsHeader, tensors=False)[0].ids}


def vectors(
    model: SteerModel, settings: PersonaSettings, folder: StageFolder, records: Records, report: ProgressCallback | None
) -> DirectionSet:
    """Compute the directions of all traits with kept answers, with provenance, write and return them.

    Held-out answers are those to held-out questions, so `provenance.auc` is computed on these. A finished stage of the
    same answers is read from `directions.safetensors`.

    Raises:
        InvalidSpec: too few questions have kept answers of both signs.
        InvalidFile: rows cannot be read.
    """
    path, names = folder.path / "directions.safetensors", list(dict.fromkeys(one.trait for one in records.kept))
    kept = {name: {sign: records.kept_of(name, sign) for sign in SIGNS} for name in names}
    if folder.is_done("vectors"):
        known = DirectionSet.load(path)
        headers = {name: read_rows(rows_file(folder, name), AnswerRowsHeader, tensors=False)[0] for name in names}
        if known.provenance.prompts == {name: _prompts(headers[name], kept[name]) for name in names}:
            Count("vectors", len(names), len(names), report)
            return known  # else it is of other answers, as those that a longer context has room for
    folder.begin("vectors")
    count, found = Count("vectors", len(names), 0, report), []
    for name in names:
        found.append(_trait_vectors(model, settings, folder, kept[name]))
        count.add()
    directions = functools.reduce(operator.or_, found)
    directions.save(path)
    folder.finish("vectors")
    return directions


def _trait_vectors(
    model: SteerModel, settings: PersonaSettings, folder: StageFolder, kept: Mapping[Sign, Sequence[Kept]]
) -> DirectionSet:
    name = kept["positive"][0].trait
    header, rows = load_rows(rows_file(folder, name))
    places = {one: place for place, one in enumerate(header.ids)}
    used = {sign: rows[[places[one.id] for one in kept[sign]]] for sign in SIGNS}
    groups = {sign: [one.question for one in kept[sign]] for sign in SIGNS}
    contrast = Contrast(used["positive"], used["negative"], groups["positive"], groups["negative"])
    found = directions_of(
        name,
        contrast,
        header.layers,
        method=settings.method,
        site=settings.site,
        held_out=settings.held_out,
        seed=settings.seed,
    )
    return labelled(found, model, prompts={name: _prompts(header, kept)}, tokens="response", reduce="mean")


def _prompts(header: AnswerRowsHeader, kept: Mapping[Sign, Sequence[Kept]]) -> str:
    """Return one SHA-256 of all that was read for the `kept` answers of a trait, from the digests in `header`."""
    known = dict(zip(header.ids, header.prompts, strict=True))
    return digest_of([bytes.fromhex(known[one.id]) for sign in SIGNS for one in kept[sign]])
