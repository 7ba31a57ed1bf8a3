"""Registry of the SAE encoders on this rank, loaded once from memory that the client shares.

An encoder has 30 MB to several GB: through vLLM's broadcast ring it would take hundreds of frames, and the engine
would stop for each. So the client puts it into anonymous shared memory (`worker.memory`) and sends the path. A
thread checks the memory against the encoder's SHA-256 and copies it to the device, while passes go on; the client
polls until the encoder is loaded. On CPU nothing is copied: the memory lives as long as the encoder.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final, TypeAlias
from weakref import WeakSet

import torch

from steercap.core.messages import CloseSAE, OpenSAE, SAEOpened
from steercap.errors import MemoryNotShared
from steercap.saes.encoder import Encoder, image_bytes
from steercap.worker.arena import Layouts, Reads
from steercap.worker.memory import HEADER_BYTES, SharedSegment

#: Key of an encoder: its SHA-256 digest and the index of the point that it reads.
Key: TypeAlias = tuple[bytes, int]

#: Answers: the encoder is loaded, or this rank does not need it; or it is still being loaded.
LOADED: Final = SAEOpened()
LOADING: Final = SAEOpened(coming=True)


class SAEs:
    """SAE encoders on this rank.

    Args:
        layouts: record layouts, which know the points that this rank keeps.
        device: device of the model and of the encoders.
    """

    def __init__(self, layouts: Layouts, device: torch.device) -> None:
        self._layouts, self._device = layouts, device
        self._held: dict[Key, Encoder] = {}
        self._coming: dict[Key, _LoadingEncoder] = {}
        self._all: WeakSet[Encoder] = WeakSet()  # includes closed ones that running requests still use

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes of all encoders, including those being loaded and closed ones still in use."""
        return sum(encoder.nbytes for encoder in self._all) + sum(one.nbytes for one in self._coming.values())

    def encoders(self, points: Sequence[int], digests: Sequence[bytes]) -> Reads | None:
        """Return (point, encoder), found by SHA-256, for the points that this rank keeps; None if one is not loaded."""
        kept = set(self._layouts.points(points))
        wanted = [(digest, point) for digest, point in zip(digests, points, strict=True) if point in kept]
        if any(key not in self._held for key in wanted):
            return None
        return tuple((point, self._held[digest, point]) for digest, point in wanted)

    def answer(self, question: OpenSAE | CloseSAE) -> SAEOpened:
        """Load an encoder, or report how far its loading is (`OpenSAE`); or free one (`CloseSAE`)."""
        match question:
            case OpenSAE():
                return self._open(question)
            case CloseSAE(digest, point):
                self._held.pop((digest, point), None)
                self._coming.pop((digest, point), None)
                return LOADED

    def _open(self, message: OpenSAE) -> SAEOpened:
        key = message.digest, message.point
        if key in self._held or not self._layouts.points([message.point]):
            return LOADED
        coming = self._coming.get(key)
        if coming is None:
            return self._begin(message)
        if coming.thread.is_alive():
            return LOADING
        del self._coming[key]
        if coming.encoder is None:
            return SAEOpened(refused=coming.reason or "its thread has ended")
        self._held[key] = coming.encoder
        self._all.add(coming.encoder)
        return LOADED

    def _begin(self, message: OpenSAE) -> SAEOpened:
        wanted, used = image_bytes(message.shape), self.nbytes
        if used + wanted > message.most_bytes:
            return SAEOpened(full=f"it needs {wanted:,} bytes, and {used:,} of {message.most_bytes:,} are in use")
        try:
            segment = SharedSegment.open(message.path, message.nonce)
        except MemoryNotShared as error:
            return SAEOpened(unreachable=str(error))
        if len(segment.memory) < HEADER_BYTES + wanted:
            return SAEOpened(refused=f"it needs {wanted:,} bytes, and the client shares {len(segment.memory):,}")
        image = torch.frombuffer(segment.memory, dtype=torch.uint8, count=wanted, offset=HEADER_BYTES)
        try:
            coming = _LoadingEncoder(message, image, self._device)
        except torch.OutOfMemoryError:
            return SAEOpened(full=f"it needs {wanted:,} bytes, more than the device has left")
        self._coming[message.digest, message.point] = coming
        coming.thread.start()
        return LOADING


class _LoadingEncoder:
    """SAE encoder that is being loaded by `thread`; then `encoder` is the result, or `reason` says why it failed.

    Args:
        message: the client's call, with digest and shape.
        image: bytes of the encoder, in memory that the client shares: uint8 [bytes].
        device: device to load the encoder to.

    Raises:
        torch.OutOfMemoryError: the device has no room for it.
    """

    def __init__(self, message: OpenSAE, image: torch.Tensor, device: torch.device) -> None:
        self.encoder: Encoder | None = None
        self.reason = ""
        self.nbytes = len(image)
        self._message, self._image, self._device = message, image, device
        self._there, self._free = image, None
        if device.type == "cuda":
            # Allocated here, for the model's stream, which may still use this memory for something else.
            self._there = torch.empty_like(image, device=device)
            self._free = torch.cuda.current_stream(device).record_event()
        self.thread: Final = threading.Thread(target=self._bring, name="steercap SAE", daemon=True)

    def _bring(self) -> None:
        try:
            with torch.inference_mode():
                self.encoder = self._brought(self._free)
        except Exception as error:  # noqa: BLE001 -- told to the client, who asks until there is an answer
            self.reason = f"{type(error).__name__}: {error}"

    def _brought(self, free: Any) -> Encoder | None:
        if Encoder.read(self._message.shape, self._image).digest() != self._message.digest:
            self.reason = "the client's memory does not hold the SAE that it announced"
            return None
        if free is not None:
            stream = torch.cuda.Stream(self._device)
            stream.wait_event(free)
            with torch.cuda.stream(stream):
                self._there.copy_(self._image)
            stream.synchronize()
        return Encoder.read(self._message.shape, self._there)
