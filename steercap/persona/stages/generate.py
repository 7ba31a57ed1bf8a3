"""Generate: the model answers every question under every system prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from steercap.concurrency.bounded import each_of
from steercap.files.tables import Parts, read_table, write_table
from steercap.persona.folder import RunFolder
from steercap.persona.progress import Count, Report
from steercap.persona.records import Request, Response, all_requests
from steercap.persona.settings import PersonaSettings

if TYPE_CHECKING:
    from steercap.model import SteerModel


class Ends(NamedTuple):
    """What is at the end of an answer and no part of it.

    Args:
        turn: tokens at which the model's generation configuration ends an answer.
        special: the tokenizer's special tokens.
    """

    turn: frozenset[int]
    special: frozenset[int]


async def generate(
    model: SteerModel, settings: PersonaSettings, folder: RunFolder, report: Report | None
) -> list[Response]:
    """The answers to all requests, in their order; those that the folder holds are not asked for again.

    Raises:
        The errors of `SteerModel.chat`.
    """
    path, wanted = folder.path / "responses.parquet", list(all_requests(settings))
    if not folder.is_done("generate"):
        folder.begin("generate")
    kept, ready = folder.traits_of("generate"), folder.is_done("generate")
    before = [response for response in read_table(path, Response) if response.trait in kept] if kept else []
    found = {response.id: response for response in before}
    with contextlib.ExitStack() as stack:
        todo = {trait: folder.parts("generate", trait) for trait in folder.traits if trait not in kept}
        parts = {trait: stack.enter_context(Parts(place, Response)) for trait, place in todo.items()}
        found |= {response.id: response for part in parts.values() for response in part.read()}
        left = [request for request in wanted if request.id not in found]
        count = Count("generate", len(wanted), len(wanted) - len(left), report)
        ends = _ends(model) if left else Ends(frozenset(), frozenset())

        async def answer(request: Request) -> None:
            found[request.id] = await _answer(model, settings, request, ends)
            parts[request.trait].add(found[request.id])
            count.add()

        await each_of(left, answer, settings.max_in_flight)
    responses = [found[request.id] for request in wanted]
    if not ready:
        write_table(path, [*responses, *(one for one in before if one.trait not in folder.traits)])
        folder.finish("generate")
    return responses


def said(token_ids: Sequence[int], ends: Ends, finish: str, stop_reason: object) -> tuple[int, ...]:
    """What was said: an answer without the token that ended the turn, and without special tokens at its end.

    That token is not part of an answer, and in the paper its row is not part of the mean.

    Args:
        token_ids: what was generated.
        ends: tokens that end a turn.
        finish: why the answer ended, "stop" or "length".
        stop_reason: of vLLM's sample; an int is the token that ended it.
    """
    ids = list(token_ids)
    # Words of the vocabulary, as some models end a turn with, are cut where they did end it, and only there.
    stops = {*ends.turn, *([stop_reason] if isinstance(stop_reason, int) else [])}
    if ids and finish == "stop" and ids[-1] in stops:
        ids.pop()
    while ids and ids[-1] in ends.special:
        ids.pop()
    return tuple(ids)


def ends_of(generation_config: Mapping[str, Any], special: Iterable[int]) -> Ends:
    """The tokens that end a turn.

    Args:
        generation_config: the model's; its `eos_token_id` is one token, several, or not there.
        special: the tokenizer's special tokens.
    """
    eos = generation_config.get("eos_token_id")
    turn = [] if eos is None else [eos] if isinstance(eos, int) else eos
    return Ends(frozenset(turn), frozenset(special))


def _ends(model: SteerModel) -> Ends:
    config = model.engine.vllm_config.model_config
    return ends_of(config.try_get_generation_config(), model.tokenizer.all_special_ids)


async def _answer(model: SteerModel, settings: PersonaSettings, request: Request, ends: Ends) -> Response:
    raw = await model.chat(
        [{"role": "system", "content": request.system_prompt}, {"role": "user", "content": request.question_text}],
        {
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": request.seed,
        },
        steering=None,
        raw_output=True,
    )
    (sample,) = raw.output.outputs
    finish = str(sample.finish_reason)
    ids = said(sample.token_ids, ends, finish, sample.stop_reason)
    return Response(**msgspec.structs.asdict(request), answer=sample.text, token_ids=ids, finish=finish)
