"""ASGI wrappers that remove `steercap` from request bodies before vLLM reads them, and add results to the answers.

Results go into the JSON document of an answer, or into an event of a stream before its last.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Final, TypeAlias

import msgspec

from steercap.client.connection import ERROR_HEADER
from steercap.core.values import shown
from steercap.errors import InvalidRequest, InvalidSpec, SteercapError
from steercap.server.asks import PARTS, parsed_field
from steercap.server.call import CURRENT, OPTED_OUT, SteercapField, SteercapRequest
from steercap.server.folder import owner_of
from steercap.server.library import Library, Presets
from steercap.server.sketch_store import SketchStore

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

#: Header by which a client opts out of recording, and its values that do not opt out.
RECORD_HEADER: Final = b"x-steercap-record"
_RECORDED: Final = ("yes", "true", "1", "on")
#: Routes of vLLM whose requests may have the `steercap` field.
PATHS: Final = ("/v1/chat/completions", "/v1/completions")
#: Maximum bytes of a request's body, counted while it is read.
MOST_BODY: Final = 128 << 20
#: Fields of a body that steercap reads and removes.
FIELDS: Final = ("steercap", "store_activations", "selectors")
#: Error for a body with a lone surrogate that uses steercap: vLLM accepts it, but its engine may fail with status 500.
NO_TEXT: Final = "steercap: the body holds half of a surrogate pair, which is not text"
#: Maximum letters of a name that may be a misspelt `steercap`.
_LETTERS: Final = 12
_DONE: Final = b"data: [DONE]"
#: Types of errors in vLLM's answers, by HTTP status.
_KINDS: Final[Mapping[int, str]] = {
    400: "BadRequestError",
    404: "NotFoundError",
    413: "RequestEntityTooLarge",
    429: "RateLimitError",
    500: "InternalServerError",
}
#: Start of a stream's events that hold a JSON object.
_OBJECT: Final = b"data: {"


class Keyless:
    """ASGI wrapper for a server without API keys that removes `Authorization`, so that all clients are one owner.

    OpenAI's clients always send a key and curl sends none: so each can fetch the other's captures.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one ASGI request without its Authorization header."""
        if scope["type"] == "http":
            headers = [(name, said) for name, said in scope["headers"] if name.lower() != b"authorization"]
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


class OptOut:
    """ASGI wrapper that sets `OPTED_OUT` for requests whose header opts out of recording."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one ASGI request with `OPTED_OUT` set."""
        given = [value for key, value in scope.get("headers", ()) if key.lower() == RECORD_HEADER]
        out = any(value.decode("latin-1").strip().lower() not in _RECORDED for value in given)
        token = OPTED_OUT.set(out)
        try:
            await self._app(scope, receive, send)
        finally:
            OPTED_OUT.reset(token)


class SteercapRoute:
    """ASGI wrapper of a vLLM route that adds support for the `steercap` field.

    Args:
        app: ASGI application of the route.
        library: named vectors, steering and SAEs.
        presets: model names that stand for steering.
        most_body: maximum bytes of a body.
        sketches: open sketches that requests may enter.
    """

    def __init__(
        self,
        app: App,
        library: Library,
        presets: Presets,
        most_body: int = MOST_BODY,
        sketches: SketchStore | None = None,
    ) -> None:
        self._app = app
        self._library = library
        self._presets = presets
        self._most = most_body
        self._sketches = sketches or SketchStore()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one ASGI request: parse and remove the field, run vLLM's route, and add the results to its answer."""
        body = await body_of(scope, receive, send, self._most)
        if body is None:
            return
        try:
            body, call = self._read(body, owner_of(header(scope, b"authorization")))
        except RecursionError:
            await refuse(send, 400, "steercap: it is nested too deeply")
            return
        except SteercapError as error:
            status = 400 if isinstance(error, InvalidRequest) else 429
            await refuse(send, status, str(error), type(error).__name__)
            return
        scope = {**scope, "headers": _resized(scope["headers"], len(body))}
        if call is None:
            await self._app(scope, replayed(body, receive), send)
            return
        with ExitStack() as uses:
            try:
                call.sketches = uses.enter_context(self._sketches.joined(call.asked.sketches, call.owner))
            except SteercapError as error:
                status = 400 if isinstance(error, InvalidRequest) else 404
                await refuse(send, status, str(error), type(error).__name__)
                return
            token = CURRENT.set(call)
            try:
                await self._app(scope, replayed(body, receive), AnswerSender(call, send))
            finally:
                CURRENT.reset(token)
                for forget in call.unsaid:
                    forget()

    def _read(self, body: bytes, owner: str) -> tuple[bytes, SteercapRequest | None]:
        """Split a body into vLLM's part and the steercap request, None for a body that does not use steercap.

        Raises:
            SteercapError: the request is invalid.
        """
        given, is_text = decoded(body)
        if not isinstance(given, dict):
            return body, None  # vLLM reports the error
        if reason := misplaced(given):
            raise InvalidSpec(reason)
        steering = self._presets.of(given.get("model"))
        field, store, selectors = (given.pop(name, None) for name in FIELDS)
        if field is None and store is None and selectors is None and steering is None:
            return body, None
        if not is_text:
            raise InvalidSpec(NO_TEXT)
        if store is not None or selectors is not None:
            field = _shorthand(field, store, selectors)
        asked = SteercapField() if field is None else parsed_field(field, self._library, owner)
        asked = replace(asked, logits=bool(store) and selectors is None)
        if steering is not None:
            both = steering if asked.steering is None else steering + asked.steering
            asked = replace(asked, steering=both)
        if given.get("use_beam_search"):
            raise InvalidSpec(
                "steercap: vLLM runs each beam of a beam search as a request of its own; leave use_beam_search out"
            )
        return json.dumps(given).encode(), SteercapRequest(asked, owner) if asked else None


