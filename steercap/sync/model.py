"""SteerModel for blocking callers: each call runs on an event loop in a thread of its own.

There is no logic here; `steercap.SteerModel` does all the work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from steercap import model as _model
from steercap.config import Settings
from steercap.core.call_style import BLOCKING
from steercap.core.ownership import NonCopyable
from steercap.core.schema import PointSchema
from steercap.core.spec import CaptureSpec, Layers, Point
from steercap.core.tokens import Tokens, TokenSelection
from steercap.engine.guard import require_main_guard
from steercap.requests.calls import Calls
from steercap.requests.context import joining, steered
from steercap.requests.equations import Claim
from steercap.requests.serving import Serving
from steercap.requests.sketching import begun
from steercap.requests.stats import Stats
from steercap.steering.spec import SteeringSpec
from steercap.sync.bridge import Bridge
from steercap.sync.handle import CaptureHandle
from steercap.sync.remote import RemoteModel
from steercap.sync.sketch import RunningSketch
from steercap.sync.twins import Bridged, as_there, blocking, calling, iterating

if TYPE_CHECKING:
    from steercap.adapters.types import AsyncLLM
    from steercap.steering.edits import Edit
    from steercap.steering.logit_bias import LogitBias

Value = TypeVar("Value")


async def _call(work: Callable[[], Value]) -> Value:
    return work()


class SteerModel(NonCopyable, Bridged[_model.SteerModel], instead=_model.INSTEAD):
    """Model with captures and steering: `steercap.SteerModel` without `await`, with the same arguments.

    Use it as a context manager, or `start()` and `close()`. Several threads may call it at once; vLLM batches their
    requests.
    """

    @as_there(_model.SteerModel)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        model = _model.SteerModel(*args, **kwargs)
        self.bridge = Bridge(model, model.serving)

    @staticmethod
    @functools.wraps(_model.SteerModel.connect)
    def connect(*args: Any, **kwargs: Any) -> RemoteModel:
        """Return a model on a server; see `steercap.SteerModel.connect`."""
        return RemoteModel(*args, **kwargs)

    def start(self) -> Self:
        """Start the engine and prove that its taps work; takes half a minute or more.

        Raises:
            The errors of `steercap.SteerModel.start`.
        """
        require_main_guard(BLOCKING)
        self.bridge.start()
        return self

    def close(self) -> None:
        """Cancel running calls, free everything held, and stop the engine. Idempotent."""
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
    stream = iterating(_model.SteerModel.stream)
    fetch_captures_batch = blocking(_model.SteerModel.fetch_captures_batch)
    token_ids = blocking(_model.SteerModel.token_ids)
    unembed = blocking(_model.SteerModel.unembed)
    stats: Callable[[SteerModel], Stats] = blocking(_model.SteerModel.stats)

    @contextmanager
    def steered(self, steering: SteeringSpec | Edit | LogitBias) -> Iterator[SteeringSpec]:
        """Steer every call inside that does not pass `steering=` itself: `with model.steered(spec): ...`.

        When nested, its edits come after those of the outer one. It holds for the calls of this thread.

        Args:
            steering: a SteeringSpec, or one edit.

        Yields:
            The spec in force, outer ones included.

        Raises:
            InvalidSpec: not a spec, or one that does not fit the model.
        """
        with steered(self.bridge.model, steering) as spec:
            self.bridge.run(_call(lambda: self.bridge.model.serving.opened().lowered(spec)))
            yield spec

    @contextmanager
    def sketch(
        self,
        kind: str = "moments",
        *,
        layers: Layers = "all",
        sites: str | Sequence[str] = ("resid_post",),
        tokens: Tokens | TokenSelection = "all",
        before_edits: bool = False,
        size: int | None = None,
    ) -> Iterator[RunningSketch]:
        """Add the rows of every request inside to statistics, in the workers: `with model.sketch(...) as s:`.

        It holds for the calls of this thread; see `steercap.SteerModel.sketch`.

        Args:
            kind: "moments", "variances" or "frequent_directions".
            layers, sites, tokens, before_edits: rows to add; as for `CaptureSpec`.
            size: number of rows of a "frequent_directions" sketch; 64 if left out.

        Yields:
            A `RunningSketch`.

        Raises:
            The errors of `steercap.SteerModel.sketch`.
        """
        spec = CaptureSpec(layers=layers, sites=sites, tokens=tokens, codec="raw", before_edits=before_edits)
        running = self.bridge.run(self.serving.with_restart(lambda engine: begun(engine, kind, size, spec)))
        try:
            with joining(self.bridge.model, running):
                yield RunningSketch(running, self.bridge.run)
        finally:
            self.bridge.freed(running)

    @functools.wraps(_model.SteerModel.check_capture)
    def check_capture(self, spec: CaptureSpec) -> tuple[Point, ...]:
        """Check a capture spec; see `SteerModel.check_capture`."""
        return self.bridge.run(_call(lambda: self.bridge.model.check_capture(spec)))

    @functools.wraps(_model.SteerModel.identity)
    def identity(self) -> dict[str, str]:
        """Return the identity of the model; see `SteerModel.identity`."""
        return self.bridge.model.identity()

    @property
    def serving(self) -> Serving:
        """Lifecycle of the engine; it runs on this facade's loop."""
        return self.bridge.model.serving

    @property
    def model(self) -> str:
        """Path or name of the model."""
        return self.bridge.model.model

    @property
    def settings(self) -> Settings:
        """steercap's own settings."""
        return self.bridge.model.settings

    @property
    def engine(self) -> AsyncLLM:
        """vLLM's AsyncLLM that serves the model; it runs on this facade's loop."""
        return self.bridge.model.engine

    @property
    def checkpoint(self) -> tuple[str, str | None]:
        """See `SteerModel.checkpoint`."""
        return self.bridge.model.checkpoint

    @property
    def factory(self) -> Callable[[], _model.SteerModel]:
        """Factory of an asynchronous model; see `SteerModel.factory`."""
        return self.bridge.model.factory

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """See `SteerModel.generation_config`."""
        return self.bridge.model.generation_config

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of the context, prompt and answer together."""
        return self.bridge.model.max_model_len

    @property
    def num_layers(self) -> int:
        """Number of decoder layers of the model."""
        return self.bridge.model.num_layers

    @property
    def hidden_size(self) -> int:
        """Number of elements of a row of the residual stream; `points` has the shape at every other site."""
        return self.bridge.model.hidden_size

    @property
    def layers(self) -> Mapping[str, str]:
        """See `SteerModel.layers`."""
        return self.bridge.model.layers

    @property
    def verified(self) -> bool:
        """See `SteerModel.verified`."""
        return self.bridge.model.verified

    @property
    def proof(self) -> tuple[Claim, ...]:
        """See `SteerModel.proof`."""
        return self.bridge.model.proof

    @property
    def points(self) -> Mapping[Point, PointSchema]:
        """Points that have a tap, layer by layer, with the schema of the tensor at each."""
        return self.bridge.model.points

    @property
    def origin(self) -> Mapping[str, str]:
        """See `SteerModel.origin`."""
        return self.bridge.model.origin

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.bridge.model.tokenizer
