"""What is cancelled on a connection leaves nothing open, here or at the server, at whatever moment."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from steercap import Add, SteeringSpec
from steercap.client import RemoteModel
from steercap.client.rows import RemoteRows
from steercap.client.uploads import VECTORS, Uploads
from steercap.concurrency.loops import each_of, scoped, scoped_steps
from steercap.errors import CaptureIncomplete, InvalidRequest, InvalidSpec, ModelClosed, ServerFailure
from steercap.sync import RemoteModel as Blocking

#: Connections that wait unused while a request is cancelled: httpx closes them one after the other, each in a step.
IDLE = 6
#: More steps of the event loop than any of the requests takes.
STEPS = 200
SOON = 30.0

MODEL = {
    "model": "there/m",
    "revision": None,
    "dtype": "float32",
    "num_layers": 2,
    "identity": {"name": "m"},
    "hidden_size": 8,
    "points": [],
    "engine": {},
}
EVENT = b'data: {"choices": [{"index": 0, "text": "a", "token_ids": [1], "prompt_token_ids": [3]}]}\n\n'


class Server:
    """A server of real sockets, in this event loop, that answers when it is told to.

    Attributes:
        open: connections that no side has closed.
        waiting: those with a request on "/held", which `answer` answers.
    """

    def __init__(self) -> None:
        self.open: set[asyncio.StreamWriter] = set()
        self.waiting: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = head.partition("content-length: ")[2].partition("\r\n")[0]
                body = await reader.readexactly(int(length or 0))
                self._reply(writer, head.split()[1], body)
        self.open.discard(writer)
        writer.close()

    def _reply(self, writer: asyncio.StreamWriter, path: str, body: bytes) -> None:
        if path == "/held":
            self.waiting.append(writer)
        elif b'"stream":true' in body.replace(b" ", b""):
            parts = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (EVENT, EVENT))
            ends = b"" if b"for ever" in body else b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + parts + ends)
        else:
            said = {"/v1/models": {"data": [{"id": "m"}]}, "/v1/steercap/model": MODEL}.get(path, {})
            written(writer, "200 OK", json.dumps(said))

    def answer(self, status: str) -> None:
        """Answer the requests that wait, all in one step."""
        for writer in self.waiting:
            written(writer, status, json.dumps({"error": "no"}))
        self.waiting.clear()

    async def hang_up(self) -> None:
        """Close the connections on which no request waits; clients see it at their next request."""
        gone = self.open - {*self.waiting}
        for writer in gone:
            writer.close()
        for writer in gone:
            await writer.wait_closed()


def written(writer: asyncio.StreamWriter, status: str, body: str) -> None:
    writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON):
        while not holds():
            await asyncio.sleep(0.001)


def held(model: RemoteModel) -> asyncio.Task[Any]:
    """A request that the server does not answer until it is told to."""
    return asyncio.ensure_future(model.connection.run(lambda: model.connection.ask("GET", "/held")))


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Server, RemoteModel]]:
    """A server, and a model connected to it."""
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        # To read all certificates of authorities takes longer than what is tested here.
        async with RemoteModel(url, transport=httpx.AsyncHTTPTransport(verify=False)) as model:
            yield server, model
        await until(lambda: not server.open)
    finally:
        listening.close()


async def idle(server: Server, model: RemoteModel) -> None:
    """Leave some unused connections in the model's pool."""
    asked = [held(model) for _ in range(IDLE)]
    await until(lambda: len(server.waiting) == IDLE)
    server.answer("200 OK")
    await asyncio.gather(*asked)


async def stepped(task: asyncio.Task[Any], steps: int) -> bool:
    """Cancel a task after some steps of the event loop; False if it had ended by then."""
    for _ in range(steps):
        await asyncio.sleep(0)
    ran = task.cancel()
    await asyncio.wait([task], timeout=SOON)
    assert task.done(), "a cancelled request ends at once"
    return ran


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """No socket and no transport is dropped unclosed in the block, and no task of it runs on."""
    gc.collect()
    before = asyncio.all_tasks()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(one.message) for one in found if issubclass(one.category, ResourceWarning)] == []
    await until(lambda: asyncio.all_tasks() <= before)


async def ask(model: RemoteModel) -> None:
    await model.connection.run(lambda: model.connection.ask("GET", "/"))


async def read_stream(model: RemoteModel, prompt: str = "a") -> None:
    assert [chunk.text async for chunk in model.stream(prompt)] == ["a", "a", ""]


async def download(model: RemoteModel) -> None:
    rows = RemoteRows(model.connection, "/", 3, "", (), ())
    assert [type(one) for one in await rows.collect([rows])] == [CaptureIncomplete]


@pytest.mark.parametrize("work", [ask, read_stream, download])
async def test_a_request_cancelled_at_any_step_drops_no_connection(
    work: Callable[[RemoteModel], Awaitable[None]],
) -> None:
    """Also none of those that httpx closes meanwhile since the server has hung up on them."""
    async with nothing_left(), connected() as (server, model):
        for steps in range(STEPS):
            await idle(server, model)
            await server.hang_up()
            if not await stepped(asyncio.ensure_future(work(model)), steps):
                break
            await work(model)
    assert 5 < steps < STEPS - 1


