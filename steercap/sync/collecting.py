"""Collection of activations without `await`: twins of functions in `steercap.lab.datasets.collecting`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from torch.utils.data import IterableDataset

from steercap.core.ownership import NonCopyable
from steercap.errors import ModelClosed
from steercap.lab.datasets.collecting import calls as _there
from steercap.sync.twins import Bridged, blocking, bridge_of

if TYPE_CHECKING:
    from steercap.lab.datasets.collecting import streaming
    from steercap.lab.datasets.rows import Labelled, Normalisation, Rows

__all__ = ["ActivationStream", "activations", "collect"]

Params = ParamSpec("Params")

INSTEAD = "it is read by the process that has the model; in a DataLoader use num_workers=0 and batch_size=None"


class ActivationStream(NonCopyable, IterableDataset["Rows | Labelled"], instead=INSTEAD):
    """Shuffled batches of a model's rows, made by `activations`; it can be iterated once.

    The engine works ahead in its own thread and processes while the caller computes. A loop that ends, however it ends,
    closes the stream; so does leaving it as a context manager, and `close`.

    Attributes:
        awaited: the asynchronous stream.
    """

    def __init__(self, awaited: streaming.ActivationStream, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.awaited = awaited
        self._run = run

    @property
    def points(self) -> tuple[str, ...]:
        """Names of the points, in order."""
        return self.awaited.points

    @property
    def normalisations(self) -> dict[str, Normalisation]:
        """Normalisation of each point's rows, by the name of the point; {} without normalisation.

        Raises:
            InvalidRequest: it is estimated from the first rows, and no batch was taken yet.
        """
        return self.awaited.normalisations

    @property
    def rows(self) -> int:
        """Number of rows returned so far."""
        return self.awaited.rows

    @property
    def tokens(self) -> int:
        """Number of tokens that the model has read, for these rows and later ones."""
        return self.awaited.tokens

    def __iter__(self) -> Iterator[Rows | Labelled]:
        """Iterate over the remaining batches.

        Raises:
            The errors of `SteerModel.read` and of the corpus.
        """
        try:
            while (batch := self._run(_after(self.awaited))) is not None:
                yield batch
        finally:
            self.close()

    def close(self) -> None:
        """Stop reading, and free everything held. Idempotent."""
        with suppress(ModelClosed):  # closing the model has ended it
            self._run(self.awaited.aclose())

    def __enter__(self) -> ActivationStream:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


async def _after(awaited: streaming.ActivationStream) -> Rows | Labelled | None:
    return await anext(awaited, None)


collect = blocking(_there.collect)


def _streaming(
    work: Callable[Concatenate[Any, Params], streaming.ActivationStream],
) -> Callable[Concatenate[Bridged[Any], Params], ActivationStream]:
    @functools.wraps(work)
    def call(*args: Any, **kwargs: Any) -> Any:
        bridge, rest = bridge_of(work, args, kwargs)

        async def opened() -> streaming.ActivationStream:
            return work(bridge.model, *rest, **kwargs)

        return ActivationStream(bridge.run(opened()), bridge.run)

    return call


activations = _streaming(_there.activations)


def __dir__() -> list[str]:
    """Return the names of the functions."""
    return [*__all__, "__doc__", "__file__", "__name__"]
