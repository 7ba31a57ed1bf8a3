"""Calls on a local engine: prompts become jobs, and finished jobs become texts and handles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from steercap.captures.pooled import Encoded, require_kind
from steercap.core.chat import MessageSpan
from steercap.core.prompts import (
    CallArguments,
    conversations_in,
    each,
    flag_asked,
    listed,
    repeating,
    template_arguments,
    templated,
    text_of,
    warn_of_doubled,
    warn_of_room,
    without_media,
)
from steercap.core.receipt import SteeringReceipt
from steercap.core.spec import CaptureSpec
from steercap.core.tokenizing import tokens_of
from steercap.engine.engine import Engine
from steercap.errors import InvalidRequest
from steercap.requests.job import Job
from steercap.requests.monitoring import MonitorReport
from steercap.requests.recompute import Recipe
from steercap.requests.running import Done, run_all
from steercap.requests.serving import Serving
from steercap.requests.stream import Chunk, stream

if TYPE_CHECKING:
    from steercap.adapters.types import RequestOutput


@dataclass(frozen=True)
class RawOutput:
    """Result of one prompt with `raw_output=True`, in place of its text.

    Args:
        output: vLLM's RequestOutput, unchanged: `raw.output.outputs[0].text`, `.token_ids`, `.logprobs`.
        steering: a receipt for each sample; None if the request was not steered.
        monitors: the report of each monitor, for each sample; None if there were no monitors.
    """

    output: RequestOutput
    steering: tuple[SteeringReceipt, ...] | None
    monitors: tuple[tuple[MonitorReport, ...], ...] | None = None


@dataclass(frozen=True)
class LocalBackend:
    """Implementation of the calls of a model on an engine in this process.

    Args:
        serving: the engine, from its start to its end.
    """

    serving: Serving

    async def generated(self, prompts: Any, call: CallArguments) -> Any:
        """Return the result of `SteerModel.generate`."""
        require_kind(self.serving.here(), "generate", pools=False)
        return await _listed(self.serving, prompts, call)

    async def encoded(self, prompts: Any, call: CallArguments) -> Any:
        """Return the result of `SteerModel.encode`."""
        require_kind(self.serving.here(), "encode", pools=True)
        return await _listed(self.serving, prompts, call)

    async def read(self, prompts: Any, call: CallArguments) -> Any:
        """Return the result of `SteerModel.read`."""
        if self.serving.here().vllm.pools:
            call = replace(call, sampling_params=None, encoding=True)
        given = await _listed(self.serving, prompts, call)
        if call.spec is not None:
            return given[1]
        return [None] * len(given) if listed(prompts)[0] else None  # what was read went into sketches alone

    async def replied(self, messages: Any, call: CallArguments, template_kwargs: Any) -> Any:
        """Return the result of `SteerModel.chat`."""
        engine = self.serving.here()
        require_kind(engine, "chat", pools=False)
        tokenizer = engine.vllm.tokenizer
        many, conversations = conversations_in(messages)
        for conversation in conversations:
            without_media(conversation)
        spans, arguments = call.spec is not None, template_arguments(template_kwargs)
        asked: Any = {"spans": spans, "special": call.add_special_tokens}
        rendered = [templated(tokenizer, conversation, arguments, **asked) for conversation in conversations]
        prompts = [({"prompt_token_ids": ids}, found) for ids, found in rendered]
        return await _answered(self.serving, prompts, call, many=many)

    async def streamed(self, prompt: Any, call: CallArguments) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of `SteerModel.stream`."""
        serving = self.serving
        engine = serving.here()
        require_kind(engine, "stream", pools=False)
        given = _as_asked(engine, one_to_stream(prompt, call), call)
        asked = {"params": call.sampling_params, "spec": call.spec, "steering": call.steering}
        own = {"options": call.options, "sketches": call.sketches, "monitors": call.monitors}
        recipe = Recipe(serving=serving, prompt=given, **asked, **own)
        job = await recipe.job()
        params: Any = job.params
        _look_at(engine, [_AskedPrompt(given, call.sampling_params, params.max_tokens, job.prompt.token_ids)], call)
        require_one_sample(params.n)
        chunks = stream(job)

        async def first(made: Job) -> Chunk | None:
            nonlocal chunks
            chunks = chunks if made is job else stream(made)
            return await serving.run(lambda: anext(chunks, None))

        try:
            chunk = await recipe.with_restart(first, job)  # once something was handed over, there is no other beginning
            while chunk is not None:
                yield chunk
                chunk = await serving.run(lambda: anext(chunks, None))
        finally:
            if engine.home.is_here:
                with suppress(RuntimeError):  # a loop that ends closes all generators at once, this one too
                    await chunks.aclose()
            else:  # what it waits for there cannot be awaited here
                engine.home.call(lambda: asyncio.ensure_future(chunks.aclose()))