async def test_two_errors_at_once_drop_no_connection() -> None:
    """The first that is raised cancels the other, which may have its own by then and be closing what is unused."""
    async with nothing_left(), connected() as (server, model):
        await idle(server, model)
        connection = model.connection
        refused = connection.run(lambda: each_of(["/held"] * 2, lambda path: connection.ask("GET", path), 2))
        asked = asyncio.ensure_future(refused)
        await until(lambda: len(server.waiting) == 2)
        await server.hang_up()
        server.answer("400 Bad Request")
        with pytest.raises(InvalidRequest, match="no"):
            await asked


async def test_what_is_cancelled_ends_at_the_server() -> None:
    """A request without an answer, and a stream that goes on: the server sees at once that nobody listens."""
    async with nothing_left(), connected() as (server, model):
        await ask(model)
        (kept,) = server.open
        waits = held(model)
        await until(lambda: server.waiting == [kept])
        waits.cancel("enough")
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await waits
        await until(lambda: not server.open)

        reads = asyncio.ensure_future(read_stream(model, "for ever"))
        await until(lambda: bool(server.open))
        await stepped(reads, STEPS)
        await until(lambda: not server.open)

        async with aclosing(model.stream("for ever")) as chunks:
            assert (await anext(chunks)).text == "a"
        await until(lambda: not server.open)


@pytest.mark.parametrize("work", [ask, read_stream])
async def test_a_model_closed_at_any_step_of_a_request_drops_no_connection(work) -> None:
    async with nothing_left():
        for steps in range(STEPS):
            async with connected() as (server, model):
                await idle(server, model)
                await server.hang_up()
                asked = asyncio.ensure_future(work(model))
                for _ in range(steps):
                    await asyncio.sleep(0)
                if ended := asked.done():
                    break
                await model.aclose()
                with suppress(ModelClosed):
                    await asked
    assert ended


async def test_a_close_that_is_cancelled_drops_no_connection() -> None:
    async with nothing_left():
        for steps in range(STEPS):
            async with connected() as (server, model):
                await idle(server, model)
                if not await stepped(asyncio.ensure_future(model.aclose()), steps):
                    break
    assert IDLE < steps < STEPS - 1


async def test_errors_and_values_of_what_is_scoped_are_its_own() -> None:
    """Also after a cancellation that came too late: it is raised, and the value or the error is dropped in silence."""

    async def one(value: Any) -> Any:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        if isinstance(value, BaseException):
            raise value
        return value

    async with nothing_left():
        assert await scoped(lambda: one(3)) == 3
        with pytest.raises(ModelClosed, match="gone"):
            await scoped(lambda: one(ModelClosed("gone")))
        for value in (3, ModelClosed("gone")):
            task = asyncio.ensure_future(scoped(lambda value=value: one(value)))
            await asyncio.sleep(0)
            task.cancel("enough")
            with pytest.raises(asyncio.CancelledError, match="enough"):
                await task
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await scoped(asyncio.Event().wait)

        async def steps(last: BaseException | None) -> AsyncGenerator[int, None]:
            try:
                yield 1
                if last is not None:
                    raise last
            finally:
                ended.append(last)

        ended: list[BaseException | None] = []
        assert [one async for one in scoped_steps(steps(None))] == [1]
        with pytest.raises(ModelClosed, match="gone"):
            _ = [one async for one in scoped_steps(steps(ModelClosed("gone")))]
        async with aclosing(scoped_steps(steps(None))) as left:
            assert await anext(left) == 1
        assert list(map(type, ended)) == [type(None), ModelClosed, type(None)]


class Closing(Server):
    """A server that closes a connection when it is asked for "/" on it once more, as if it had been idle for too long."""

    def _reply(self, writer: asyncio.StreamWriter, path: str, body: bytes) -> None:
        if path == "/" and writer in self.waiting:
            writer.transport.abort()
            return
        if path == "/":
            self.waiting.append(writer)
        super()._reply(writer, path, body)


async def test_a_connection_that_its_server_may_close_is_not_used_again(monkeypatch) -> None:
    """Servers close what was idle for five seconds; a request that is sent in that moment is lost."""
    listening = await asyncio.start_server(Closing().serve, "127.0.0.1", 0)
    try:
        async with RemoteModel(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}") as model:
            for later in (0.0, 3.0, 6.0):
                clock = SimpleNamespace(monotonic=lambda later=later: time.monotonic() + later)
                monkeypatch.setattr("httpcore._async.http11.time", clock)
                await ask(model)
    finally:
        listening.close()


