"""Calls on a local engine: prompts become jobs, which run concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

from steercap.captures.pooled import require_kind
from steercap.core.chat import MessageSpan
from steercap.core.prompts import (
    CallArguments,
    each,
    is_conversation,
    listed,
    repeating,
    template_arguments,
    templated,
    text_of,
    tokens_of,
    warn_of_doubled,
    warn_of_room,
    without_media,
)
from steercap.core.spec import CaptureSpec
from steercap.engine.engine import Engine
from steercap.errors import InvalidRequest
from steercap.requests.call_types import Generation
from steercap.requests.job import Job, run_all, run_job
from steercap.requests.recompute import Recipe
from steercap.requests.serving import Serving
from steercap.requests.sketching import RunningSketch, open_sketch
from steercap.requests.stream import Chunk, stream

#: Prompts of a call that are prepared before the event loop runs those that are ready: token ids are never awaited.
TOGETHER: Final = 32


@dataclass(frozen=True)
class LocalBackend:
    """Implementation of the calls of a model on an engine in this process."""

    serving: Serving

    async def run(self, prompts: Sequence[Any], call: CallArguments) -> list[Generation]:
        """Run prompts and conversations; return their results in order."""
        engine = await self.serving.alive()
        if call.name != "read":
            require_kind(engine, call.name, pools=call.encoding)
        elif engine.vllm.pools:
            call = replace(call, sampling_params=None, encoding=True)
        rendered = _rendered(engine, prompts, call)
        params = each(call.sampling_params, len(prompts), "pooling" if call.encoding else "sampling_params")
        specs = each(call.spec, len(prompts), "capture")
        edits = each(call.steering, len(prompts), "steering")
        asked: list[_ReadPrompt] = []

        whole = object()

        async def jobs() -> AsyncIterator[Coroutine[Any, Any, Generation]]:
            last = engine
            for (prompt, spans), param, spec, steering in zip(rendered, params, specs, edits, strict=True):
                recipe = Recipe(
                    serving=self.serving,
                    prompt=await _tokenized(self.serving, prompt, call),
                    params=param,
                    spec=spec,
                    steering=steering,
                    options=call.options,
                    spans=spans,
                    reading=call.reading,
                    sketches=call.sketches,
                    encoding=call.encoding,
                    monitors=call.monitors,
                )
                job = await recipe.job()
                last = job.engine
                asked.append(_ReadPrompt(prompt, param, getattr(job.params, "max_tokens", None), job.prompt.token_ids))
                yield recipe.with_restart(partial(run_job, call=whole), job)
                if not len(asked) % TOGETHER:
                    await asyncio.sleep(0)
            _warn(last, asked, call)

        return await run_all(jobs(), self.serving.running)

    async def open_sketch(self, kind: str, size: Any, spec: CaptureSpec) -> RunningSketch:
        """Open a sketch on the workers."""
        return await self.serving.with_restart(lambda engine: open_sketch(engine, kind, size, spec))

    async def streamed(self, prompt: Any, call: CallArguments) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of `SteerModel.stream`."""
        serving = self.serving
        engine = await serving.alive()
        require_kind(engine, call.name, pools=False)
        given = await _tokenized(serving, one_to_stream(prompt, call), call)
        asked = {"params": call.sampling_params, "spec": call.spec, "steering": call.steering}
        own = {"options": call.options, "sketches": call.sketches, "monitors": call.monitors}
        recipe = Recipe(serving=serving, prompt=given, **asked, **own)
        job = await recipe.job()
        params: Any = job.params
        _warn(job.engine, [_ReadPrompt(given, call.sampling_params, params.max_tokens, job.prompt.token_ids)], call)
        require_one_sample(params.n)
        chunks = stream(job)

        async def first_chunk(made: Job) -> Chunk | None:
            """Return the job's first chunk, from a new stream if the engine was restarted."""
            nonlocal chunks
            chunks = chunks if made is job else stream(made)
            return await serving.run(lambda: anext(chunks, None))

        try:
            chunk = await recipe.with_restart(first_chunk, job)  # later ones: part of the answer is handed over
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
    if many or isinstance(spec, (list, tuple)) or (isinstance(spec, CaptureSpec) and (spec.reduce or spec.attention)):
        raise InvalidRequest(
            "stream() takes one prompt, and captures rows, not a reduction or summary of them; use generate() for these"
        )
    return given[0]


def require_one_sample(samples: int) -> None:
    """Check that a stream has one sample.

    Raises:
        InvalidRequest: it has several.
    """
    if samples != 1:
        raise InvalidRequest(f"stream gives one sample, not n={samples}; use generate")


def _rendered(engine: Engine, prompts: Sequence[Any], call: CallArguments) -> list[tuple[Any, list[MessageSpan]]]:
    """Return prompts with the spans of their messages: conversations as token ids, others as they are."""
    for prompt in filter(is_conversation, prompts):
        without_media(prompt)
    asked: Any = {"spans": call.spec is not None, "special": call.add_special_tokens}
    arguments = template_arguments(call.template_kwargs)

    def rendered(prompt: Any) -> tuple[Any, list[MessageSpan]]:
        if not is_conversation(prompt):
            return prompt, []
        ids, spans = templated(engine.vllm.tokenizer, prompt, arguments, **asked)
        return {"prompt_token_ids": ids}, spans

    return [rendered(prompt) for prompt in prompts]


async def _tokenized(serving: Serving, prompt: Any, call: CallArguments) -> Any:
    """Return the prompt, tokenized here without special tokens if it is a text and `add_special_tokens=False`."""
    text = text_of(prompt)
    if text is None or call.add_special_tokens is not False:
        return prompt
    ids = tokens_of((await serving.alive()).vllm.tokenizer, text, special=False)
    return {**(prompt if isinstance(prompt, Mapping) else {"prompt": text}), "prompt_token_ids": ids}


class _ReadPrompt(NamedTuple):
    """Prompt and parameters of a call as the user gave them, with the `max_tokens` and token ids read from them."""

    prompt: Any
    params: Any
    max_tokens: int | None
    ids: tuple[int, ...]


def _warn(engine: Engine, prompts: Sequence[_ReadPrompt], call: CallArguments) -> None:
    """Warn about doubled special tokens, and about a `max_tokens` beyond the model's context length."""
    texts = repeating((one.prompt, one.ids) for one in prompts)
    if texts and call.add_special_tokens is None:
        warn_of_doubled(texts, tokens_of(engine.vllm.tokenizer, "", special=True))
    warn_of_room(((one.params, one.max_tokens, len(one.ids)) for one in prompts), engine.vllm.max_model_len)
