"""Route `/v1/steercap/encode`: output of a pooling model for one prompt, with captures, steering and sketches."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from safetensors.torch import save
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from steercap.captures import files
from steercap.captures.pooled import Encoded
from steercap.core.values import choices, index_of, shown
from steercap.errors import InvalidRequest, InvalidSpec, SteercapError
from steercap.requests.context import joining
from steercap.server.asks import parsed_field
from steercap.server.call import described, entered, receipt_json, sketches_json
from steercap.server.folder import CaptureStore, owner_of
from steercap.server.library import Library, Presets
from steercap.server.questions import as_json, computing, read_body
from steercap.server.sketch_store import SketchStore

if TYPE_CHECKING:
    from steercap.captures.handle import CaptureHandle
    from steercap.model import SteerModel
    from steercap.server.call import SteercapField

#: Route of this module.
ENCODE: Final = "/v1/steercap/encode"
#: Fields that a request's body may have.
FIELDS: Final = ("model", "prompt", "pooling_params", "add_special_tokens", "priority", "cache_salt", "steercap")
#: Maximum bytes of a request's body, and of the pooled output in an answer.
MOST_BODY: Final = 16 << 20
MOST_DATA: Final = 64 << 20


class PoolingRoutes:
    """Route that runs a pooling model.

    Args:
        model: the open model.
        captures: store of captures that wait to be fetched.
        library: named vectors and steering.
        presets: steering by model name.
        sketches: open sketches that requests may enter.
        failures: number of failed requests by class name of the steercap error; updated here.
    """

    def __init__(
        self,
        model: SteerModel,
        captures: CaptureStore,
        library: Library,
        presets: Presets,
        sketches: SketchStore,
        *,
        failures: Counter[str],
    ) -> None:
        self._model, self._captures, self._library = model, captures, library
        self._presets, self._sketches, self._failures = presets, sketches, failures

    @property
    def routes(self) -> list[Route]:
        """Starlette routes of this class's methods."""
        return [Route(ENCODE, computing(self.encode, MOST_BODY), methods=["POST"])]

    async def encode(self, request: Request) -> Response:
        """Answer a POST with the pooled output of `prompt`, text or token ids, as base64 of a safetensors file."""
        owner = owner_of(request.headers.get("authorization", ""))
        given = await read_body(request, FIELDS)
        field = parsed_field(given.get("steercap") or {}, self._library, owner)
        if field.monitors or field.delivery != "fetch":
            raise InvalidSpec("a pooling model has no monitors=, and its rows are fetched: leave deliver= out")
        arguments = self._arguments(given, field)
        if field.capture is not None:
            self._captures.require_room(owner)
        with ExitStack() as held:
            for sketch in (sketches := held.enter_context(self._sketches.joined(field.sketches, owner))):
                held.enter_context(joining(self._model, sketch))
            with self._counted():
                found: Any = await self._model.encode(_prompt(given), given.get("pooling_params"), **arguments)
                encoded, handle = found if field.capture is not None else (found, None)
                with entered(sketches):
                    result = {"choice": 0, **receipt_json(encoded.steering), **sketches_json(field.sketches, sketches)}
                    async with handle or nullcontext():
                        said = await asyncio.to_thread(_as_json, encoded)
                        if handle is not None:
                            result["capture"] = await self._stored(handle, owner)
                            request.state.undo = partial(self._dropped, result["capture"]["id"], owner)
        choice = {"index": 0, "text": "", "token_ids": [], "prompt_token_ids": list(encoded.prompt_token_ids)}
        return as_json({"choices": [choice], "steercap": {"results": [result]}, "encoded": said})

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a steercap error raised in the block, by its class name."""
        try:
            yield
        except SteercapError as error:
            self._failures[type(error).__name__] += 1
            raise

    def _arguments(self, given: Mapping[str, Any], field: SteercapField) -> dict[str, Any]:
        """Return the keyword arguments of `SteerModel.encode` for a request.

        Raises:
            InvalidRequest: the model has another name, or a field is of another type.
        """
        name = given.get("model")
        if name is not None and name not in self._presets.names:
            raise InvalidRequest(f"model={shown(name)}; {choices(name, self._presets.names)}")
        special, priority = given.get("add_special_tokens"), index_of(given.get("priority", 0))
        if not (special is None or isinstance(special, bool)) or priority is None:
            raise InvalidSpec("add_special_tokens is true or false, and priority a whole number")
        steering = self._presets.of(name)
        if field.steering is not None:
            steering = field.steering if steering is None else steering + field.steering
        return {
            "capture": field.capture,
            "steering": steering,
            "add_special_tokens": special,
            "priority": priority,
        }

    async def _dropped(self, capture: str, owner: str) -> None:
        """Delete a capture from the store, since its client has disconnected."""
        self._captures.remove(capture, owner)

    async def _stored(self, handle: CaptureHandle, owner: str) -> dict[str, Any]:
        """Put fetched rows into the store, as a file; return the field `capture` of the result."""
        content = await asyncio.to_thread(partial(files.encode, handle.as_saved()))
        return described(handle, self._captures.offer(content, owner))


def _prompt(given: Mapping[str, Any]) -> Any:
    prompt, salt = given.get("prompt"), given.get("cache_salt")
    if not isinstance(prompt, (str, list)) or not (salt is None or isinstance(salt, str)):
        raise InvalidSpec(f"prompt={shown(prompt)}; give a text or token ids, and as cache_salt a text")
    named = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    return named if salt is None else {**named, "cache_salt": salt}


def _as_json(encoded: Encoded) -> dict[str, Any]:
    """Return the pooled output as JSON values: its task, and base64 of a safetensors file.

    Raises:
        InvalidRequest: it is too large for an answer.
    """
    if encoded.data.nbytes > MOST_DATA:
        raise InvalidRequest(
            f"task {encoded.task!r} gives {encoded.data.nbytes:,} bytes for this prompt, and an answer holds "
            f"{MOST_DATA:,}; give a shorter prompt, or open the model in your own process"
        )
    return {"task": encoded.task, "data": base64.b64encode(save({"data": encoded.data.contiguous()})).decode()}
