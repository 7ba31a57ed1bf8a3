"""Wrapper of vLLM's routes that do not support `steercap`: presets steer those that generate; the field is refused.

vLLM ignores fields that a route does not know, so a request for steercap would be accepted and not carried out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from steercap.server.call import CURRENT, SteercapField, SteercapRequest
from steercap.server.folder import owner_of
from steercap.server.library import Presets
from steercap.server.middleware import (
    FIELDS,
    MOST_BODY,
    NO_TEXT,
    PATHS,
    App,
    Message,
    Receive,
    Send,
    body_of,
    decoded,
    header,
    misplaced,
    refuse,
    replayed,
)

#: Routes whose requests presets steer: they generate by the engine's `generate`, once or several times.
STEERED: Final = (
    "/v1/responses",
    "/v1/messages",
    "/v1/chat/completions/batch",
    "/cohere/v2/chat",
    "/inference/v1/generate",
)
#: Routes that do not run the model, where a preset's name stands for the model itself.
AT_REST: Final = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
#: Name and beginning of the value of a field of a multipart form, as the speech routes take them; of a part's beginning
#: alone, since a search through whole bodies takes seconds, in which no other request is served.
_FORM_FIELD: Final = re.compile(
    rb"""(?i)(?:\r\n[^\r\n]{1,200}+){0,8}?\r\n"""
    rb"""content-disposition:[ \t]{0,9}form-data;[ \t]{0,9}name=["']?(\w{1,40}+)["']?[^\r\n]{0,200}+"""
    rb"""(?:\r\n[^\r\n]{1,200}+){0,8}+\r\n\r\n([^\r\n]{0,400})"""
)
#: What separates the parts of a form, as its Content-Type says.
_BOUNDARY: Final = re.compile(r'(?i);[ \t]*boundary="?([^";]+)')
#: Number of parts of a form that are read; Starlette refuses forms with more than 1,000 fields or 1,000 files.
_MOST_PARTS: Final = 2000


class PassthroughRoute:
    """ASGI wrapper of a vLLM route that does not support the `steercap` field.

    Args:
        app: ASGI application of the route.
        presets: model names that stand for steering.
        paths: routes that support the field, for messages.
    """

    def __init__(self, app: App, presets: Presets, paths: Sequence[str] = PATHS) -> None:
        self._app = app
        self._paths = paths
        self._presets = presets

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one ASGI request: refuse steercap's fields, and steer it if it names a preset."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        body = await body_of(scope, receive, send, MOST_BODY)
        if body is None:
            return
        given, is_text = decoded(body)
        given = given if isinstance(given, dict) else {}
        if (kind := header(scope, b"content-type")).lower().startswith("multipart/"):
            given = _form(kind, body)
        if asked := [name for name in FIELDS if given.get(name) is not None]:
            await refuse(send, 400, f"{path} does not take {asked[0]!r}; use {' or '.join(self._paths)}")
            return
        if reason := misplaced(given):
            await refuse(send, 400, f"{reason} ({path} does not take it; use {' or '.join(self._paths)})")
            return
        steering = self._presets.of(given.get("model"))
        if steering is not None and (path not in (*STEERED, *AT_REST) or given.get("use_beam_search")):
            await refuse(
                send, 400, f"{path} cannot be steered; use {', '.join((*self._paths, *STEERED))}, or another model"
            )
            return
        call = None
        if steering is not None and path in STEERED:
            if not is_text:
                await refuse(send, 400, NO_TEXT)
                return
            call = SteercapRequest(SteercapField(steering=steering), owner_of(header(scope, b"authorization")))
        token = CURRENT.set(call)
        try:
            await self._app(scope, replayed(body, receive), send)
        except RecursionError:  # /invocations parses the body itself, and would answer 500
            await refuse(send, 400, "the body is nested too deeply")
        finally:
            CURRENT.reset(token)


def _form(kind: str, body: bytes) -> dict[str, str]:
    """Return the fields of a multipart form by name; `kind` is the request's Content-Type."""
    boundary = _BOUNDARY.search(kind)
    if boundary is None:  # vLLM's route refuses it
        return {}
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary[1].strip().encode("latin-1"), _MOST_PARTS + 1)
    fields = [found for part in parts if (found := _FORM_FIELD.match(part))]
    return {field[1].decode(): field[2].decode("utf-8", "replace") for field in fields}
