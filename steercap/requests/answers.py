"""Calls on a local engine: each prompt becomes a job, and jobs run concurrently."""

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
    as_list,
    is_conversation,
    per_prompt,
    repeating,
    template_arguments,
    templated,
    text_of,
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

#: Number of prompts of a call that are prepared before the event loop may run those that are ready; preparing token ids
#: never awaits.
TOGETHER: Final = 32


@dataclass(frozen=True)
class LocalBackend:
    """Backend of a model's calls on an engine that this process has started; `serving` owns the engine."""

    serving: Serving

    async def run(self, prompts: Sequence[Any], call: CallArguments) -> list[Generation]:
        """Run prompts and conversations concurrently; return their results in the order of the prompts."""
        engine = await self.serving.alive()
        if call.name != "read":
            require_kind(engine, call.name, pools=call.encoding)
        elif engine.vllm.pools:
            call = replace(call, sampling_params=None, encoding=True)
        rendered = _rendered(engine, prompts, call)
        what = "pooling_params" if call.encoding else "sampling_params"
        params = per_prompt(call.sampling_params, len(prompts), what)
        specs = per_prompt(call.spec, len(prompts), "capture")
        edits = per_prompt(call.steering, len(prompts), "steering")
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
        """Open a sketch on the workers; errors as of `requests.sketching.open_sketch`."""
        return await self.serving.with_restart(lambda engine: open_sketch(engine, kind, size, spec))

    async def streamed(self, prompt: Any, call: CallArguments) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of `SteerModel.stream`; closing the generator cancels the request."""
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
    """Return the only prompt of a call of `stream`.

    Raises:
        InvalidRequest: there are several prompts or specs, or the capture is a reduction or a summary of attention.
    """
    many, given = as_list(prompt)
    spec = call.spec
    if many or isinstance(spec, (list, tuple)) or (isinstance(spec, CaptureSpec) and (spec.reduce or spec.attention)):
        raise InvalidRequest(
            "stream() takes one prompt, and captures rows, not a reduction or summary of them; use generate() for these"
        )
    return given[0]


def require_one_sample(samples: int) -> None:
    """Check that a stream's number of samples, `n`, is 1.

    Raises:
        InvalidRequest: it is not.
    """
    if samples != 1:
        raise InvalidRequest(f"stream gives one sample, not n={samples}; use generate")


def _rendered(engine: Engine, prompts: Sequence[Any], call: CallArguments) -> list[tuple[Any, list[MessageSpan]]]:
    """Return (prompt, spans of its messages) for each prompt: conversations as token ids, others unchanged."""
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
    """Return a text prompt as token ids if `add_special_tokens` is not what vLLM does; others unchanged."""
    text, special = text_of(prompt), call.add_special_tokens
    if text is None or special is None:
        return prompt
    vllm = (await serving.alive()).vllm
    if special and vllm.texts["add_special_tokens"]:
        return prompt
    ids = vllm.text_ids(text, special)
    return {**(prompt if isinstance(prompt, Mapping) else {"prompt": text}), "prompt_token_ids": ids}


class _ReadPrompt(NamedTuple):
    """Prompt and parameters of a call as the user gave them, with `max_tokens` and token ids as vLLM reads them."""

    prompt: Any
    params: Any
    max_tokens: int | None
    ids: tuple[int, ...]


def _warn(engine: Engine, prompts: Sequence[_ReadPrompt], call: CallArguments) -> None:
    """Warn of doubled special tokens, and of `max_tokens` beyond the model's context length."""
    texts = repeating((one.prompt, one.ids) for one in prompts)
    if texts and call.add_special_tokens is None:
        warn_of_doubled(texts, engine.vllm.text_ids("", None))
    warn_of_room(((one.params, one.max_tokens, len(one.ids)) for one in prompts), engine.vllm.max_model_len)
