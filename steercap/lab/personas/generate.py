"""Stage "generate": the model answers every question under every system prompt of a trait or role."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import msgspec

from steercap.concurrency.loops import each_of
from steercap.core.protocols import Count, ProgressCallback
from steercap.errors import InvalidFile
from steercap.files.tables import TableWriter, read_table, write_table
from steercap.lab.personas.folder import StageFolder
from steercap.lab.personas.records import AnyResponse, Response, RoleRequest, RunSettings, TraitRequest, all_requests
from steercap.lab.personas.settings import PersonaSettings

if TYPE_CHECKING:
    from steercap.model import SteerModel


class Ends(NamedTuple):
    """Tokens that may end an answer and do not belong to it.

    Args:
        turn: end-of-turn tokens of the model's generation configuration.
        special: the tokenizer's special tokens.
    """

    turn: frozenset[int]
    special: frozenset[int]


@dataclass(frozen=True, eq=False)
class AnswerGroup(Generic[AnyResponse]):
    """Requests of one trait or role, whose answers are stored together.

    Args:
        requests: all requests, in the order of the answers.
        parts: writer of the answers; answers already in its folder are not generated again.
        finish: function called once, with all answers in order.
    """

    requests: Sequence[TraitRequest | RoleRequest]
    parts: TableWriter[AnyResponse]
    finish: Callable[[list[AnyResponse]], None]


async def generate(
    model: SteerModel, settings: PersonaSettings, folder: StageFolder, report: ProgressCallback | None
) -> list[Response]:
    """Generate the answers to all requests that the folder lacks, store them, and return all answers in order.

    Raises:
        The errors of `SteerModel.run`.
    """
    path, wanted = folder.path / "responses.parquet", list(all_requests(settings))
    if not folder.is_done("generate"):
        folder.begin("generate")
    kept, ready = folder.traits_of("generate"), folder.is_done("generate")
    before = [response for response in read_table(path, Response) if response.trait in kept] if kept else []
    found = {response.id: response for response in before}

    def take(responses: list[Response]) -> None:
        found.update((response.id, response) for response in responses)

    groups = [
        AnswerGroup(
            [request for request in wanted if request.trait == trait],
            TableWriter(folder.parts("generate", trait), Response),
            take,
        )
        for trait in folder.traits
        if trait not in kept
    ]
    count = Count("generate", len(wanted), sum(request.trait in kept for request in wanted), report)
    await answer_groups(model, settings, groups, Response, count)
    responses = [found[request.id] for request in wanted]
    if not ready:
        write_table(path, [*responses, *(one for one in before if one.trait not in folder.traits)])
        folder.finish("generate")
    return responses


async def answer_groups(
    model: SteerModel,
    settings: RunSettings,
    groups: Iterable[AnswerGroup[AnyResponse]],
    kind: type[AnyResponse],
    count: Count,
) -> None:
    """Generate the missing answers of some groups, as records of the type `kind`, and finish each complete group.

    Requests of all groups run concurrently. A group is taken from the iterable when its first request is due; its
    answers are written to its parts, and read back when all are generated. `count` counts answers.

    Raises:
        The errors of `SteerModel.run`.
    """
    ends = functools.cache(lambda: ends_in(model))
    lacking = dict[AnswerGroup[AnyResponse], int]()

    def requests() -> Iterator[tuple[AnswerGroup[AnyResponse], TraitRequest | RoleRequest]]:
        for group in groups:
            known = {response.id for response in group.parts.read()}
            count.add(len(known))
            left = [request for request in group.requests if request.id not in known]
            if not left:  # killed after its last answer
                _finish(group)
                continue
            lacking[group] = len(left)
            yield from ((group, request) for request in left)

    async def ask(asked: tuple[AnswerGroup[AnyResponse], TraitRequest | RoleRequest]) -> None:
        group, request = asked
        messages = messages_of(request.system_prompt, request.question_text)
        generation = await model.run(messages, sampling_of(settings, request.seed), steering=None)
        (sample,) = generation.samples
        finish, told = str(sample.finish_reason), msgspec.structs.asdict(request)
        token_ids = answer_ids(sample.token_ids, ends(), finish, sample.stop_reason)
        group.parts.add(kind(**told, answer=sample.text, token_ids=token_ids, finish=finish))
        lacking[group] -= 1
        if not lacking[group]:
            _finish(group)
            del lacking[group]
        count.add()

    try:
        await each_of(requests(), ask, settings.concurrency)
    finally:
        for group in lacking:
            group.parts.flush()


def _finish(group: AnswerGroup[AnyResponse]) -> None:
    group.parts.flush()
    found = {response.id: response for response in group.parts.read()}
    if any(request.id not in found for request in group.requests):
        raise InvalidFile(f"{group.parts.folder} has lost answers: did another process work in it? Run it again")
    group.finish([found[request.id] for request in group.requests])


def answer_ids(token_ids: Sequence[int], ends: Ends, finish: str, stop_reason: object) -> tuple[int, ...]:
    """Return an answer's token ids without the end-of-turn token and trailing special tokens.

    As in the paper, these tokens' rows are not part of an answer's mean. The end-of-turn token is stripped if `finish`,
    vLLM's finish reason, is "stop"; a `stop_reason` that is an int is the id of the token that ended the answer.
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
    """Return the end tokens from `eos_token_id` of a generation configuration, if any, and special token ids."""
    eos = generation_config.get("eos_token_id")
    turn = [] if eos is None else [eos] if isinstance(eos, int) else eos
    return Ends(frozenset(turn), frozenset(special))


def ends_in(model: SteerModel) -> Ends:
    """Return the end-of-turn and special tokens of an open model."""
    return ends_of(model.generation_config, model.tokenizer.all_special_ids)


def messages_of(system_prompt: str, question: str) -> list[dict[str, str]]:
    """Return chat messages with a question of the user, after the system prompt unless that is ""."""
    asked = {"role": "user", "content": question}
    return [{"role": "system", "content": system_prompt}, asked] if system_prompt else [asked]


def sampling_of(settings: RunSettings, seed: int) -> dict[str, Any]:
    """Return vLLM sampling parameters from the settings of a run, with a seed."""
    return {
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "seed": seed,
    }
