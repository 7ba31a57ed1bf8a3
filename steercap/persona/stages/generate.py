"""Generate: the model answers every question under every system prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from steercap.persona.flight import each_of
from steercap.persona.folder import RunFolder
from steercap.persona.progress import Count, Report
from steercap.persona.records import Ask, Response, asks
from steercap.persona.settings import PersonaSettings
from steercap.tables import Parts, read_table, write_table

if TYPE_CHECKING:
    from steercap.model import SteerModel


async def generate(
    model: SteerModel, settings: PersonaSettings, folder: RunFolder, report: Report | None
) -> list[Response]:
    """The answers to all requests, in their order; those that the folder holds are not asked for again.

    Raises:
        The errors of `SteerModel.chat`.
    """
    path, wanted = folder.path / "responses.parquet", list(asks(settings))
    if folder.is_done("generate"):
        Count("generate", len(wanted), len(wanted), report)
        return read_table(path, Response)
    folder.begin("generate")
    with Parts(folder.parts("generate"), Response) as parts:
        have = {response.id for response in parts.read()}
        todo = [ask for ask in wanted if ask.id not in have]
        count = Count("generate", len(wanted), len(wanted) - len(todo), report)

        async def answer(ask: Ask) -> None:
            parts.add(await _answer(model, settings, ask))
            count.add()

        await each_of(todo, answer, settings.max_in_flight)
    found = {response.id: response for response in parts.read()}
    responses = [found[ask.id] for ask in wanted]
    write_table(path, responses)
    folder.finish("generate")
    return responses


async def _answer(model: SteerModel, settings: PersonaSettings, ask: Ask) -> Response:
    output: Any = await model.chat(
        [{"role": "system", "content": ask.system_prompt}, {"role": "user", "content": ask.question_text}],
        {
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": ask.seed,
        },
        steering=None,
        raw_output=True,
    )
    (sample,) = output.outputs
    ids = list(sample.token_ids)
    # What ends an answer is not part of it, and in the paper its row is not part of the mean.
    special = set(model.tokenizer.all_special_ids)
    while ids and ids[-1] in special:
        ids.pop()
    return Response(
        **msgspec.structs.asdict(ask), answer=sample.text, token_ids=tuple(ids), finish=str(sample.finish_reason)
    )
