"""What frames and plans may do to those who read them: nothing but be refused, whatever is in them.

A worker without a model is asked anything, and a client is answered anything. Neither may raise what it does not say,
or grow; and a request that runs meanwhile must be served as if nobody else were there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from msgspec.structs import replace
from workers import assemble

from steercap.captures.checks import Expected, received
from steercap.core.messages import (
    Answer,
    Attach,
    Attached,
    Call,
    CapturedRows,
    Collect,
    Collected,
    Configure,
    Configured,
    GetSteeringRecord,
    LineRange,
    OpenSketch,
    Owner,
    Placed,
    SteeringRecord,
    SteeringRecords,
    Unknown,
    Vectors,
    Wanted,
    decode_answer,
    decode_call,
    encode,
)
from steercap.core.plan import CapturePlan, Plan
from steercap.core.program import Blob, Configuration, Entry, Response, SteeringPlan, blob_digest
from steercap.core.receipt import check_edits
from steercap.core.schema import RAW, PointSchema
from steercap.core.spec import Point
from steercap.core.tokens import Range
from steercap.engine.fetching import Fetcher
from steercap.engine.ranks import Rank
from steercap.errors import CaptureError, InvalidFrame, SteeringNotApplied
from steercap.worker.memory import LineReader, Readable
from steercap.worker.runtime import Runtime
from steercap.worker.step import BatchRows
from steercap.worker.taps import Installed, TapSizes
from steercap.worker.taps.host import HostTaps
from support.frames import mangled, random_of

POINTS, WIDTH, TOKENS = 3, 8, 6
SIZES: Final = TapSizes(slots=4, bank_rows=64, entries=8, tokens=1024, accumulators=8, lag=1)
SCHEMA: Final = PointSchema((WIDTH,), "float32")
CAPTURE_BYTES: Final = 1 << 20
#: The most that a random sketch may take.
SKETCH_BYTES: Final = 1 << 20
#: What steers the honest request: its first element is raised by one at the second point.
VECTOR: Final = np.eye(1, WIDTH, dtype=np.float32).tobytes()
CONFIGURATION: Final = Configuration(
    (Entry(0, (1,), 0, 0, response=Response(offset=1.0)),), (Blob(blob_digest(VECTOR, 1), 1),), 1, 0
)
CAPTURE: Final = CapturePlan((0, 1, 2), (Range(0, None),), None, RAW)
STEERING: Final = SteeringPlan(0, CONFIGURATION.digest, CONFIGURATION.digest, ((Range(0, None),),), ())


def partly(rng: random.Random, right: Any) -> Any:
    """What is right, with one to three of its fields at random."""
    found = random_of(type(right), rng)
    names = rng.sample(right.__struct_fields__, rng.randint(1, min(3, len(right.__struct_fields__))))
    return replace(right, **{name: getattr(found, name) for name in names})


class AnyWorker:
    """One rank without a model, which is sent anything.

    Args:
        rng: what is sent.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        taps = HostTaps(Installed(tuple(range(POINTS)), (SCHEMA,) * POINTS, (True,) * POINTS), SIZES)
        names = [f"resid_post[{point}]" for point in range(POINTS)]
        self.runtime = Runtime(taps, names, torch.device("cpu"), longest=1024)
        self.attached = self.ask(Attach(CAPTURE_BYTES))
        self._served = 0

    def ask(self, question: Any, released: Iterable[Owner] = ()) -> Any:
        """An honest question's answer."""
        return decode_answer(self.runtime.answer(encode(Call(tuple(released), question))))

    def send(self, frame: bytes) -> Answer:
        """Any frame's answer.

        Raises:
            AssertionError: it is no frame.
        """
        try:
            return decode_answer(self.runtime.answer(frame))
        except InvalidFrame as error:
            raise AssertionError(f"{frame!r} is answered by what is no frame") from error

    def attack(self) -> None:
        """Send a question, and a plan of a request that runs, both anything."""
        asked = random_of(Call, self._rng)
        if isinstance(asked.question, OpenSketch):
            asked = replace(asked, question=replace(asked.question, most_bytes=SKETCH_BYTES))
        frame = encode(asked)
        self.send(frame if self._rng.random() < 1 / 2 else self._mangled(frame))
        plan = self._plan().encode()
        self.follow(plan if self._rng.random() < 3 / 4 else mangled(plan, self._rng))

    def _plan(self) -> Plan:
        """A plan that is right in some of its fields."""
        key = f"any-{self._rng.randrange(8)}"
        capture = partly(self._rng, CAPTURE)
        steering = partly(self._rng, STEERING)
        whole = Plan(key, 4, TOKENS, 1, *self._rng.choice(((capture, None), (None, steering), (capture, steering))))
        return partly(self._rng, whole) if self._rng.random() < 1 / 4 else whole

    def follow(self, plan: Any) -> None:
        """Run a request with this plan for a few passes, then let it go."""
        name = f"x{self._rng.randrange(1 << 30)}"
        self.runtime.register(name, plan, self._rng.randrange(2))
        for start, count in ((0, 4), (4, 1), (5, 1)):
            self._pass([(name, start, count)])
        self.runtime.end_requests([name])

    def _mangled(self, frame: bytes) -> bytes:
        """A mangled frame that asks for no sketch of any size."""
        found = mangled(frame, self._rng)
        return frame if asks_for_a_sketch(found) else found

    def serve(self) -> None:
        """Serve an honest request, captured and steered.

        Raises:
            AssertionError: a row, its label or its edit is not what it must be.
        """
        self._served += 1
        key = f"honest-{self._served}"
        owner, wanted = Owner(key, 0), Wanted(Owner(key, 0), TOKENS)
        vectors = Vectors(CONFIGURATION.blobs[0].digest, (1,), VECTOR)
        self._place(vectors)
        # Under an identity of its own, as attacks may have tainted the other.
        own = replace(STEERING, identity=hashlib.sha256(key.encode()).digest())
        plan = Plan(key, 4, TOKENS, 1, CAPTURE, own)
        self.runtime.register(key, plan.encode(), 0)
        made = [self._pass([(key, start, count)]) for start, count in ((0, 4), (4, 1), (5, 1))]
        self.runtime.end_requests([key])
        settled = self.ask(GetSteeringRecord((wanted,), (True,)))
        assert isinstance(settled, SteeringRecords), settled
        check_edits(key, plan, CONFIGURATION, TOKENS, [settled.records])
        collected = self.ask(Collect((wanted,)))
        assert isinstance(collected, Collected), collected
        (captured_rows,) = collected.shares
        assert isinstance(captured_rows, CapturedRows), captured_rows
        assert not captured_rows.failure, captured_rows
        arena = self.runtime._arena
        assert arena is not None
        found = assemble(captured_rows, [SCHEMA] * POINTS, Readable(arena.lines, captured_rows.lines))
        for point, rows in enumerate(found):
            assert isinstance(rows, torch.Tensor)
            assert torch.equal(rows, torch.cat([one[point] for one in made])), f"rows of point {point} are wrong"
        self.ask(Collect(()), [owner])

    def _place(self, vectors: Vectors) -> None:
        """Have the honest configuration in its slot: what runs may be in the way of it at first."""
        placed = Placed(0, CONFIGURATION, ((1,),))
        answer = self.ask(Configure((vectors,), (placed,)))
        assert isinstance(answer, Configured), answer
        assert not answer.refused, answer

    def _pass(self, parts: Sequence[tuple[str, int, int]]) -> list[torch.Tensor]:
        """Run a pass; returns the rows of each point behind their taps, float32 [tokens, WIDTH]."""
        names = [name for name, _, _ in parts]
        starts, counts = (np.array([part[at] for part in parts], dtype=np.int64) for at in (1, 2))
        positions = torch.cat([torch.arange(start, start + count) for _, start, count in parts])
        self.runtime.begin_step(BatchRows(names, starts, counts, int(counts.sum()), positions + 7, positions))
        made = []
        for point in range(POINTS):
            rows = torch.full((len(positions), WIDTH), float(point)) + positions[:, None]
            self.runtime.taps.on_tap(rows, None, torch.tensor([point], dtype=torch.int32), 0)
            made.append(rows)
        self.runtime.end_step()
        return made

    def clear(self) -> None:
        """Give everything back that was asked for, as the end of every request would.

        Raises:
            AssertionError: something is held all the same.
        """
        runtime = self.runtime
        kept, steered = list(runtime._kept), list(runtime._steering._records)
        self.ask(Collect(()), {*kept, *steered})
        self._pass([("nobody", 0, 1)])
        arena = runtime._arena
        assert arena is not None
        assert not arena.pages.in_use, f"{arena.pages.in_use} pages are in use"
        assert not runtime._request_table._indices, "a request runs"
        assert not runtime.taps.layouts._used, f"{len(runtime.taps.layouts._used)} layouts are used"


