"""Reader of existing answers with a model: the mean of each answer's rows, and means per persona and score level.

Nothing is generated: each conversation runs once through the engine, up to the end of its answer, and the rows of the
answer's tokens are averaged in the workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import torch

from steercap.concurrency.loops import each_of
from steercap.core.display import brief
from steercap.core.prompts import template_arguments
from steercap.core.protocols import Count, ProgressCallback
from steercap.core.spec import CaptureSpec
from steercap.core.values import choices, count_of, shown
from steercap.errors import CaptureNotFinite, InvalidSetting, ModelTooLarge, UnknownName
from steercap.files.folder import FolderKind, locked
from steercap.lab.personas.answer_files import (
    ExistingAnswer,
    PersonaFiles,
    only_default,
    placed_in,
    read_answers_file,
    read_personas,
)
from steercap.lab.personas.answer_folder import STORED, AnswersFolder, PersonaReceipt, RowsFile
from steercap.lab.personas.folder import VERSION, RunDefinition
from steercap.lab.personas.levels import PersonaKind

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Maximum answers of one call of the engine, whose means are fetched and written together.
CALL_ANSWERS: Final = 16
#: Default concurrent answers in each engine: with 64 layers × 5,120 their means take 170 MB.
CONCURRENCY: Final = 128
#: Dtypes of `read_answers_by_dtype`.
DTYPES: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class AnswersRead:
    """Result of `read_answers`.

    Args:
        folder: folder of the results, with the paths of its files.
        personas: receipt of each persona, by name: numbers of answers in its levels, and left out.
        default: number of default answers averaged in `default_vectors.pt`, 0 if it was not written.
    """

    folder: AnswersFolder
    personas: Mapping[str, PersonaReceipt]
    default: int

    __repr__ = brief


async def read_answers(
    model: SteerModel,
    responses: str | Path,
    scores: str | Path,
    to: str | Path,
    *,
    kind: PersonaKind,
    others: Sequence[SteerModel] = (),
    names: Sequence[str] | None = None,
    minimum: int | None = None,
    stored: str = "float32",
    concurrency: int = CONCURRENCY,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    suffix: str = "",
    progress: ProgressCallback | None = None,
) -> AnswersRead:
    """Read existing answers with a model, and write mean rows of each answer and means per persona and score level.

    Args:
        model: an open model with taps at "resid_post" of all layers.
        responses: folder of `NAME.jsonl`, one answer a line: `conversation`, `label`, `prompt_index`, `question_index`.
        scores: folder of `NAME.json`: `LABEL_pP_qQ` to a number or "REFUSAL". Default files of roles need none.
        to: folder of the results: `response_activations/NAME.pt` (key to [layers, hidden]), `vectors/NAME.pt` (level
            to float32 [layers, hidden]) and, for roles, `default_vectors.pt`, the mean of the answers of all default
            files that have been read, by earlier calls too. A call that was killed is resumed; if only scores or
            `minimum` differ from an earlier call, only levels are computed again.
        kind: "trait" or "role", which determines the scale of scores and the levels; see `plan_levels`.
        others: further open models of the same checkpoint and event loop, which share the answers.
        names: names of personas; all by default.
        minimum: minimum number of answers of a level; see `plan_levels`.
        stored: dtype of the means of answers on disk: float32, bfloat16 or float16. Levels are means of stored rows.
        concurrency: maximum concurrent answers in each model. With 1 the files are bit-identical however often a call
            was killed; with more they are equal up to the rounding of batches.
        chat_template_kwargs: further arguments of the chat template.
        suffix: end of the names of the folder's subfolders and default file, such as "_vllm_bfloat16".
        progress: function called with a `Progress` whenever the work advances.

    Returns:
        The folder, and for each persona the numbers of answers in its levels and left out.

    Raises:
        InvalidFile: an answer or a score is not valid; the message names the file, the line and the key.
        RunDiffers: the folder has results of another model or other settings, or of answers that have changed.
        InvalidPrompt: an answer does not fit the context.
        InvalidSetting, UnknownName: an argument is not valid, or the models are of different checkpoints.
        PointNotArmed: a layer has no tap.
        The errors of `SteerModel.read`.
    """
    models = [model, *others]
    settings = _settings(kind, stored, chat_template_kwargs)
    count_of(concurrency, "concurrency", wrong=InvalidSetting)
    personas = await asyncio.to_thread(read_personas, responses, scores, kind, names)
    folder = AnswersFolder(Path(to), suffix, kind, minimum)
    with locked(folder.path):
        _open(folder, models, settings)
        defaults = await asyncio.to_thread(_defaults, folder, responses, scores, personas)
        todo = [files for files in personas if folder.receipt(files) is None]
        total = sum(len(files.keys) for files in personas)
        count = Count("read", total, total - sum(len(files.keys) for files in todo), progress)
        await _AnswersReading(folder, models, settings, concurrency, count).run(todo)
        found = {files.name: await asyncio.to_thread(folder.renew, files) for files in personas}
        return AnswersRead(folder, found, await asyncio.to_thread(folder.save_default, defaults))


async def read_answers_by_dtype(
    opening: Callable[[str], SteerModel],
    responses: str | Path,
    scores: str | Path,
    to: str | Path,
    *,
    kind: PersonaKind,
    names: Sequence[str] | None = None,
    dtypes: Sequence[str] = DTYPES,
    **settings: Any,
) -> tuple[dict[str, AnswersRead], dict[str, str]]:
    """Read existing answers with a model in several dtypes, one engine after another, as `read_answers` does.

    Args:
        opening: function from a dtype to a model not yet started: `lambda dtype: SteerModel("...", dtype=dtype)`.
        responses, scores, to, kind, names, settings: as for `read_answers`; subfolders of `to` end in `_vllm_DTYPE`.
        dtypes: dtypes of the model.

    Returns:
        Results by dtype; and, by dtype, the error message of each model that does not fit in memory.

    Raises:
        UnknownName: an unknown dtype.
        ModelTooLarge: the model fits in none of the dtypes.
        The errors of `read_answers`, and of starting a model.
    """
    if unknown := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise UnknownName(f"dtype {shown(unknown[0])}; {choices(unknown[0], DTYPES)}")
    await asyncio.to_thread(read_personas, responses, scores, kind, names)
    models: dict[str, SteerModel] = {}
    refused: dict[str, str] = {}
    for dtype in dtypes:
        try:
            (made := opening(dtype)).check_memory()
        except ModelTooLarge as error:
            refused[dtype] = str(error)
        else:
            models[dtype] = made
    if refused and not models:
        raise ModelTooLarge("; ".join(refused.values()))
    found = {}
    for dtype, made in models.items():
        async with made as model:
            shared: dict[str, Any] = {"kind": kind, "names": names, "suffix": f"_vllm_{dtype}", **settings}
            found[dtype] = await read_answers(model, responses, scores, to, **shared)
    return found, refused


def _settings(kind: str, stored: str, template: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the checked settings that rows depend on, as they are stored in the folder."""
    if stored not in STORED:
        raise UnknownName(f"stored={shown(stored)}; {choices(stored, STORED)}")
    return {"kind": kind, "stored": stored, "chat_template_kwargs": template_arguments(template)}