def misplaced(body: Mapping[str, Any]) -> str:
    """Return what is wrong with a body whose `steercap` field is misspelt, or not where it belongs; "" if nothing is.

    vLLM ignores fields that it does not know, and would answer unsteered.
    """
    given = [name for name, value in body.items() if value is not None]
    if inside := [name for name in PARTS if name in given]:
        return f"the body has {inside[0]!r} beside 'steercap'; give {{'steercap': {{{inside[0]!r}: ...}}}}"
    extra = body.get("extra_body")
    if isinstance(extra, Mapping) and any(name in FIELDS or name in PARTS or _is_misspelt(name) for name in extra):
        return "the body has 'extra_body', which OpenAI's clients replace by its fields; give 'steercap' in its place"
    if wrong := [name for name in given if _is_misspelt(name)]:
        return f"the body has an unknown field {wrong[0]!r}; did you mean 'steercap'?"
    return ""


def _is_misspelt(name: str) -> bool:
    """Check if a name is not "steercap", but much like it."""
    if name in FIELDS or name[:2].casefold() != "st" or len(name) > _LETTERS:
        return False
    return bool(get_close_matches(name.casefold(), FIELDS[:1], cutoff=0.75))


def _shorthand(field: Any, store: Any, selectors: Any) -> Any:
    """Return the `steercap` field with `store_activations` and `selectors` converted to its `capture`.

    Raises:
        InvalidSpec: they contradict each other or the field.
    """
    if field is not None and (not isinstance(field, Mapping) or "capture" in field):
        raise InvalidSpec("store_activations and selectors do the same as steercap.capture; give one of them")
    if store is not None and not isinstance(store, bool):
        raise InvalidSpec(f"store_activations={shown(store)}; give true or false")
    if not store:
        if selectors is not None:
            raise InvalidSpec("selectors say which activations to store; give store_activations: true with them")
        return field
    return {**(field or {}), "capture": True if selectors is None else {"at": selectors}}


