"""Stage "generate": the model answers every question under every system prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from steercap.concurrency.bounded import each_of
from steercap.files.tables import TableWriter, read_table, write_table
from steercap.lab.personas.folder import RunFolder
from steercap.lab.personas.progress import Count, Report
from steercap.lab.personas.records import Request, Response, all_requests
from steercap.lab.personas.settings import PersonaSettings
from steercap.steering.spec import SteeringSpec

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


class Sampled(NamedTuple):
    """Sampled answer.

    Args:
        answer: the text.
        token_ids: generated tokens, without special tokens at the end.
        finish: reason for its end: "stop" or "length".
        prompt_token_ids: tokens of the prompt.
    """

    answer: str
    token_ids: tuple[int, ...]
    finish: str
    prompt_token_ids: tuple[int, ...]


class Sampling(Protocol):
    """Settings of sampling."""

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of an answer."""

    @property
    def temperature(self) -> float:
        """Sampling temperature; 0 is greedy."""

    @property
    def top_p(self) -> float:
        """Share of the probability mass to sample from."""


async def generate(
    model: SteerModel, settings: PersonaSettings, folder: RunFolder, report: Report | None
) -> list[Response]:
    """Return the answers to all requests, in order; those in the folder are not generated again.

    Raises:
        The errors of `SteerModel.run`.
    """
    path, wanted = folder.path / "responses.parquet", list(all_requests(settings))
    if not folder.is_done("generate"):
        folder.begin("generate")
    kept, ready = folder.traits_of("generate"), folder.is_done("generate")
    before = [response for response in read_table(path, Response) if response.trait in kept] if kept else []
    found = {response.id: response for response in before}
    with contextlib.ExitStack() as stack:
        todo = {trait: folder.parts("generate", trait) for trait in folder.traits if trait not in kept}
        parts = {trait: stack.enter_context(TableWriter(place, Response)) for trait, place in todo.items()}
        found |= {response.id: response for part in parts.values() for response in part.read()}
        left = [request for request in wanted if request.id not in found]
        count = Count("generate", len(wanted), len(wanted) - len(left), report)
        ends = ends_in(model) if left else Ends(frozenset(), frozenset())

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
    """Strip the end-of-turn token and trailing special tokens from an answer.

    That token is not part of an answer, and in the paper its row is not part of the mean.

    Args:
        token_ids: generated tokens.
        ends: tokens that end a turn.
        finish: reason for the answer's end, "stop" or "length".
        stop_reason: stop reason of vLLM's sample; an int is the token that ended it.
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
    """Return the tokens that end a turn.

    Args:
        generation_config: generation configuration of the model; its `eos_token_id` is one token, several, or missing.
        special: special tokens of the tokenizer.
    """
    eos = generation_config.get("eos_token_id")
    turn = [] if eos is None else [eos] if isinstance(eos, int) else eos
    return Ends(frozenset(turn), frozenset(special))


def ends_in(model: SteerModel) -> Ends:
    """Return the tokens that end a turn of an open model."""
    return ends_of(model.generation_config, model.tokenizer.all_special_ids)


def messages_of(system_prompt: str, question: str) -> list[dict[str, str]]:
    """Return a question as a conversation, under a system prompt; "" for none."""
    asked = {"role": "user", "content": question}
    return [{"role": "system", "content": system_prompt}, asked] if system_prompt else [asked]


async def sampled(
    model: SteerModel,
    messages: Sequence[Mapping[str, str]],
    params: Mapping[str, Any],
    ends: Ends,
    steering: SteeringSpec | None = None,
) -> Sampled:
    """Sample one answer.

    Args:
        model: an open model.
        messages: the conversation.
        params: sampling parameters, as for `SteerModel.run`.
        ends: tokens that end a turn of the model.
        steering: edits applied during the run.

    Raises:
        The errors of `SteerModel.run`.
    """
    found = await model.run(list(messages), dict(params), steering=steering)
    (sample,) = found.output.outputs
    finish = str(sample.finish_reason)
    return Sampled(
        sample.text,
        said(sample.token_ids, ends, finish, sample.stop_reason),
        finish,
        tuple(found.output.prompt_token_ids),
    )


async def _answer(model: SteerModel, settings: PersonaSettings, request: Request, ends: Ends) -> Response:
    messages = messages_of(request.system_prompt, request.question_text)
    found = await sampled(model, messages, sampling_of(settings, request.seed), ends)
    return Response(
        **msgspec.structs.asdict(request), answer=found.answer, token_ids=found.token_ids, finish=found.finish
    )


def sampling_of(settings: Sampling, seed: int) -> dict[str, Any]:
    """Return sampling parameters for `SteerModel.chat`."""
    return {
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "seed": seed,
    }