async def test_a_stream_ends_in_an_error_when_its_connection_is_closed(caplog) -> None:
    """While it waits for the server, and between two chunks, with further ones here; no loop has to clean up."""
    caplog.set_level("ERROR", "asyncio")
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"

    async def ways(prompt: str) -> list[Exception]:
        model = RemoteModel(url, transport=httpx.AsyncHTTPTransport(verify=False))
        begun, going = asyncio.Event(), asyncio.Event()

        async def read(*, pausing: bool) -> None:
            async for _ in model.stream(prompt, steering=None):
                if pausing:
                    begun.set()
                    await going.wait()

        async with model:
            reading = [asyncio.ensure_future(read(pausing=pausing)) for pausing in (True, False)]
            async with asyncio.timeout(SOON):
                await begun.wait()
            await asyncio.sleep(0.1)
        going.set()
        return await asyncio.gather(*reading, return_exceptions=True)

    def blocking() -> Exception | None:
        model, begun, going = Blocking(url), threading.Event(), threading.Event()
        found: list[BaseException | None] = []

        def read() -> None:
            try:
                for _ in model.stream("for ever", steering=None):
                    begun.set()
                    going.wait(SOON)
                found.append(None)
            except ModelClosed as error:
                found.append(error)

        with model:
            reader = threading.Thread(target=read)
            reader.start()
            assert begun.wait(SOON)
        going.set()
        reader.join(SOON)
        return found[0]

    paused, waiting = await ways("for ever")
    assert type(paused) is type(waiting) is ModelClosed
    paused, _ = await ways("soon over")
    assert type(paused) is ModelClosed
    for _ in range(10):  # generators are closed in any order
        assert type(await asyncio.to_thread(blocking)) is ModelClosed
    await until(lambda: not server.open)
    gc.collect()
    assert not caplog.records
    listening.close()


async def test_starts_at_once_are_one() -> None:
    """Of a server that cannot be reached, each says so; of one that can, one asks; a close in between ends them."""
    nowhere = RemoteModel("http://127.0.0.1:1", transport=httpx.AsyncHTTPTransport(verify=False))
    failed = await asyncio.gather(nowhere.start(), nowhere.start(), return_exceptions=True)
    assert [type(error) for error in failed] == [ServerFailure] * 2
    await nowhere.aclose()
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    for steps in range(0, 90, 3):
        model = RemoteModel(url, transport=httpx.AsyncHTTPTransport(verify=False))
        first, second = (asyncio.create_task(model.start()) for _ in range(2))
        await stepped(first, steps)
        await second
        await ask(model)
        await model.aclose()
        model = RemoteModel(url, transport=httpx.AsyncHTTPTransport(verify=False))
        first = asyncio.create_task(model.start())
        for _ in range(steps):
            await asyncio.sleep(0)
        await model.aclose()
        await asyncio.wait([first], timeout=SOON)
        assert isinstance(first.exception(), (ModelClosed, type(None)))
    await until(lambda: not server.open)
    listening.close()


async def test_a_start_that_is_tried_again_at_once_is_one_with_that_which_waits() -> None:
    """The first one's failure lets the second begin, and the first one's next try waits for it."""
    server, opened = Server(), 0
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"

    class OnceAway(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            nonlocal opened
            opened += 1
            await asyncio.sleep(0)
            if opened == 1:
                raise httpx.ConnectError("away")
            return await super().handle_async_request(request)

    model = RemoteModel(url, transport=OnceAway(verify=False))

    async def patient() -> None:
        try:
            await model.start()
        except ServerFailure:
            await model.start()

    await asyncio.gather(patient(), patient(), patient())
    asked = opened - 1
    await ask(model)
    await model.aclose()
    alone = RemoteModel(url, transport=OnceAway(verify=False))
    opened = 1
    await alone.start()
    assert asked == opened - 1
    await alone.aclose()
    await until(lambda: not server.open)
    listening.close()


async def test_an_upload_that_the_server_lost_is_replaced_once() -> None:
    """Two use it and are refused; in between a third sends it again, and that one is used from then on."""
    sent: list[str] = []
    held: set[str] = set()

    async def put(_method: str, path: str, **_: Any) -> None:
        sent.append(path)

    uploads = Uploads(SimpleNamespace(ask=put, hold=held.add, let_go=held.discard))
    content = SteeringSpec(Add(torch.ones(4), layer=0))

    @asynccontextmanager
    async def refused() -> AsyncIterator[str]:
        with suppress(InvalidSpec):
            async with uploads.named(content) as name:
                yield name
                raise InvalidSpec(f"the server has no {name}")

    async with refused() as first:
        async with refused() as same:
            assert same == first
        async with uploads.named(content) as second:
            assert second != first
    async with uploads.named(content) as third:
        assert third == second
    assert sent == [f"{VECTORS}/{first}", f"{VECTORS}/{second}"]
    assert held == {f"{VECTORS}/{second}"}


async def test_an_upload_that_is_cancelled_is_deleted_at_the_end() -> None:
    """The server may have it by then."""
    sent, held = asyncio.Event(), []

    async def put(*_: Any, **__: Any) -> None:
        sent.set()
        await asyncio.Event().wait()

    uploads = Uploads(SimpleNamespace(ask=put, hold=held.append))

    async def upload() -> None:
        async with uploads.named(SteeringSpec(Add(torch.ones(4), layer=0))):
            pass

    task = asyncio.create_task(upload())
    async with asyncio.timeout(SOON):
        await sent.wait()
    task.cancel()
    await asyncio.wait([task])
    assert len(held) == 1
