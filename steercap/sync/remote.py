"""Model on a server, for blocking callers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from steercap.client import RemoteModel as Awaited
from steercap.client.model import INSTEAD
from steercap.core.extras import extra
from steercap.core.ownership import NonCopyable
from steercap.core.schema import PointSchema
from steercap.core.spec import Point
from steercap.requests.calls import Calls
from steercap.requests.context import steered
from steercap.steering.spec import SteeringSpec
from steercap.sync.bridge import Bridge
from steercap.sync.handle import CaptureHandle
from steercap.sync.twins import Bridged, as_there, blocking, calling, iterating

if TYPE_CHECKING:
    from openai import OpenAI

    from steercap.steering.edits import Edit
    from steercap.steering.logit_bias import LogitBias


class RemoteModel(NonCopyable, Bridged[Awaited], instead=INSTEAD):
    """Model on a server: `steercap.client.RemoteModel` without `await`, with the same arguments.

    Made by `SteerModel.connect`.

    Use it as a context manager, or `start()` and `close()`. Several threads may call it at once.
    """

    @as_there(Awaited)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.awaited = Awaited(*args, **kwargs)
        self.bridge = Bridge(self.awaited, self.awaited.connection)

    def start(self) -> Self:
        """Connect to the server, and read the model's properties.

        Raises:
            The errors of `steercap.client.RemoteModel.start`.
        """
        self.bridge.start()
        return self

    def close(self) -> None:
        """Cancel running calls, let the server free what it holds for this connection, and close it. Idempotent."""
        self.bridge.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.close()

    generate = calling(Calls[CaptureHandle].generate)
    chat = calling(Calls[CaptureHandle].chat)
    run = calling(Calls[CaptureHandle].run)
    read = calling(Calls[CaptureHandle].read)
    encode = calling(Calls[CaptureHandle].encode)
    stream = iterating(Awaited.stream)
    fetch_captures_batch = blocking(Awaited.fetch_captures_batch)
    stats = blocking(Awaited.stats)
    token_ids = blocking(Awaited.token_ids)
    upload_vectors = blocking(Awaited.upload_vectors)
    list_vectors = blocking(Awaited.list_vectors)
    delete_vectors = blocking(Awaited.delete_vectors)

    @contextmanager
    def steered(self, steering: SteeringSpec | Edit | LogitBias) -> Iterator[SteeringSpec]:
        """Steer every call inside that does not pass `steering=` itself: `with model.steered(spec): ...`.

        When nested, its edits come after those of the outer one. It holds for the calls of this thread.

        Args:
            steering: a SteeringSpec, or one edit.

        Yields:
            The spec in force, outer ones included.

        Raises:
            InvalidSpec: not a spec.
        """
        self.awaited.connection.opened()
        with steered(self.awaited, steering) as spec:
            yield spec

    @property
    def openai(self) -> OpenAI:
        """OpenAI's own client of the same server; see `steercap.client.RemoteModel.openai`."""
        with extra("client"):
            from openai import OpenAI

        return OpenAI(**self.awaited.openai_arguments)

    @property
    def url(self) -> str:
        """See `steercap.client.RemoteModel.url`."""
        return self.awaited.url

    @property
    def model(self) -> str:
        """See `steercap.client.RemoteModel.model`."""
        return self.awaited.model

    @property
    def served_name(self) -> str:
        """See `steercap.client.RemoteModel.served_name`."""
        return self.awaited.served_name

    @property
    def origin(self) -> Mapping[str, str]:
        """See `steercap.client.RemoteModel.origin`."""
        return self.awaited.origin

    @property
    def max_model_len(self) -> int | None:
        """See `steercap.client.RemoteModel.max_model_len`."""
        return self.awaited.max_model_len

    @property
    def num_layers(self) -> int:
        """Number of decoder layers of the model."""
        return self.awaited.num_layers

    @property
    def hidden_size(self) -> int:
        """Number of elements of a row of the residual stream; `points` has the shape at every other site."""
        return self.awaited.hidden_size

    @property
    def points(self) -> Mapping[Point, PointSchema]:
        """Points that have a tap, layer by layer, with the schema of the tensor at each."""
        return self.awaited.points

    def __getattr__(self, name: str) -> Any:
        if name in {"awaited", "bridge"}:  # a copy that is being made has no attributes yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.awaited, name) if not name.startswith("_") else object.__getattribute__(self, name)

    def __repr__(self) -> str:
        return repr(self.awaited)