def _open(folder: AnswersFolder, models: Sequence[SteerModel], settings: dict[str, Any]) -> None:
    """Open the folder to resume it, created if needed, and check that all models are the same and have all taps."""
    every = CaptureSpec(layers=range(models[0].num_layers))
    for model in models:
        if model.identity() != models[0].identity():
            raise InvalidSetting(
                f"the models differ, {models[0].model} and {model.model}; give models of one checkpoint"
            )
        model.check_capture(every)
    kind = FolderKind(f"answers{folder.suffix}.json", RunDefinition, "reading of answers")
    wanted = RunDefinition(VERSION, models[0].identity(), settings)
    if kind.open(folder.path, wanted) is None:
        kind.write(folder.path, wanted)


def _defaults(
    folder: AnswersFolder, responses: str | Path, scores: str | Path, personas: Sequence[PersonaFiles]
) -> list[PersonaFiles]:
    """Return the default files of roles, by name: of the personas to read, and of those that were read before."""
    if folder.kind != "role":
        return []
    names = {files.name for files in personas}
    paths = {name: Path(responses, f"{name}.jsonl") for name in folder.perhaps_default() if name not in names}
    before = [
        name
        for name, path in paths.items()
        if path.exists() and only_default(answer.key for answer in read_answers_file(path))
    ]
    others = read_personas(responses, scores, folder.kind, before) if before else []
    found = [*personas, *(files for files in others if folder.receipt(files) is not None)]
    return sorted((files for files in found if files.is_default), key=lambda files: files.name)