class AnswerSender:
    """ASGI `send` function that adds a request's results to its answer.

    Args:
        call: the request, which collects the results while vLLM answers.
        send: the server's own `send`.
    """

    def __init__(self, call: SteercapRequest, send: Send) -> None:
        self._call = call
        self._send = send
        self._start: Message | None = None
        self._stream = False
        self._held = b""

    async def __call__(self, message: Message) -> None:
        """Send one ASGI message of vLLM's answer; a JSON document is sent once it is complete."""
        if message["type"] == "http.response.start":
            kind = next((value for name, value in message["headers"] if name.lower() == b"content-type"), b"")
            self._stream = kind.startswith(b"text/event-stream")
            if self._stream or message["status"] != 200:
                await self._send({**message, "headers": _blamed(message["headers"], self._call.error)})
            else:
                self._start = message
            return
        if message["type"] != "http.response.body" or not (self._stream or self._start):
            await self._send(message)
        elif self._stream:
            await self._event(message)
        else:
            await self._document(message)

    async def _event(self, message: Message) -> None:
        """Send a stream's part, up to its last complete event; insert the results' event before the final `[DONE]`."""
        self._held += message.get("body", b"")
        more = message.get("more_body", False)
        at = self._held.rfind(b"\n\n") if more else len(self._held)
        end = 0 if at < 0 else at + 2
        ready, self._held = self._held[:end], self._held[end:]
        events = [self._with_numbers(event) for event in ready.split(b"\n\n")]  # JSON text has no bare newlines
        if (self._call.results or self._call.error) and _DONE in events:
            failed = self._call.error
            came: dict[str, Any] = (
                {"error": failed} if failed else {"results": self._call.results, **self._numbers(None)}
            )
            chunk = {"object": "steercap", "choices": [], "steercap": came}
            events.insert(events.index(_DONE), b"data: " + msgspec.json.encode(chunk))
            if not failed:
                self._call.unsaid.clear()
        ready = b"\n\n".join(events)
        await self._send({**message, "body": ready})

    def _with_numbers(self, event: bytes) -> bytes:
        """Return an event with the waiting per-token numbers of its choices added."""
        if not self._call.live or not event.startswith(_OBJECT):
            return event
        found = msgspec.json.decode(event[len(_OBJECT) - 1 :])
        numbers = self._numbers({one.get("index") for one in found.get("choices", ())})
        return _OBJECT[:-1] + msgspec.json.encode({**found, "steercap": numbers}) if numbers else event

    def _numbers(self, choices: Collection[Any] | None) -> dict[str, list[Any]]:
        """Remove and return, by kind, the waiting per-token numbers of some choices, None for all."""
        found: dict[str, list[Any]] = {}
        left = []
        for one in self._call.live:
            if choices is None or one.choice in choices:
                found.setdefault(one.kind, []).append({"choice": one.choice, **one.content})
            else:
                left.append(one)
        self._call.live = left
        return found

    async def _document(self, message: Message) -> None:
        """Collect a part of a JSON document; when it is complete, send it with the results added."""
        self._held += message.get("body", b"")
        if message.get("more_body", False):
            return
        assert self._start is not None
        found, body = msgspec.json.decode(self._held), self._held
        if isinstance(found, dict):  # it is null where the client has gone
            found["steercap"] = {"results": self._call.results}
            body = msgspec.json.encode(found)
            self._call.unsaid.clear()
        await self._send({**self._start, "headers": _resized(self._start["headers"], len(body))})
        await self._send({"type": "http.response.body", "body": body})


async def body_of(scope: Message, receive: Receive, send: Send, most: int) -> bytes | None:
    """Read a request's whole body; None if the client is gone, or if it is too long, which is answered with 413."""
    said = header(scope, b"content-length")
    length = int(said) if said.isdecimal() and len(said) < len(str(most)) + 9 else 0
    fits, parts, length = length <= most, list[bytes](), 0
    while fits:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        length += len(parts[-1])
        fits = length <= most
        if fits and not message.get("more_body", False):
            return b"".join(parts)
    await refuse(send, 413, f"the body is longer than {most:,} bytes")
    return None


def decoded(body: bytes) -> tuple[Any, bool]:
    """Decode a body as vLLM's server does; return the value, None if invalid, and whether all its strings are text.

    vLLM uses Python's json, which accepts NaN, encodings other than UTF-8 and lone surrogates. If fewer bodies were
    decoded here, vLLM could answer requests for steercap without it.
    """
    try:
        return msgspec.json.decode(body), True
    except (ValueError, RecursionError):
        pass
    try:
        given = json.loads(body)
        json.dumps(given, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return given, False
    except (ValueError, RecursionError):
        return None, True
    return given, True


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` that returns the body once, then messages of the original."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def failure(status: int, reason: str, error: str = "", param: str | None = None) -> tuple[bytes, dict[str, str]]:
    """Build the body and headers of an error answer for OpenAI's clients.

    Args:
        status: HTTP status, a key of `_KINDS`.
        reason: message for the client.
        error: class name of the steercap error for the client to raise, "" for none.
        param: field of the request that caused it.
    """
    body = json.dumps({"error": {"message": reason, "type": _KINDS[status], "param": param, "code": status}}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    if error:
        headers[ERROR_HEADER] = error
    if status == 413:  # the rest of the body is not read
        headers["connection"] = "close"
    return body, headers


async def refuse(send: Send, status: int, reason: str, error: str = "") -> None:
    """Send an error answer whose `param` is "steercap"; see `failure`."""
    body, headers = failure(status, reason, error, "steercap")
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _blamed(headers: Any, error: str) -> list[tuple[bytes, bytes]]:
    """Return an answer's headers with the class name of a steercap error added, if `error` is not ""."""
    return [*headers, *([(ERROR_HEADER.encode(), error.encode())] if error else [])]


def header(scope: Message, name: bytes) -> str:
    """Return the value of the first header called `name`, which is in lower case; "" if there is none."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name), "")


def _resized(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() not in {b"content-length", b"transfer-encoding"}]
    return [*kept, (b"content-length", str(length).encode())]
