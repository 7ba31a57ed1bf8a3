"""Calls on a server: each prompt is one HTTP request, whose choices become a `Generation`."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from safetensors.torch import load

from steercap.captures import files
from steercap.captures.handle import CaptureHandle
from steercap.captures.lifecycle import Lifecycle
from steercap.captures.pooled import Encoded, require_kind
from steercap.client.asks import (
    Streamed,
    capture_json,
    lines_of,
    monitors_json,
    reports_of,
    require_specs,
    sent_steering,
)
from steercap.client.chats import templated, tokenised
from steercap.client.connection import AT_ONCE, PLAIN, Connection, RemoteServing
from steercap.client.rows import RemoteRows, count, entering, open_sketch
from steercap.client.sampling import pooling_json, sampling_json
from steercap.client.uploads import Uploads
from steercap.concurrency.loops import each_of
from steercap.core.chat import MessageSpan
from steercap.core.extras import extra
from steercap.core.prompts import (
    CallArguments,
    ids_of_prompt,
    is_conversation,
    no_room,
    no_token,
    per_prompt,
    repeating,
    require_salt,
    require_text,
    template_arguments,
    warn_of_doubled,
    warn_of_room,
    without_media,
)
from steercap.core.receipt import SteeringReceipt
from steercap.core.spec import CaptureSpec
from steercap.core.values import shown, warn
from steercap.errors import InvalidPrompt, InvalidRequest, ServerFailure, SteeringNotApplied
from steercap.files.fingerprint import names_of, warn_of_other_model
from steercap.requests.answers import one_to_stream, require_one_sample
from steercap.requests.call_types import Generation
from steercap.requests.sketching import RunningSketch
from steercap.requests.stream import Chunk
from steercap.steering.monitor import held_back, monitors_of
from steercap.steering.spec import spec_of

_COMPLETIONS: Final = "/v1/completions"
_ENCODE: Final = "/v1/steercap/encode"
_PROMPT: Final = ("prompt", "prompt_token_ids")
#: Assumed maximum number of special tokens around a text, which itself has at most one token per byte.
_MARKS: Final = 16
#: Sampling parameters of `read`: vLLM samples at least one token per prompt; it has no row.
_READ: Final[Mapping[str, Any]] = {"max_tokens": 1, "temperature": 0.0}


@dataclass(frozen=True)
class PromptOfCall:
    """One prompt of a call to `generate` or a similar method, with its own parameters and specs.

    Args:
        prompt: text, or a prompt dict of text or token ids.
        params: its sampling or pooling parameters.
        spec: its capture spec, or None.
        steering: its steering: a spec, an edit, the name of one on the server, or None.
        call: arguments of the whole call.
        spans: token positions of its messages, if it is a conversation.
    """

    prompt: Any
    params: Any
    spec: CaptureSpec | None
    steering: Any
    call: CallArguments
    spans: tuple[MessageSpan, ...] = ()


@dataclass(frozen=True)
class RemoteAnswers:
    """The calls of `Calls` (`generate`, `chat`, `read` and others) on a server.

    Args:
        connection: connection to the server.
        uploads: uploads of the connection.
    """

    connection: Connection
    uploads: Uploads

    async def run(self, prompts: Sequence[Any], call: CallArguments) -> list[Generation]:
        """Run prompts and conversations concurrently; return their results in order.

        Raises:
            InvalidRequest: the call is for pooling models and the server's model generates, or the other way round.
            The errors of `Connection.ask` and of the specs' checks.
        """
        pools = self._require_kind(call)
        if pools and call.name == "read":
            call = replace(call, sampling_params=None, encoding=True)
        rendered = await self._rendered(prompts, call)
        given = _READ if call.reading and not call.encoding else call.sampling_params
        params = per_prompt(given, len(prompts), "pooling_params" if call.encoding else "sampling_params")
        specs = per_prompt(call.spec, len(prompts), "capture")
        edits = per_prompt(call.steering, len(prompts), "steering")
        for spec in specs:
            require_specs(spec)
        asked = [
            PromptOfCall(prompt, own, spec, steering, call, spans)
            for (prompt, spans), own, spec, steering in zip(rendered, params, specs, edits, strict=True)
        ]
        self._look_at_models(asked)
        done = await self.connection.run(lambda: each_of(asked, self._one, AT_ONCE))
        try:
            with self.connection.answering():
                ids = [_ids_read(result.output) for result in done]
            await self._look_at_prompts([*zip(asked, ids, strict=True)])
            return [replace(one, output=_completion(one.output)) for one in done] if call.name == "run" else done
        except BaseException:  # as where warnings are errors: nobody gets these handles
            for handle in (handle for one in done for handle in one.handles or ()):
                handle.release()
            raise

    async def open_sketch(self, kind: str, size: Any, spec: CaptureSpec) -> RunningSketch:
        """Open a sketch at the server; see `client.rows.open_sketch`."""
        return await open_sketch(self.connection, kind, size, spec)

    async def _rendered(
        self, prompts: Sequence[Any], call: CallArguments
    ) -> Sequence[tuple[Any, tuple[MessageSpan, ...]]]:
        """Return the prompts in order, each with its messages' spans: conversations as token ids, others unchanged."""
        if not any(map(is_conversation, prompts)):
            return [(prompt, ()) for prompt in prompts]
        for prompt in filter(is_conversation, prompts):
            without_media(prompt)
        arguments, spans = template_arguments(call.template_kwargs), call.spec is not None
        if call.add_special_tokens is not None:
            arguments["add_special_tokens"] = call.add_special_tokens

        async def render(prompt: Any) -> tuple[Any, tuple[MessageSpan, ...]]:
            if not is_conversation(prompt):
                return prompt, ()
            ids, found = await templated(self.connection, prompt, arguments, spans=spans)
            return {"prompt_token_ids": ids}, found

        return await self.connection.run(lambda: each_of(prompts, render, AT_ONCE))

    async def streamed(self, prompt: Any, call: CallArguments) -> AsyncGenerator[Chunk, None]:
        """Run one prompt and yield its chunks as `RemoteModel.stream` does; the last has the rows and receipts."""
        self._require_kind(call)
        asked = PromptOfCall(one_to_stream(prompt, call), call.sampling_params, call.spec, call.steering, call)
        require_one_sample(sampling_json(asked.params).get("n", 1))
        sample, is_looked_at = Streamed(), False
        self._look_at_models([asked])
        with entering(call.sketches):
            async with (
                self._body(asked) as body,
                aclosing(self.connection.stepped(self._events({**body, "stream": True}))) as events,
            ):
                async for event in events:
                    with self.connection.answering():
                        chunk = sample.take(event)
                    if not is_looked_at and sample.reads_prompt:
                        is_looked_at = True
                        with self.connection.answering():
                            ids = _ids_read(sample.document)
                        await self._look_at_prompts([(asked, ids)])
                    if chunk is not None:
                        yield chunk
            done = self._done(asked, sample.document)
        yield await self._last(done, sample)

    async def _last(self, done: Generation, sample: Streamed) -> Chunk:
        """Return the last chunk of a stream: the rows (fetched here), steering receipt and monitors' reports."""
        last = Chunk(
            "",
            (),
            None,
            None,
            finished=True,
            steering=done.steering[0] if done.steering else None,
            crossings=sample.crossings,
            monitors=done.monitors[0] if done.monitors else (),
            finish_reason=sample.finish_reason,
        )
        if not done.handles:
            return last
        handle = await done.handles[0].fetch()
        return replace(last, captures=handle.captures, positions=handle.positions, token_types=handle.token_types)

    async def _events(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the decoded events of a streamed answer, to its end.

        Raises:
            SteercapError: the server sends an error, or the stream breaks off.
        """
        failed: Any = None
        async with self.connection.answer("POST", _COMPLETIONS, json=body) as found:
            async for line in lines_of(found.aiter_bytes()):
                said = line.removeprefix(b"data:").strip()
                if said == b"[DONE]":
                    break
                if not line.startswith(b"data:"):
                    continue
                with self.connection.answering():
                    event: dict[str, Any] = msgspec.json.decode(said)
                name = (event.get("steercap") or {}).get("error", "")
                if failed is not None and name:
                    raise self.connection.error_from_answer(failed.get("code") or 500, {"error": failed}, name)
                if "error" in event:
                    failed = event["error"]
                else:
                    yield event
            else:
                failed = failed or {"message": "the stream broke off before its end"}
        if failed is not None:
            raise self.connection.error_from_answer(failed.get("code") or 500, {"error": failed}, "")

    def _require_kind(self, call: CallArguments) -> bool:
        """Check that the server's model can serve a call; return whether it is a pooling model.

        Raises:
            InvalidRequest: the call is for the other kind of model.
        """
        engine: Any = self.connection.here().engine
        if engine is None and call.encoding:
            engine = RemoteServing(self.connection).opened()  # raises an error: the server does not say
        pools = engine is not None and engine.vllm.pools
        if call.name != "read" and engine is not None:
            require_kind(engine, call.name, pools=call.encoding)
        return bool(pools)

    async def _look_at_prompts(self, read: Sequence[tuple[PromptOfCall, Sequence[int]]]) -> None:
        """Warn once per call about doubled special tokens, and about a `max_tokens` beyond the context length.

        Args:
            read: the prompts, each with the token ids that the model read.
        """
        texts = repeating((one.prompt, ids) for one, ids in read)
        if texts and read[0][0].call.add_special_tokens is None:
            warn_of_doubled(texts, await self.connection.run(lambda: tokenised(self.connection, "")))
        if not read[0][0].call.encoding:
            most = ((one.params, sampling_json(one.params)["max_tokens"], len(ids)) for one, ids in read)
            warn_of_room(most, self.connection.here().context)

    def _look_at_models(self, prompts: Sequence[PromptOfCall]) -> None:
        """Warn once per call about vectors and probes that were made for another model than the server's."""
        found: dict[tuple[str, str], None] = {}
        monitors = monitors_of(prompts[0].call.monitors)
        for monitor in monitors:
            found["the probe of a monitor", monitor.model] = None
        for steering in (*(one.steering for one in prompts), held_back(monitors)):
            for edit in () if steering is None or isinstance(steering, str) else spec_of(steering).of_rows():
                found["a vector of steering=", edit.model] = None
        for spec in (one.spec for one in prompts if one.spec is not None):
            found["project=", getattr(spec.project, "model", "")] = None
        here = self.connection.here()
        names = (*names_of(here.model), here.name, *(here.engine.vllm.names if here.engine else ()))
        for what, label in found:
            warn_of_other_model(what, label, names)

    async def _one(self, item: PromptOfCall) -> Generation:
        if item.call.encoding:
            return await self._encoded(item)
        async with self._body(item) as body:
            with entering(item.call.sketches):
                return self._done(item, await self.connection.ask("POST", _COMPLETIONS, json=body))

    async def _encoded(self, item: PromptOfCall) -> Generation:
        """Run one prompt of `encode`, or of `read` with a pooling model; the result's `output` is an `Encoded`."""
        options, given = _options_json(item.call), _prompt_json(item.prompt)
        body = {"model": self.connection.here().name, "prompt": given, **options, **_salt(item.prompt)}
        body |= {"pooling_params": pooling_json(item.params), "add_special_tokens": item.call.add_special_tokens}
        async with AsyncExitStack() as names:
            body["steercap"] = await self._field(item, names)
            with entering(item.call.sketches):
                document = await self.connection.ask("POST", _ENCODE, json=body)
                done = self._done(item, document)
        with self.connection.answering():
            (choice,), said = document["choices"], document["encoded"]
            data = load(base64.b64decode(said["data"], validate=True))["data"]
            receipt = done.steering[0] if done.steering else None
            output = Encoded(data, str(said["task"]), tuple(choice["prompt_token_ids"]), receipt)
        return replace(done, output=output)

    @asynccontextmanager
    async def _body(self, item: PromptOfCall) -> AsyncIterator[dict[str, Any]]:
        """Yield the body of a completion request; uploads that it names stay on the server while the block runs."""
        require_specs(item.spec)
        sampling, options = sampling_json(item.params), _options_json(item.call)
        given = _prompt_json(item.prompt)
        special = item.call.add_special_tokens
        if isinstance(given, str) and (special is False or not given or self.connection.here().texts != PLAIN):
            given = await tokenised(self.connection, given, special=special)
        if not given:
            raise no_token(item.prompt)
        prompt, sampling["max_tokens"] = await self._within(given, sampling["max_tokens"])
        context = self.connection.here().context
        if context is not None and not isinstance(prompt, str) and len(prompt) >= context:
            raise no_room(item.prompt, len(prompt), context)
        body = {
            "model": self.connection.here().name,
            "prompt": prompt,
            "return_token_ids": True,
            **({"return_tokens_as_token_ids": True} if {"logprobs", "logprob_token_ids"} & sampling.keys() else {}),
            **sampling,
            **options,
            **_salt(item.prompt),
        }
        async with AsyncExitStack() as names:
            field = await self._field(item, names)
            yield {**body, "steercap": field} if field else body

    async def _field(self, item: PromptOfCall, names: AsyncExitStack) -> dict[str, Any]:
        """Return the field `steercap` of a body; uploads that it names stay on the server until `names` is closed."""
        field: dict[str, Any] = {}
        for sketch in item.call.sketches:
            sketch.record.require()
            field.setdefault("sketches", []).append(sketch.record.name)
        if item.spec is not None:
            project: Any = item.spec.project
            name = None if project is None else await names.enter_async_context(self.uploads.named(project))
            field["capture"] = capture_json(item.spec, name)
        if item.steering is not None:
            steering = item.steering
            if not isinstance(steering, str):
                steering = await sent_steering(spec_of(steering), self.uploads, names)
            field["steering"] = steering
        if monitors := monitors_of(item.call.monitors):
            layers = self.connection.here().num_layers
            field["monitors"] = await monitors_json(monitors, layers, self.uploads, names)
        return field

    async def _within(self, prompt: str | list[int], max_tokens: Any) -> tuple[str | list[int], Any]:
        """Return a prompt and its `max_tokens`, reduced to the rest of the context; None becomes the whole rest.

        A server refuses a number that is too large, and reads None as 16. The prompt may come back as token ids.
        """
        context = self.connection.here().context
        if context is None or not (max_tokens is None or isinstance(max_tokens, int)):
            return prompt, max_tokens
        longest = len(prompt.encode()) + _MARKS if isinstance(prompt, str) else len(prompt)
        if max_tokens is not None and longest + max_tokens <= context:
            return prompt, max_tokens
        ids = await tokenised(self.connection, prompt) if isinstance(prompt, str) else prompt
        room = max(1, context - len(ids))
        return ids, room if max_tokens is None else min(room, max_tokens)

    # Results

    def _done(self, item: PromptOfCall, document: Mapping[str, Any]) -> Generation:
        """Return the result in a server's answer, after checking it; its `output` is the answer itself.

        Raises:
            SteeringNotApplied: edits were asked for, and the server does not confirm that they were made.
            ServerFailure: the answer does not have the expected form.
        """
        with self.connection.answering():
            choices = sorted(document["choices"], key=lambda choice: choice["index"])
            results = {one["choice"]: one for one in document.get("steercap", {}).get("results", ())}
            texts = tuple(choice["text"] for choice in choices)
            self._look_at_ends(item, choices)
            count(item.call.sketches, [*results.values()], self.connection.url)
            receipts = handles = monitors = None
            edited = [results.get(choice["index"], {}).get("steering") for choice in choices]
            if item.steering is not None and not all(edited):
                raise SteeringNotApplied(
                    f"{self.connection.url} does not confirm that the edits of this request were made; its text is "
                    "withheld. Use the same version of steercap on both sides"
                )
            if choices and all(edited):  # a preset steers those who do not ask
                receipts = tuple(_receipt(said) for said in edited)
            if item.spec is not None:
                handles = tuple(self._handle(item, choice, results[choice["index"]]["capture"]) for choice in choices)
            if watching := monitors_of(item.call.monitors):
                said = [results.get(choice["index"], {}).get("monitors") for choice in choices]
                monitors = tuple(reports_of(watching, one) for one in said)
        return Generation(document, texts, handles, receipts, monitors)

    def _look_at_ends(self, item: PromptOfCall, choices: Sequence[Mapping[str, Any]]) -> None:
        """Warn of a text that ended for its length before its `max_tokens`, and before the context was full."""
        context = self.connection.here().context
        if item.call.encoding or context is None:
            return
        most = sampling_json(item.params)["max_tokens"]
        for choice in choices:
            length, room = len(choice["token_ids"]), context - len(choice["prompt_token_ids"])
            if choice.get("finish_reason") == "length" and length < (room if most is None else min(most, room)):
                warn(
                    f"max_tokens={most}: {self.connection.url} ends texts after {length} tokens, by the max_new_tokens "
                    "of its own configuration; give no more than that, or start it without"
                )
                return

    def _handle(self, item: PromptOfCall, choice: Mapping[str, Any], capture: Mapping[str, Any]) -> CaptureHandle:
        header = msgspec.json.decode(msgspec.json.encode(capture["header"]), type=files.Header)
        prompt, output = tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"])
        if (len(prompt), len(output)) != (capture["prompt_tokens"], capture["output_tokens"]):
            raise ServerFailure(
                f"{self.connection.url} returned rows of another sequence than the text; please report this"
            )
        path = capture["url"]
        if not path.startswith("/v1/steercap/captures/"):
            raise ServerFailure(
                f"{self.connection.url} says that rows are at {shown(path)}, which is not an address of that server"
            )
        self.connection.hold(path)
        rows = RemoteRows(self.connection, path, capture["bytes"], header.request_id, header.points, (*prompt, *output))
        reply = MessageSpan("assistant", None, len(prompt), len(prompt) + len(output))
        reading = item.call.reading
        return CaptureHandle(
            request_id=header.request_id,
            model=header.model,
            text="" if reading else choice["text"],
            prompt_token_ids=prompt,
            output_token_ids=() if reading else output,
            points=header.points,
            num_layers=header.num_layers,
            lifecycle=_lifecycle(header.request_id, rows, self.connection),
            messages=(*item.spans, reply) if item.spans else (),
            media=header.media,
            directions=header.directions,
            marks=header.marks,
            attention_rules=header.attention_rules,
            adapter=header.adapter or "",
        )


def _lifecycle(name: str, rows: RemoteRows, connection: Connection) -> Lifecycle:
    found = Lifecycle(name, source=rows)
    found.call_style = connection.call_style
    return found


def _receipt(fields: Any) -> SteeringReceipt:
    return SteeringReceipt(tuple(fields["rows"]), fields["computed"], fields["cached"], fields["digest"])


def _prompt_json(prompt: Any) -> str | list[int]:
    """Return a prompt as a text or token ids.

    Raises:
        InvalidPrompt: a prompt dict with other fields, or values of other types.
    """
    if isinstance(prompt, str):
        return require_text(prompt)
    given = [name for name in prompt if name != "cache_salt"]
    if len(given) != 1 or (name := given[0]) not in _PROMPT:
        raise InvalidPrompt(
            f"a prompt dict with {', '.join(map(repr, prompt))} cannot be sent to a server; give a str, token ids, or "
            "a dict of one of 'prompt' and 'prompt_token_ids', with 'cache_salt' if you like"
        )
    require_salt(prompt.get("cache_salt"))
    if name == "prompt_token_ids":
        return ids_of_prompt(prompt[name])
    if not isinstance(prompt[name], str):
        raise InvalidPrompt(f"prompt={shown(prompt[name])} in a prompt dict; give a str")
    return require_text(prompt[name])


def _salt(prompt: Any) -> dict[str, Any]:
    """Return the field `cache_salt` of a prompt dict; {} if it has none or an empty one."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    return {"cache_salt": salt} if salt else {}


def _ids_read(output: Any) -> Sequence[int]:
    """Return the prompt's token ids in an answer or `Encoded`."""
    if isinstance(output, Encoded):
        return output.prompt_token_ids
    return output["choices"][0].get("prompt_token_ids") or ()


def _options_json(call: CallArguments) -> dict[str, Any]:
    options = call.options
    if options.get("lora_request") is not None:
        raise InvalidRequest(
            "lora_request= cannot be sent to a server, which has its own adapters; choose one by connect(url, "
            "model=NAME)"
        )
    return {"priority": options["priority"]} if options.get("priority") else {}


def _completion(document: Mapping[str, Any]) -> Any:
    """Return an answer as the `Completion` of OpenAI's client, unknown fields included."""
    with extra("client"):
        from openai.types import Completion

    found: Any = Completion
    return found.construct(**document)