class _Lines(LineReader):
    """Lines of memory that holds anything."""

    def __init__(self, rng: random.Random, lines: int) -> None:
        self._lines = torch.frombuffer(bytearray(rng.randbytes(lines * 64)), dtype=torch.uint8).view(-1, 64)

    async def read(self, ranges: Sequence[LineRange]) -> Readable:
        return Readable(self._lines, tuple(ranges))

    def close(self) -> None:
        return None


class AnyAnswer:
    """A client that is answered anything.

    Args:
        rng: what is answered.
        attached: what the worker is.
    """

    def __init__(self, rng: random.Random, attached: Attached) -> None:
        self._rng = rng
        self._fetcher = Fetcher(1)
        lines = _Lines(rng, attached.pages * attached.page_lines)
        self._ranks = ((Rank(0, attached, lines),),)
        self._armed = tuple(Point(layer, "resid_post") for layer in range(POINTS))
        self._plan = Plan("a", 4, TOKENS, 1, CAPTURE, STEERING)
        self._tokens = tuple(range(7, 7 + TOKENS + 1))

    async def attack(self) -> None:
        """Have any answer decoded, and any delivery fetched and checked.

        Raises:
            AssertionError: rows, or a receipt, come of what cannot be vouched for.
        """
        frame = encode(random_of(Answer, self._rng))
        for one in (frame, mangled(frame, self._rng)):
            try:
                decode_answer(one)
            except InvalidFrame:
                continue
        await self._fetch(self._captured_rows())
        self._settle(random_of(SteeringRecord | Unknown, self._rng))

    def _captured_rows(self) -> CapturedRows:
        """Captured rows that are right in some of its fields."""
        labels = np.arange(TOKENS, dtype=np.int64)
        lines = (LineRange(0, TOKENS * POINTS),)
        positions, token_ids = labels.tobytes(), (labels + 7).tobytes()
        right = CapturedRows(Owner("a", 0), RAW, (0, 1, 2), lines, TOKENS, positions, token_ids, 0, None)
        found: CapturedRows = partly(self._rng, right)
        return found

    async def _fetch(self, captured_rows: CapturedRows) -> None:
        try:
            (delivery,) = await self._fetcher.deliver(self._ranks, [[[captured_rows]]])
            rows, _ = received(Expected("a", self._plan, self._armed, self._tokens), delivery, self._armed)
        except CaptureError:
            return
        shapes = [tuple(one.shape) for one in rows.values() if isinstance(one, torch.Tensor)]
        assert shapes == [(TOKENS, WIDTH)] * POINTS, f"{captured_rows} gives rows of {shapes}"
        labels = (
            np.frombuffer(captured_rows.positions, dtype=np.int64),
            np.frombuffer(captured_rows.token_ids, dtype=np.int64),
        )
        known = np.arange(TOKENS)
        assert not captured_rows.failure, captured_rows
        assert np.array_equal(labels, (known, known + 7)), captured_rows

    def _settle(self, record: SteeringRecord | Unknown) -> None:
        try:
            check_edits("a", self._plan, CONFIGURATION, TOKENS, [[record]])
        except SteeringNotApplied:
            return
        assert isinstance(record, SteeringRecord)
        assert (record.rows, record.primary) == (
            (int(np.unpackbits(np.frombuffer(record.computed, np.uint8)).sum()),),
            True,
        )

    def close(self) -> None:
        """End its threads."""
        self._fetcher.close()