def one_to_stream(prompt: Any, call: CallArguments) -> Any:
    """Return the single prompt of a stream.

    Raises:
        InvalidRequest: there are several prompts or capture specs, or the capture is a reduction.
    """
    many, given = listed(prompt)
    spec = call.spec
    if many or isinstance(spec, (list, tuple)) or (isinstance(spec, CaptureSpec) and spec.reduce):
        raise InvalidRequest("stream takes one prompt, and rows rather than their reduction; use generate")
    return given[0]


def require_one_sample(samples: int) -> None:
    """Check that a stream has one sample.

    Raises:
        InvalidRequest: it has several.
    """
    if samples != 1:
        raise InvalidRequest(f"stream gives one sample, not n={samples}; use generate")


def require_raw(monitors: Any, *, raw: bool) -> None:
    """Check that a call with monitors returns raw outputs, which hold their reports.

    Raises:
        InvalidRequest: there are monitors, but the call returns texts alone.
    """
    if monitors and not raw:
        raise InvalidRequest("what monitors= find is in RawOutput.monitors; give raw_output=True, or use stream")


async def _listed(serving: Serving, prompts: Any, call: CallArguments) -> Any:
    many, given = listed(prompts)
    return await _answered(serving, [(prompt, []) for prompt in given], call, many=many)


async def _answered(
    serving: Serving, prompts: Sequence[tuple[Any, list[MessageSpan]]], call: CallArguments, *, many: bool
) -> Any:
    """Run prompts, each with the spans of its messages, and return the result of the call."""
    captured, raw = call.spec is not None, flag_asked("raw_output", call.raw_output)
    require_raw(call.monitors, raw=raw)
    params = each(call.sampling_params, len(prompts), "pooling" if call.encoding else "sampling_params")
    specs = each(call.spec, len(prompts), "capture")
    edits = each(call.steering, len(prompts), "steering")

    engine = serving.here()
    asked: list[_AskedPrompt] = []

    async def jobs() -> AsyncIterator[Job]:
        for (prompt, spans), param, spec, steering in zip(prompts, params, specs, edits, strict=True):
            job = await Recipe(
                serving=serving,
                prompt=_as_asked(engine, prompt, call),
                params=param,
                spec=spec,
                steering=steering,
                options=call.options,
                spans=spans,
                reading=call.reading,
                sketches=call.sketches,
                encoding=call.encoding,
                monitors=call.monitors,
            ).job()
            asked.append(_AskedPrompt(prompt, param, getattr(job.params, "max_tokens", None), job.prompt.token_ids))
            yield job
        _look_at(engine, asked, call)

    done = await run_all(jobs(), serving.running)
    texts = [_given(one, raw=raw) for one in done]
    handles = [_unnested(one) for one in done]
    if not many:
        return (texts[0], handles[0]) if captured else texts[0]
    return (texts, handles) if captured else texts


def _as_asked(engine: Engine, prompt: Any, call: CallArguments) -> Any:
    """Return the prompt, tokenized here without special tokens if it is a text and `add_special_tokens=False`."""
    text = text_of(prompt)
    if text is None or call.add_special_tokens is not False:
        return prompt
    ids = tokens_of(engine.vllm.tokenizer, text, special=False)
    return {**(prompt if isinstance(prompt, Mapping) else {"prompt": text}), "prompt_token_ids": ids}


class _AskedPrompt(NamedTuple):
    """Prompt and parameters of a call as the user gave them, with the `max_tokens` and token ids read from them."""

    prompt: Any
    params: Any
    max_tokens: int | None
    ids: tuple[int, ...]


def _look_at(engine: Engine, asked: Sequence[_AskedPrompt], call: CallArguments) -> None:
    """Warn about doubled special tokens, and about a `max_tokens` beyond the model's context length."""
    texts = repeating((one.prompt, one.ids) for one in asked)
    if texts and call.add_special_tokens is None:
        warn_of_doubled(texts, tokens_of(engine.vllm.tokenizer, "", special=True))
    warn_of_room(((one.params, one.max_tokens, len(one.ids)) for one in asked), engine.vllm.max_model_len)


def _given(done: Done, *, raw: bool) -> Any:
    """Return the result of one prompt: an `Encoded`, a `RawOutput`, a text, or a list of texts."""
    if done.task is not None:
        receipt = done.receipts[0] if done.receipts else None
        return Encoded(done.output.outputs.data, done.task, tuple(done.output.prompt_token_ids), receipt)
    return _raw(done) if raw else _texts(done.output)


def _raw(done: Done) -> RawOutput:
    steering = None if done.receipts is None else tuple(done.receipts)
    return RawOutput(done.output, steering, None if done.monitors is None else tuple(done.monitors))


def _texts(output: RequestOutput) -> str | list[str]:
    texts = [sample.text for sample in output.outputs]
    return texts[0] if len(texts) == 1 else texts


def _unnested(done: Done) -> Any:
    return done.handles[0] if done.handles is not None and len(done.handles) == 1 else done.handles
