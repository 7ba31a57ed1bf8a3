"""Sketches whose statistics are at a server: opened there, joined by requests, and read as files."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from steercap.captures.sketch import Sketch
from steercap.client.asks import capture_asked
from steercap.client.connection import Connection, RemoteServing
from steercap.client.rows import downloaded
from steercap.core.spec import CaptureSpec, Point
from steercap.engine.sketching import Book
from steercap.errors import ServerFailure, SketchIncomplete
from steercap.requests.sketching import RunningSketch, book_of

_PATH: Final = "/v1/steercap/sketches"


@dataclass(frozen=True)
class ServerSketch:
    """Source of one sketch that is at a server.

    Args:
        connection: connection to the server.
        path: path of the sketch there.
        turn: lock held while its file is fetched: the server sends one at a time.
    """

    connection: Connection
    path: str
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def num_layers(self) -> int:
        return self.connection.opened().num_layers

    async def fetch(self, sketch: RunningSketch, points: Sequence[Point]) -> Sketch:
        counted = sketch.requests, sketch.rows
        numbers = ",".join(str(sketch.points.index(point)) for point in points)

        async def read() -> Sketch:
            with tempfile.TemporaryDirectory(prefix="steercap-sketch-") as folder:
                path = Path(folder, "it.safetensors")
                async with self.turn:
                    await downloaded(self.connection, f"{self.path}?points={numbers}", path)
                return await asyncio.to_thread(Sketch.load, path)

        found = await self.connection.run(read)
        asked = sketch.kind, sketch.size, tuple(points), sketch.tokens, sketch.spec.before_edits
        if (found.kind, found.size, found.points, found.tokens, found.before_edits) != asked:
            raise ServerFailure(f"{self.connection.url} sent {found!r} in place of {sketch!r}; please report this")
        if found.requests < counted[0] or found.rows < counted[1]:
            raise SketchIncomplete(
                f"{self.connection.url} sent a sketch of {found.rows} rows of {found.requests} requests, after it had "
                f"counted {counted[1]} of {counted[0]}; begin another one"
            )
        return found

    async def close(self, book: Book) -> None:
        if not book.closed:
            book.closed = True
            self.connection.let_go(self.path)
            await self.connection.run(self.connection.freed)


async def begun(connection: Connection, kind: str, size: Any, spec: CaptureSpec) -> RunningSketch:
    """Open a sketch at a server.

    Raises:
        UnknownName, InvalidSpec, PointNotArmed: an argument is wrong.
        PointSplit, SketchMemoryFull: as for a local model.
        ServerFailure: the server cannot be reached.
    """
    engine, book = RemoteServing(connection).here(), book_of("", kind, size, {})
    points = engine.compiler.captured(spec)[0]
    rows = {name: value for name, value in capture_asked(spec, None).items() if name != "codec"}
    body = {"kind": kind, "size": book.size or None, **rows}
    said = await connection.run(lambda: connection.ask("POST", _PATH, json=body))
    with connection.answering():
        book.name, there = str(said["id"]), tuple(Point(*point) for point in said["points"])
    path = f"{_PATH}/{book.name}"
    connection.hold(path)
    if there != points:
        raise ServerFailure(f"{connection.url} sketches {', '.join(map(str, there))}; use one version on both sides")
    book.points = {point: number for number, point in enumerate(points)}
    return RunningSketch(book, spec, ServerSketch(connection, path))


def count(sketches: Sequence[RunningSketch], results: Sequence[Mapping[str, Any]], url: str) -> None:
    """Take over the counts of sketches from the results of a request that joined them.

    Raises:
        SketchIncomplete: the server does not confirm that the request has entered each of them.
    """
    for book in (sketch.book for sketch in sketches):
        said = [one.get("sketches", {}).get(book.name) for one in results]
        if not said or not all(said):
            raise SketchIncomplete(f"{url} does not confirm that the rows of this request entered the sketch")
        book.requests = max(book.requests, *(one["requests"] for one in said))
        book.rows = max(book.rows, *(one["rows"] for one in said))
