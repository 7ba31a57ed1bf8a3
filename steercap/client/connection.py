"""HTTP connection to a server: requests and answers, with the server's errors raised as the library's own."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from steercap import errors
from steercap.client.compiling import RemoteEngine
from steercap.concurrency.loops import OwnerLoop, scoped, scoped_steps, within
from steercap.core.extras import extra
from steercap.core.protocols import AWAITED
from steercap.core.schema import PointSchema
from steercap.core.spec import Point
from steercap.core.values import choices, shown
from steercap.errors import CaptureMemoryFull, InvalidRequest, InvalidSetting, ModelClosed, ServerFailure, SteercapError
from steercap.files.warm import SCHEME

if TYPE_CHECKING:
    import httpx

Value = TypeVar("Value")

#: Maximum seconds for opening a connection, and for deletions on the server when the connection is closed.
CONNECT_SECONDS: Final = 10.0
CLOSE_SECONDS: Final = 5.0
#: Seconds for which an idle TCP connection is kept: well below the five after which uvicorn closes it; a request could
#: be sent in that very moment.
IDLE_SECONDS: Final = 2.0
#: Maximum number of concurrent requests of a call; further ones wait on the client, in order.
AT_ONCE: Final = 256
#: Header of an error answer that has the name of the steercap error class.
ERROR_HEADER: Final = "x-steercap-error"
#: Base URL of requests over a Unix socket, whose host is ignored.
BY_SOCKET: Final = "http://localhost"
#: What vLLM does to the texts of most models, see `VllmEngine.texts`; its completions do it for all.
PLAIN: Final[Mapping[str, bool]] = {"add_special_tokens": True, "do_lower_case": False}
_BY_STATUS: Final[Mapping[int, type[SteercapError]]] = {
    400: InvalidRequest,
    404: InvalidRequest,
    413: InvalidRequest,
    422: InvalidRequest,
    429: CaptureMemoryFull,
}


@dataclass(frozen=True)
class Described:
    """The server's description of its model.

    Args:
        name: name of the model in requests: the one asked for, or the first that the server lists.
        model: path of the model, or name on the hub.
        context: maximum number of tokens of a prompt and its reply together, None if the server does not report it.
        num_layers, hidden_size, points, origin, identity, generation_config: as of `SteerModel`.
        tokenizer: name, revision and digests of the tokenizer, see `chats.tokenizer_here`; as "variables" the arguments
            that its chat template reads, separated by spaces, if they are known.
        texts: what vLLM does to texts, see `VllmEngine.texts`; `PLAIN` if the server does not report it.
        engine: engine properties that specs are compiled with, None if the server does not report them.
    """

    name: str
    model: str
    context: int | None
    num_layers: int
    hidden_size: int
    points: Mapping[Point, PointSchema]
    origin: Mapping[str, str]
    identity: Mapping[str, str]
    generation_config: Mapping[str, Any]
    tokenizer: Mapping[str, str]
    engine: RemoteEngine | None
    texts: Mapping[str, bool]


class Connection:
    """Connection to one server, used in one event loop.

    Args:
        url: address of the server, with or without "/v1"; for a Unix socket "unix:" and its path, or the path.
        api_key: API key, or None.
        name: name of the model in requests, None for the first that the server lists.
        timeout: maximum seconds of the server's silence; None for no limit.
        transport: httpx transport to use instead of the network, or None.

    Attributes:
        url: address of the server, without "/v1".
        socket: path of the server's Unix socket, "" if it has none.
        running: tasks that use the connection; cancelled when it is closed.
        call_style: async or sync style of the code that error messages show.

    Raises:
        InvalidSetting: `url` has none of these forms.
    """

    def __init__(self, url: str, api_key: str | None, name: str | None, timeout: float | None, transport: Any) -> None:
        if not isinstance(url, str) or not url.startswith(("http://", "https://", SCHEME, "/")):
            raise InvalidSetting(
                f"url={shown(url)}; give that of a server, such as 'http://127.0.0.1:8000', or 'unix:' and the path of "
                "a socket"
            )
        self.socket = url.removeprefix(SCHEME) if url.startswith((SCHEME, "/")) else ""
        self.url = f"{SCHEME}{self.socket}" if self.socket else url.rstrip("/").removesuffix("/v1")
        self.api_key = api_key
        self.running: set[asyncio.Task[Any]] = set()
        self.call_style = AWAITED
        self._name = name
        self._timeout = timeout
        self._transport = transport
        self._home: OwnerLoop | None = None
        self._starting = asyncio.Lock()
        self._http: httpx.AsyncClient | None = None
        self._broken: type[Exception] = OSError  # httpx's own, once it is imported
        self._described: Described | None = None
        self._held: set[str] = set()
        self._freeing: set[asyncio.Task[None]] = set()
        self._streams: set[AsyncGenerator[Any, None]] = set()
        self._closed = False

    # Life

    async def start(self) -> None:
        """Open the connection and ask the server for its models. Idempotent.

        Raises:
            MissingExtra: httpx is not installed.
            ServerFailure: the server cannot be reached, refuses the key, or is not `steercap serve`.
            InvalidRequest: the server has no model of that name.
            ModelClosed: the connection was closed.
            WrongEventLoop: it was started in another event loop.
        """
        self._require_not_closed()
        if self._home is None:
            self._home, self._starting = OwnerLoop("this connection"), asyncio.Lock()
        self._home.require()
        async with (starting := self._starting):
            if starting is not self._starting:  # the previous holder failed, and another start has begun
                await self.start()
                return
            self._require_not_closed()
            self._home = self._home or OwnerLoop("this connection")  # the previous holder of the lock may have failed
            try:
                if self._described is None:
                    await within(self.running, self._open, self._ended)
            finally:
                if self._described is None and not self._closed:
                    self._home = None

    async def _open(self) -> None:
        """Open the HTTP client and ask the server for its description; if that fails, close the client."""
        with extra("client"):
            import httpx

        self._broken = httpx.TransportError
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        limits = httpx.Limits(max_connections=None, keepalive_expiry=IDLE_SECONDS)
        transport = self._transport
        if self.socket:
            self._require_own_socket()
            transport = transport or httpx.AsyncHTTPTransport(uds=self.socket, limits=limits)
        http = self._http = httpx.AsyncClient(
            base_url=BY_SOCKET if self.socket else self.url,
            headers=headers,
            timeout=httpx.Timeout(self._timeout, connect=CONNECT_SECONDS, pool=None),
            limits=limits,
            transport=transport,
        )
        try:
            self._described = await self._describe()
        except BaseException:
            if self._http is http:  # else closing the connection closes it
                self._http = None
                await scoped(http.aclose)
            raise

    def _require_own_socket(self) -> None:
        """Check that this user owns the server's socket, so that prompts are not sent to another user's process.

        Raises:
            ServerFailure: the socket does not exist, or another user owns it.
        """
        try:
            owner = Path(self.socket).stat().st_uid
        except OSError as error:
            raise ServerFailure(
                f"{self.url} cannot be reached: {error.strerror}; `steercap status` lists engines"
            ) from error
        if owner != os.geteuid():
            raise ServerFailure(
                f"{self.url} belongs to user {owner}, and this process to user {os.geteuid()}; connect to a server of "
                "your own"
            )

    async def _describe(self) -> Described:
        listed = await self.ask("GET", "/v1/models")
        try:
            said = await self.ask("GET", "/v1/steercap/model")
        except InvalidRequest as error:  # 404
            raise ServerFailure(
                f"{self.url} is a server, but not one of steercap: it can neither capture nor steer; start it with "
                "`steercap serve`"
            ) from error
        with self.answering():
            names = {one["id"]: one.get("max_model_len") for one in listed["data"]}
            adapters = [one["id"] for one in listed["data"] if one.get("parent")]
            if self._name is not None and self._name not in names:
                raise InvalidRequest(f"{self.url} has no model {shown(self._name)}; {choices(self._name, names)}")
            points = {
                Point(one.pop("layer"), one.pop("site")): PointSchema(**{**one, "shape": tuple(one["shape"])})
                for one in said["points"]
            }
            name = self._name or next(iter(names))
            origin = {part: str(said[part]) for part in ("revision", "dtype")}
            planned = said.get("compiling")
            identity = dict(said["identity"])
            if name in (variants := dict.fromkeys([*adapters, *said.get("presets", ())]) | said.get("variants", {})):
                identity["variant"] = variants[name] or name  # of an adapter that was loaded later the name alone
            return Described(
                name,
                said["model"],
                names[name] or next(iter(names.values())),  # of an adapter the server does not say it
                said["num_layers"],
                said["hidden_size"],
                points,
                origin,
                identity,
                said.get("generation_config", {}),
                said.get("tokenizer", {}),
                planned and RemoteEngine(planned, points, said["limits"]["unfetched_bytes"] // 2),
                {**PLAIN, **said.get("texts", {})},
            )

    async def aclose(self) -> None:
        """Cancel running tasks, delete this connection's resources on the server, and disconnect. Idempotent."""
        first, self._closed = not self._closed, True
        if self._home is None or not first:
            return
        await self._home.run(self._end, patience=2 * CLOSE_SECONDS)

    async def _end(self) -> None:
        for task in self.running:
            task.cancel()
        for steps in tuple(self._streams):  # those between two steps; the others end with the connection
            with contextlib.suppress(RuntimeError):
                await steps.aclose()
        for path in tuple(self._held):
            self._free_soon(path)
        if self._freeing:
            await asyncio.wait(self._freeing, timeout=CLOSE_SECONDS)
        http, self._http = self._http, None
        if http is not None:
            await scoped(http.aclose)

    def opened(self) -> Described:
        """Return the description of the server's model.

        Raises:
            ModelClosed: the connection was never started, or is closed.
        """
        self._require_not_closed()
        if self._described is None:
            raise ModelClosed(
                "this RemoteModel was never started; use it inside "
                f"`{self.call_style.manager} SteerModel.connect(...) as model:`"
            )
        return self._described

    def here(self) -> Described:
        """Return the description of the server's model, after checking that this is the connection's event loop.

        Raises:
            ModelClosed: as for `opened`.
            WrongEventLoop: it was started in another event loop.
        """
        described = self.opened()
        assert self._home is not None
        self._home.require()
        return described

    async def run(self, work: Callable[[], Awaitable[Value]]) -> Value:
        """Run `work` in this event loop as a task that closing the connection cancels, and return its result.

        Args:
            work: function that returns the awaitable, usually requests to the server.

        Raises:
            ModelClosed: the connection was never started, or was closed, before or meanwhile.
            WrongEventLoop: it was started in another event loop.
        """
        self.here()
        return await within(self.running, work, self._ended)

    def _ended(self) -> ModelClosed | None:
        return ModelClosed("the connection was closed while this request ran") if self._closed else None

    def _require_open(self) -> None:
        if error := self._ended():
            raise error

    def _require_not_closed(self) -> None:
        if self._closed:
            raise ModelClosed(
                "this RemoteModel is closed; use it inside "
                f"`{self.call_style.manager} SteerModel.connect(...) as model:`"
            )

    # Requests

    async def ask(self, method: str, path: str, **content: Any) -> Any:
        """Send an HTTP request and return the decoded JSON of the answer.

        Args:
            method, path: HTTP method, and path on the server.
            **content: arguments of httpx for the body, such as `json=`.

        Raises:
            ServerFailure: the server cannot be reached, or the answer is malformed.
            SteercapError: the server's error, of the class that it names.
        """

        async def exchange() -> Any:
            async with self.answer(method, path, **content) as found:
                await found.aread()
                with self.answering():
                    return found.json()

        return await scoped(exchange)

    @contextlib.asynccontextmanager
    async def answer(self, method: str, path: str, **content: Any) -> AsyncIterator[httpx.Response]:
        """Send an HTTP request and yield the response, its body unread; enter it in `scoped` or `scoped_steps`.

        Args:
            method, path, **content: as for `ask`.

        Raises:
            The errors of `ask`.
        """
        if self._http is None:
            self._require_not_closed()
        assert self._http is not None
        try:
            request = self._http.build_request(method, path, **content)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(
                f"the request cannot be sent as JSON: {error}; NaN, infinity and halves of surrogate pairs cannot"
            ) from error
        try:
            async with contextlib.aclosing(await self._http.send(request, stream=True)) as found:
                if found.status_code >= 400:
                    await found.aread()
                    raise self._error_of(found)
                yield found
        except self._broken as error:
            if ended := self._ended():
                raise ended from error
            raise ServerFailure(
                f"{self.url} cannot be reached, or the connection broke: {type(error).__name__}: {error}; is `steercap "
                "serve` running there? The request was not sent again"
            ) from error

    async def stepped(self, steps: AsyncGenerator[Value, None]) -> AsyncGenerator[Value, None]:
        """Yield the values of a generator that reads an answer, each step in `scoped`; closing the connection ends it.

        Raises:
            ModelClosed: the connection was closed before the last value.
        """
        found = scoped_steps(steps)
        self._streams.add(found)
        try:
            async for value in found:
                yield value
                self._require_open()
            self._require_open()
        finally:
            self._streams.discard(found)
            with contextlib.suppress(RuntimeError):  # closing the connection closes it at this moment
                await found.aclose()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Raise `ServerFailure` in place of errors in parsing an answer inside the block.

        Raises:
            ServerFailure: the answer does not have the fields that this version of steercap expects.
        """
        try:
            yield
        except SteercapError:
            raise
        except (LookupError, TypeError, ValueError, StopIteration) as error:
            raise ServerFailure(
                f"{self.url} does not answer as this version of steercap expects: {type(error).__name__}: {error}; "
                "use the same version on both sides"
            ) from error

    def _error_of(self, response: httpx.Response) -> SteercapError:
        try:
            body = response.json()
        except ValueError:
            body = response.text[:200]
        return self.error_from_answer(response.status_code, body, response.headers.get(ERROR_HEADER, ""))

    def error_from_answer(self, status: int, body: Any, name: str) -> SteercapError:
        """Return the error that an answer describes.

        Args:
            status: HTTP status.
            body: decoded body of the answer.
            name: name of the steercap error class, "" if the server gave none.
        """
        said = body.get("error", body.get("detail", body)) if isinstance(body, Mapping) else body
        message = str(said.get("message", said) if isinstance(said, Mapping) else said)
        message = message.removesuffix(" (parameter=steercap)")
        if status in {401, 403}:
            return ServerFailure(
                f"{self.url} refuses the API key; give the right one as SteerModel.connect(url, api_key=...)"
            )
        kind = getattr(errors, name, None) if name else None
        if isinstance(kind, type) and issubclass(kind, SteercapError):
            return kind(message)
        if status in _BY_STATUS:
            return _BY_STATUS[status](message)
        return ServerFailure(f"{self.url} answered {status}: {message}")

    # Resources on the server

    def hold(self, path: str) -> None:
        """Register the path of a resource on the server, to be deleted at the latest when the connection is closed."""
        self._held.add(path)

    def let_go(self, path: str) -> None:
        """Schedule the deletion of a registered resource; safe from any thread, at any moment, and does not wait."""
        if self._home is not None and path in self._held:
            self._home.call(lambda: self._free_soon(path))

    def _free_soon(self, path: str) -> None:
        if path not in self._held:
            return
        self._held.discard(path)
        task = asyncio.ensure_future(self._free(path))
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)

    async def _free(self, path: str) -> None:
        if self._http is None:
            return
        # Failure is harmless: the resource may be gone already, and it has a time to live.
        with contextlib.suppress(SteercapError):
            await self.ask("DELETE", path)

    async def free(self, path: str) -> None:
        """Delete the resource at a URL path of the server, if it was registered here, and wait for the answer."""
        if path in self._held:
            self._held.discard(path)
            await self._free(path)

    async def freed(self) -> None:
        """Wait until all scheduled deletions are done."""
        await asyncio.sleep(0)  # what was let go of in this loop begins
        while self._freeing:
            await asyncio.wait(tuple(self._freeing))


@dataclass(frozen=True)
class RemoteServing:
    """The connection and the client's copy of the server's engine, in place of a local model's `Serving`."""

    connection: Connection

    def here(self) -> RemoteEngine:
        """Return what `opened` returns, after checking that this is the connection's event loop.

        Raises:
            WrongEventLoop: it was started in another event loop.
            The errors of `opened`.
        """
        self.connection.here()
        return self.opened()

    def opened(self) -> RemoteEngine:
        """Return the properties of the server's engine that specs are compiled with.

        Raises:
            ServerFailure: the server does not report them.
            ModelClosed: the connection was never started, or is closed.
        """
        engine = self.connection.opened().engine
        if engine is None:
            raise ServerFailure(f"{self.connection.url} does not say how it reads specs; use one version on both sides")
        return engine

    async def run(self, work: Callable[[], Awaitable[Value]]) -> Value:
        """Run `work` as a task that closing the connection cancels; see `Connection.run`."""
        return await self.connection.run(work)
