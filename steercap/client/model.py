"""The class `RemoteModel`: client of a model that a server has open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from steercap.captures.fetching import fetch_all
from steercap.captures.handle import CaptureHandle
from steercap.captures.stacking import flat
from steercap.client.answers import RemoteAnswers
from steercap.client.chats import templated, tokenised, tokenizer_here
from steercap.client.connection import BY_SOCKET, Connection, RemoteServing
from steercap.client.uploads import VECTORS, Uploads, encoded
from steercap.core.display import sites_by_layers
from steercap.core.extras import extra
from steercap.core.names import require_upload_name
from steercap.core.prompts import checked_special, ids_of_text, is_chat, require_text
from steercap.core.protocols import NonCopyable
from steercap.core.schema import PointSchema
from steercap.core.spec import CaptureSpec, Point
from steercap.errors import ModelClosed
from steercap.requests.calls import Calls
from steercap.requests.context import steered
from steercap.requests.stats import Stats
from steercap.steering.spec import Steering, SteeringSpec

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from steercap.steering.directions import DirectionSet
    from steercap.steering.layers import LayerVectors

#: Advice in the error of an attempted copy.
INSTEAD: Final = "a connection has one owner; connect once more to the same server"
#: Attributes of a SteerModel that a RemoteModel lacks, with advice.
LACKING: Final[Mapping[str, str]] = {
    "checkpoint": "it is on the server's machine; `model` is the name there",
    "factory": "it is the server's model",
    "engine": "it is in the server's process",
    "layer_code": "the server does not report which classes it loaded",
    "proof": "the server does not report the checks of its start",
    "settings": "they are the server's; `stats()` has its limits",
    "unembed": "the server does not run the norm and unembedding separately; open the model with SteerModel",
    "verified": "it is reported for each capture, `handle.receipt.verified`",
}


class RemoteModel(NonCopyable, Calls[CaptureHandle], instead=INSTEAD):
    """Model that `steercap serve` has open, with the methods of a `SteerModel`; made by `SteerModel.connect`.

    `generate`, `chat`, `run`, `read` and `stream` do the same as for a local model, and take the same specs; a field
    that a server does not support is refused by name. Sampling uses vLLM's own defaults, as there, not those of the
    server's configuration. Differences:

    - Captured rows wait at the server until they are fetched, but no longer than its `--unfetched-seconds`.
    - `stream` yields texts and crossings of monitors as they come, and all rows with the last chunk.
    - `run` returns OpenAI's `Completion` as `output`; its log probabilities name tokens by id, "token_id:7", as several
      tokens may have one text.
    - `steering=` may be the name of vectors or of steering on the server.

    Args:
        url: address of the server, such as "http://127.0.0.1:8000", or "unix:" and the path of its Unix socket.
        api_key: API key, if the server requires one.
        model: name of a model, adapter or preset ("smollm2+calm", which steers calls with `steering=None` too) that the
            server lists; the first of these if left out.
        timeout: maximum seconds of the server's silence before an answer; None for no limit.
        transport: httpx transport to use instead of the network, as in tests.

    Raises:
        InvalidSetting: `url` is not an address of these forms.

    Use it as an async context manager, or `await start()` and `await aclose()`. Calls may run concurrently.
    """

    _lacking = LACKING

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float | None = None,
        transport: Any = None,
    ) -> None:
        self.connection = Connection(url, api_key, model, timeout, transport)
        self._uploads = Uploads(self.connection)
        self._backend = RemoteAnswers(self.connection, self._uploads)
        self._tokenizer: Any = None

    # Life

    async def start(self) -> RemoteModel:
        """Open the connection and ask the server for its models.

        Raises:
            MissingExtra: httpx is not installed: `pip install 'steercap[client]'`.
            ServerFailure: the server cannot be reached, refuses the key, or is not `steercap serve`.
            InvalidRequest: the server has no such model.
            ModelClosed: the connection was closed.
            WrongEventLoop: it was started in another event loop.
        """
        await self.connection.start()
        return self

    async def aclose(self) -> None:
        """Cancel running calls, delete this connection's captures and uploads, and disconnect. Idempotent."""
        await self.connection.aclose()

    async def __aenter__(self) -> RemoteModel:
        return await self.start()

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    # Work

    @asynccontextmanager
    async def steered(self, steering: Steering) -> AsyncIterator[SteeringSpec]:
        """Steer every call inside that does not pass `steering=` itself: `async with model.steered(spec): ...`.

        When nested, its edits come after the outer spec's. The first call inside checks that the spec fits the model.

        Args:
            steering: a SteeringSpec, an edit, a LogitBias or LayerVectors, as for `generate`.

        Yields:
            The spec in force, outer ones included.

        Raises:
            InvalidSpec: not a spec.
        """
        self.connection.here()
        with steered(self, steering) as spec:
            yield spec

    async def fetch_captures_batch(self, handles: Sequence[Any]) -> None:
        """Fetch the rows of many handles, several at a time, into the handles.

        Nested lists and None are allowed; handles already fetched are left alone.

        Raises:
            CaptureReleased: a handle was released, or the server no longer has its rows; the others are fetched.
            ServerFailure: the server cannot be reached.
        """
        await fetch_all([handle.lifecycle for handle in flat(handles)])

    async def tokenize(self, text: Any, *, add_special_tokens: bool | None = None) -> list[int]:
        """Return the token ids of a prompt as the model reads it, from the server's tokenizer.

        Args:
            text, add_special_tokens: as for `SteerModel.tokenize`.

        Raises:
            InvalidSpec: neither text, token ids nor a conversation.
            InvalidPrompt: a str that cannot be encoded in UTF-8.
            InvalidRequest: the model has no chat template, or the template refuses the conversation.
        """
        if isinstance(text, str):
            words, special = require_text(text), checked_special(add_special_tokens)
            return await self.connection.run(lambda: tokenised(self.connection, words, special=special))
        if is_chat(text):
            return (await self.connection.run(lambda: templated(self.connection, text, {}, spans=False)))[0]
        return ids_of_text(text)

    async def stats(self) -> Stats:
        """Return the current use of memory and slots of the server's model, by all clients, and the limits."""
        said = await self.connection.run(lambda: self.connection.ask("GET", "/v1/steercap/model"))
        with self.connection.answering():
            return Stats(**said["engine"])

    def identity(self) -> dict[str, str]:
        """Return everything that the model's answers depend on, as `SteerModel.identity` does on the server.

        Returns:
            Strings by name, "" where something is not set. A preset or an adapter also has `variant`, its SHA-256, or
            its name if that is unknown; there is `chat_flags` if the server's flags change how chats are rendered.
        """
        return dict(self.connection.opened().identity)

    async def upload_vectors(self, name: str, content: LayerVectors | DirectionSet | SteeringSpec) -> Mapping[str, Any]:
        """Upload vectors, directions or steering under a name, replacing what has this name; they stay on the server.

        Args:
            name: letters, digits, dots, dashes and underscores.
            content: the vectors, directions or steering; `steering=name` then steers by it.

        Returns:
            The server's description of the upload: kind, layers, norms, bytes.

        Raises:
            InvalidSpec: `name` is not such a name, or `content` is of another type.
            CaptureMemoryFull: the server has no more room for uploads of this API key.
        """
        require_upload_name(name)
        data = encoded(content)
        found: Mapping[str, Any] = await self.connection.run(lambda: self._uploads.put(name, data))
        return found

    async def list_vectors(self) -> list[Mapping[str, Any]]:
        """Return the server's descriptions of named vectors and steering: this API key's, and the operator's."""
        said = await self.connection.run(lambda: self.connection.ask("GET", VECTORS))
        with self.connection.answering():
            return list(said["data"])

    async def delete_vectors(self, name: str) -> None:
        """Delete an upload of this API key from the server.

        Args:
            name: name of the upload.

        Raises:
            InvalidSpec: `name` is not such a name.
            InvalidRequest: this API key has no upload of that name.
        """
        require_upload_name(name)
        await self.connection.run(lambda: self.connection.ask("DELETE", f"{VECTORS}/{name}"))

    def check_capture(self, spec: CaptureSpec) -> tuple[Point, ...]:
        """Check a capture spec against the server's model, without a request; see `SteerModel.check_capture`.

        Args:
            spec: the capture spec.

        Returns:
            The points that it captures, by layer, or in the order of `at`.

        Raises:
            InvalidSpec, LayerOutOfRange, UnknownName, PointNotArmed: the spec does not fit the model.
            ModelClosed: the connection was never started, or is closed.
        """
        return self.serving.opened().compiler.captured(spec)[0]

    # Attributes

    @property
    def serving(self) -> RemoteServing:
        """Client's copy of the server's engine, which plans requests, with the means to run work on the connection."""
        return RemoteServing(self.connection)

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model, read from files on this machine and compared with the digest of the server's.

        Raises:
            ServerFailure: the files are not on this machine, or differ from the server's tokenizer.
        """
        said = self.connection.opened().tokenizer
        if self._tokenizer is None:
            self._tokenizer = tokenizer_here(said, self.url)
        return self._tokenizer

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Content of the checkpoint's generation_config.json, such as its `eos_token_id`; empty if it has none."""
        return self.connection.opened().generation_config

    @property
    def openai(self) -> AsyncOpenAI:
        """OpenAI's own client for the same server, for its other functions: tools, log probabilities, embeddings.

        Each access makes a new one, which the caller must close.
        """
        with extra("client"):
            import httpx
            from openai import AsyncOpenAI

        socket, given = self.connection.socket, self.openai_arguments
        if socket:
            given["http_client"] = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=socket))
        return AsyncOpenAI(**given)

    @property
    def openai_arguments(self) -> dict[str, Any]:
        """Arguments of OpenAI's clients for this server; on a Unix socket add an `http_client` that uses it."""
        self.connection.opened()
        key, host = self.connection.api_key or "none", BY_SOCKET if self.connection.socket else self.url
        return {"base_url": f"{host}/v1", "api_key": key, "max_retries": 0, "timeout": None}

    @property
    def url(self) -> str:
        """Address of the server, without "/v1"; for a Unix socket, "unix:" and its path."""
        return self.connection.url

    @property
    def model(self) -> str:
        """Path or name of the model, as the server opened it."""
        return self.connection.opened().model

    @property
    def served_name(self) -> str:
        """Name of the model in HTTP requests to the server."""
        return self.connection.opened().name

    @property
    def origin(self) -> Mapping[str, str]:
        """Mapping with the model's `revision`, "" if none was asked for, and the `dtype` that it computes in."""
        return self.connection.opened().origin

    @property
    def max_model_len(self) -> int | None:
        """Maximum number of tokens of prompt and answer together; None if the server does not report it."""
        return self.connection.opened().context

    @property
    def num_layers(self) -> int:
        """Number of decoder layers of the model."""
        return self.connection.opened().num_layers

    @property
    def hidden_size(self) -> int:
        """Number of elements of a row of the residual stream; `points` has the shape at every other site."""
        return self.connection.opened().hidden_size

    @property
    def points(self) -> Mapping[Point, PointSchema]:
        """Points that have a tap, layer by layer, with the shape and dtype of their rows."""
        return self.connection.opened().points

    def __repr__(self) -> str:
        try:
            known = self.connection.opened()
        except ModelClosed as error:
            return f"RemoteModel({self.url}, {'closed' if 'closed' in str(error) else 'not started'})"
        size = f"{known.num_layers} layers × {known.hidden_size}, {known.origin.get('dtype', '')}"
        return f"RemoteModel({self.url}, {known.name!r}, open: {size}; taps at {sites_by_layers(known.points)})"
