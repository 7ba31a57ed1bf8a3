"""Frames between client and workers: versions, bounds, and what damaged or hostile ones can do, which is nothing."""

from __future__ import annotations

import random
import resource

import pytest
from support.frames import mangled, random_of
from support.wire import AnyWorker, fuzz

from steercap.core.framing import HEADER, MOST_BYTES, VERSION
from steercap.core.messages import (
    Answer,
    Attach,
    Call,
    Failed,
    GetStats,
    LineRange,
    Owner,
    Read,
    decode_answer,
    decode_call,
    encode,
)
from steercap.core.plan import Plan
from steercap.errors import EngineFailure, InvalidFrame, WorkerFailure
from steercap.worker.memory import WireReader

READERS = (decode_call, decode_answer, Plan.decode)
FRAMES = (encode(Call((), GetStats())), encode(Failed("no")), Plan("a", 1, 2).encode())


@pytest.mark.parametrize(("reads", "frame"), zip(READERS, FRAMES, strict=True))
def test_another_version_is_refused_by_name(reads, frame) -> None:
    """Both versions are said, and what to do; what is no frame at all is told from that."""
    reads(frame)
    other = frame[:2] + (VERSION + 1).to_bytes(2, "little") + frame[4:]
    with pytest.raises(InvalidFrame, match=f"version {VERSION + 1} .* reads {VERSION}; install one steercap"):
        reads(other)
    for nothing in (b"", frame[:1], frame[:3], frame[4:], b"PK\x03\x04"):
        with pytest.raises(InvalidFrame, match="not a frame of steercap"):
            reads(nothing)
    with pytest.raises(InvalidFrame, match="expected bytes, got str"):
        reads("text")
    assert issubclass(InvalidFrame, EngineFailure)


def test_a_frame_that_is_too_long_is_not_read() -> None:
    """Its length is looked at first."""
    frame = bytes(MOST_BYTES + 1)  # the system gives zeros that are not resident
    with pytest.raises(InvalidFrame, match="are read"):
        decode_call(frame)


@pytest.mark.parametrize("kind", [Call, Answer, Plan], ids=["questions", "answers", "plans"])
def test_every_field_comes_back_within_its_bounds(kind) -> None:
    """Whatever a field may hold is read as it was written: the bounds refuse nothing that the types allow."""
    rng = random.Random(0)
    for _ in range(300):
        value = random_of(kind, rng)
        if kind is Plan:
            assert Plan.decode(value.encode()) == value
        else:
            assert (decode_call if kind is Call else decode_answer)(encode(value)) == value


@pytest.mark.parametrize(
    "wrong",
    [
        Call((), Attach(-1)),
        Call((), Attach(1 << 61)),
        Call((Owner("a", -1),), GetStats()),
        Call((Owner("a" * 5000, 0),), GetStats()),
        Call((), Read(b"", (LineRange(-1, 1),))),
    ],
    ids=["negative", "too large", "negative in a part", "too long", "negative line"],
)
def test_a_value_out_of_bounds_is_refused(wrong) -> None:
    """With the field's place."""
    with pytest.raises(InvalidFrame, match=r"is damaged: Expected .* at `\$"):
        decode_call(encode(wrong))


def test_damaged_frames_are_refused_or_read_and_take_no_memory() -> None:
    """Lengths of which nothing comes allocate nothing, and nothing but `InvalidFrame` leaves the readers."""
    rng, refused = random.Random(1), 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3000):
        value = random_of(rng.choice((Call, Answer, Plan)), rng)
        frame = value.encode() if isinstance(value, Plan) else encode(value)
        for reads in READERS:
            try:
                reads(mangled(frame, rng))
            except InvalidFrame:
                refused += 1
    assert refused > 5000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "in KiB"


async def test_neither_side_can_be_hurt() -> None:
    """Any question, plan, answer and delivery; honest requests in between are served to the last bit, and nothing stays."""
    assert await fuzz(400, seed=2) == 8


def test_a_plan_that_cannot_be_followed_harms_its_own_request_alone() -> None:
    """Not bytes, not a plan, a plan of another model: the pass goes on, and the next request is right."""
    worker = AnyWorker(random.Random(3))
    longer = Plan("x", 4, 1 << 20).encode()
    for plan in ("text", None, 7, b"", HEADER, HEADER + b"\xdd\xff\xff\xff\xff", longer):
        worker.follow(plan)
        worker.clear()
        worker.serve()


async def test_lines_of_another_length_than_asked_for_are_an_error() -> None:
    """A worker that sends less, or more."""

    async def half(_ranges: object) -> bytes:
        return bytes(96)

    with pytest.raises(WorkerFailure, match="96 bytes of rows came where 128 were asked for"):
        await WireReader(half).read([LineRange(0, 2)])
