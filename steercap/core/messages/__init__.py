"""All messages between client and workers: a closed set of msgspec types, tagged with their class names.

Arrays are sent as raw little-endian bytes; rows as line numbers of shared memory, or as bytes where memory cannot be
shared. Nothing is pickled. `core.framing` defines the header and the limits of field sizes.
"""

from __future__ import annotations

from typing import Final

import msgspec

from steercap.core.framing import framed, read
from steercap.core.messages.answers import (
    Answer,
    Attached,
    CapturedRows,
    Chosen,
    Collected,
    Configured,
    Counted,
    Engaged,
    Failed,
    Lines,
    Listening,
    NotCapturing,
    ProjectedRows,
    SAEOpened,
    SketchCommitted,
    SketchOpened,
    SketchPart,
    SteeringRecord,
    SteeringRecords,
    Unembedded,
    Unhooked,
    Unknown,
)
from steercap.core.messages.base import (
    EncoderShape,
    Joining,
    LineRange,
    Loaded,
    Message,
    Owner,
    Placed,
    TableBytes,
    Vectors,
    Wanted,
)
from steercap.core.messages.questions import (
    Attach,
    Call,
    Choose,
    CloseSAE,
    CloseSketch,
    Collect,
    CommitSketch,
    Configure,
    Engage,
    GetStats,
    GetSteeringRecord,
    Listen,
    OpenSAE,
    OpenSketch,
    PrepareSketch,
    Project,
    Question,
    Read,
    ReadSketch,
    Unembed,
)

__all__ = [
    "Answer",
    "Attach",
    "Attached",
    "Call",
    "CapturedRows",
    "Choose",
    "Chosen",
    "CloseSAE",
    "CloseSketch",
    "Collect",
    "Collected",
    "CommitSketch",
    "Configure",
    "Configured",
    "Counted",
    "EncoderShape",
    "Engage",
    "Engaged",
    "Failed",
    "GetStats",
    "GetSteeringRecord",
    "Joining",
    "LineRange",
    "Lines",
    "Listen",
    "Listening",
    "Loaded",
    "Message",
    "NotCapturing",
    "OpenSAE",
    "OpenSketch",
    "Owner",
    "Placed",
    "PrepareSketch",
    "Project",
    "ProjectedRows",
    "Question",
    "Read",
    "ReadSketch",
    "SAEOpened",
    "SketchCommitted",
    "SketchOpened",
    "SketchPart",
    "SteeringRecord",
    "SteeringRecords",
    "TableBytes",
    "Unembed",
    "Unembedded",
    "Unhooked",
    "Unknown",
    "Vectors",
    "Wanted",
    "decode_answer",
    "decode_call",
    "encode",
]

_ENCODER: Final = msgspec.msgpack.Encoder()
_CALLS: Final = msgspec.msgpack.Decoder(Call)
_ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


def encode(message: Message) -> bytes:
    """Encode a message as a frame, with header."""
    return framed(_ENCODER.encode(message))


def decode_call(frame: bytes) -> Call:
    """Decode a client's frame to a call.

    Raises:
        InvalidFrame: the frame is of another version, damaged, or has a value out of bounds.
    """
    found: Call = read(_CALLS, frame, "a question of the client")
    return found


def decode_answer(frame: bytes) -> Answer:
    """Decode a worker's frame to an answer.

    Raises:
        InvalidFrame: the frame is of another version, damaged, or has a value out of bounds.
    """
    found: Answer = read(_ANSWERS, frame, "an answer of a worker")
    return found