@dataclass(eq=False)
class _PersonaUnderWay:
    """Persona whose answers are being read: its answers, and the number whose rows are still missing (`left`)."""

    files: PersonaFiles
    answers: list[ExistingAnswer]
    rows: RowsFile
    left: int


class _AnswersReading:
    """Reader of the unfinished personas of a folder; arguments as for `read_answers`, and a counter of answers."""

    def __init__(
        self,
        folder: AnswersFolder,
        models: Sequence[SteerModel],
        settings: Mapping[str, Any],
        concurrency: int,
        count: Count,
    ) -> None:
        self._folder, self._models, self._settings, self._count = folder, models, settings, count
        self._alone, self._call = concurrency == 1, min(CALL_ANSWERS, concurrency)
        self._calls = concurrency // self._call
        self._free: asyncio.Queue[SteerModel] = asyncio.Queue()
        self._open: set[RowsFile] = set()

    async def run(self, todo: Sequence[PersonaFiles]) -> None:
        """Read all answers whose rows are missing, and write the results of each persona once it is complete."""
        for model in [*self._models] * self._calls:
            self._free.put_nowait(model)
        try:
            await each_of(self._calls_of(todo), self._do, self._free.qsize())
        finally:
            for rows in self._open:
                rows.close()

    def _calls_of(self, todo: Sequence[PersonaFiles]) -> Iterator[tuple[_PersonaUnderWay, list[int]]]:
        """Yield (persona, indices of the answers) of each call; a persona's file is opened when its first is due."""
        shape, dtype = (self._models[0].num_layers, self._models[0].hidden_size), STORED[self._settings["stored"]]
        for files in todo:
            rows = RowsFile(self._folder.part(files), files.keys, shape, dtype)
            self._open.add(rows)
            missing = rows.missing
            self._count.add(len(files.keys) - len(missing))
            persona = _PersonaUnderWay(files, read_answers_file(files.responses), rows, len(missing))
            # One without answers was killed before it was finished.
            for first in range(0, max(1, len(missing)), self._call):
                yield persona, missing[first : first + self._call]

    async def _do(self, call: tuple[_PersonaUnderWay, list[int]]) -> None:
        persona, indices = call
        if indices:
            model = await self._free.get()
            try:
                means = await self._means(model, persona, indices)
            finally:
                self._free.put_nowait(model)
            for index, mean in zip(indices, means, strict=True):
                persona.rows.put(index, mean)
        persona.left -= len(indices)
        if not persona.left:
            await asyncio.to_thread(self._folder.finish, persona.files, persona.rows)
            self._open.discard(persona.rows)
            persona.rows.close()
        self._count.add(len(indices))

    async def _means(self, model: SteerModel, persona: _PersonaUnderWay, indices: Sequence[int]) -> list[torch.Tensor]:
        """Read answers of a persona, by index, in one batch; return the mean row of each, float32 [layers, hidden]."""
        path, answers = persona.files.responses, [persona.answers[index] for index in indices]
        template = self._settings["chat_template_kwargs"]
        placed = [placed_in(model, path, answer, template) for answer in answers]
        specs = [CaptureSpec(tokens=slice(start, None), reduce="mean", codec="raw") for _, start in placed]
        # What the prefix cache holds depends on what ran before, and last bits depend on it.
        salts = [{"cache_salt": uuid4().hex} if self._alone else {} for _ in placed]
        prompts = [{"prompt_token_ids": ids, **salt} for (ids, _), salt in zip(placed, salts, strict=True)]
        try:
            handles: list[Any] = await model.read(prompts, capture=specs, steering=None)
            await model.fetch_captures_batch(handles)
        except CaptureNotFinite as error:
            lines = f"{answers[0].line} to {answers[-1].line}, {answers[0].key} to {answers[-1].key}"
            raise CaptureNotFinite(f"{path}, lines {lines}: {error}") from error
        return [torch.stack([rows.float().flatten() for rows in handle.captures.values()]) for handle in handles]