class AnyReader:
    """Whoever reads frames, for fuzzers that make them: the first byte of what is read says who it is.

    Args:
        rng: of frames that are made here.
    """

    def __init__(self, rng: random.Random) -> None:
        self.frames = 0
        self._rng = rng
        self._worker = AnyWorker(rng)
        self._readers = (self._asked, self._worker.follow, self._answered)

    def fresh(self) -> bytes:
        """A frame that is one, behind the byte of who reads it."""
        made = (
            encode(random_of(Call, self._rng)),
            random_of(Plan, self._rng).encode(),
            encode(random_of(Answer, self._rng)),
        )
        who = self._rng.randrange(len(made))
        return bytes((who,)) + made[who]

    def read(self, data: bytes) -> None:
        """Have it read.

        Raises:
            AssertionError: see `AnyWorker`.
        """
        self.frames += 1
        if data:
            self._readers[data[0] % len(self._readers)](data[1:])
        if not self.frames % 1_000:
            self._worker.clear()
            self._worker.serve()

    def _asked(self, frame: bytes) -> None:
        if not asks_for_a_sketch(frame):
            self._worker.send(frame)

    @staticmethod
    def _answered(frame: bytes) -> None:
        with contextlib.suppress(InvalidFrame):
            decode_answer(frame)


def asks_for_a_sketch(frame: bytes) -> bool:
    """Whether a frame does, of any size: what sketches may take is the client's setting, and random ones take all."""
    try:
        return isinstance(decode_call(frame).question, OpenSketch)
    except InvalidFrame:
        return False


#: Files that the client's event loop has.
LOOP_FILES: Final = 2


def open_files() -> int:
    """Files that this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def fuzz(rounds: int, seed: int, *, every: int = 50) -> int:
    """Attack both sides for so many rounds; returns how many honest requests were served meanwhile.

    Args:
        rounds: of one question, one plan, one answer and one delivery.
        seed: of what is sent.
        every: rounds between two honest requests.

    Raises:
        AssertionError: something other than a refusal came of an attack, or something is left of it.
    """
    rng = random.Random(seed)
    worker = AnyWorker(rng)
    client = AnyAnswer(rng, worker.attached)
    files, served = open_files(), 0
    try:
        for number in range(rounds):
            worker.attack()
            await client.attack()
            if number % every == every - 1:
                worker.clear()
                worker.serve()
                served += 1
        worker.clear()
    finally:
        client.close()
    more = open_files() - files
    for _ in range(200):  # other threads of the process may have some open for a moment
        if more <= LOOP_FILES:
            break
        await asyncio.sleep(0.05)
        more = open_files() - files
    assert more <= LOOP_FILES, f"{more} files are left open"
    return served
