"""Bases of the blocking models: what their calls on an event loop alone do not do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from steercap.client import RemoteModel
from steercap.core.extras import extra
from steercap.core.protocols import BLOCKING
from steercap.core.spec import CaptureSpec, Layers, Point
from steercap.core.tokens import Tokens, TokenSelection
from steercap.engine.guard import require_main_guard
from steercap.model import SteerModel
from steercap.requests.context import joining
from steercap.steering.spec import SteeringSpec
from steercap.sync.bridge import Bridged
from steercap.sync.objects import RunningSketch

if TYPE_CHECKING:
    from openai import OpenAI

Value = TypeVar("Value")
Model_co = TypeVar("Model_co", SteerModel, RemoteModel, covariant=True)


async def _call(work: Callable[[], Value]) -> Value:
    return work()


class SketchingTwin(Bridged[Model_co]):
    """Blocking model that makes sketches."""

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
        running = self.bridge.run(self.awaited._backend.open_sketch(kind, size, spec))  # noqa: SLF001 -- of its twin
        try:
            with joining(self.awaited, running):
                yield RunningSketch(running, self.bridge.run)
        finally:
            self.bridge.freed(running)


class LocalTwin(SketchingTwin[SteerModel]):
    """Blocking model whose engine runs beside this process."""

    def __init__(self, awaited: SteerModel) -> None:
        super().__init__(awaited, awaited.serving)

    def __repr__(self) -> str:
        return repr(self.awaited)

    def start(self) -> Self:
        """Start the engine and prove that its taps work; takes half a minute or more.

        Raises:
            The errors of `steercap.SteerModel.start`.
        """
        require_main_guard(BLOCKING)
        return super().start()

    def check_capture(self, spec: CaptureSpec) -> tuple[Point, ...]:
        """Check a capture spec against this model as a call would, before anything runs.

        Args:
            spec: the capture spec.

        Returns:
            The points that it captures, ascending.

        Raises:
            InvalidSpec, LayerOutOfRange, UnknownName, PointNotArmed: it does not fit.
            ModelClosed: the model was never started, or is closed.
        """
        return self.bridge.run(_call(lambda: self.awaited.check_capture(spec)))

    def _check(self, spec: SteeringSpec) -> None:
        self.bridge.run(_call(lambda: self.awaited.serving.opened().compiler.lowered(spec)))

    @property
    def factory(self) -> Callable[[], SteerModel]:
        """Function that makes an asynchronous model with the same arguments; see `steercap.SteerModel.factory`."""
        return self.awaited.factory


class ServedTwin(SketchingTwin[RemoteModel]):
    """Blocking model that a server has open."""

    def __init__(self, awaited: RemoteModel) -> None:
        super().__init__(awaited, awaited.connection)

    @classmethod
    def around(cls, awaited: RemoteModel) -> Self:
        """Make the twin of a model that is not started."""
        found = cls.__new__(cls)
        ServedTwin.__init__(found, awaited)
        return found

    def _check(self, _spec: SteeringSpec) -> None:  # the server checks each request
        self.awaited.connection.opened()

    @property
    def openai(self) -> OpenAI:
        """OpenAI's own client of the same server; see `steercap.client.RemoteModel.openai`."""
        with extra("client"):
            import httpx
            from openai import OpenAI

        socket, given = self.awaited.connection.socket, self.awaited.openai_arguments
        if socket:
            given["http_client"] = httpx.Client(transport=httpx.HTTPTransport(uds=socket))
        return OpenAI(**given)

    def __getattr__(self, name: str) -> Any:
        if name in {"awaited", "bridge"}:  # a copy that is being made has no attributes yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.awaited, name) if not name.startswith("_") else object.__getattribute__(self, name)

    def __repr__(self) -> str:
        return repr(self.awaited)
