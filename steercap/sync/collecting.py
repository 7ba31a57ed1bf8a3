"""Reading a corpus without `await`: the functions of `steercap.lab.datasets.collecting` that take an open model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from torch.utils.data import IterableDataset

from steercap.core.ownership import Unshared
from steercap.errors import ModelClosed
from steercap.lab.datasets.collecting import calls as _there
from steercap.sync.twins import Bridged, blocking, bridge_of

if TYPE_CHECKING:
    from steercap.lab.datasets.collecting import streaming
    from steercap.lab.datasets.normalising import Normalisation
    from steercap.lab.datasets.rows import Labelled, Rows

__all__ = ["ActivationStream", "activations", "collect"]

Params = ParamSpec("Params")

INSTEAD = "it is read by the process that has the model; in a DataLoader use num_workers=0 and batch_size=None"


class ActivationStream(Unshared, IterableDataset["Rows | Labelled"], instead=INSTEAD):
    """Shuffled batches of a model's rows, made by `activations`; it is read once.

    The engine works ahead in its own thread and processes while the caller computes. A loop that ends, however it ends,
    closes the stream; so does leaving it as a context manager, and `close`.

    Attributes:
        awaited: the stream behind this one.
    """

    def __init__(self, awaited: streaming.ActivationStream, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.awaited = awaited
        self._run = run

    @property
    def points(self) -> tuple[str, ...]:
        """The names of the points that are read, in order."""
        return self.awaited.points

    @property
    def normalisations(self) -> dict[str, Normalisation]:
        """How rows of each point are normalised, by its name; {} where they are not.

        Raises:
            InvalidRequest: they are to be found in the first rows, and no batch was taken yet.
        """
        return self.awaited.normalisations

    @property
    def rows(self) -> int:
        """Rows that were handed over."""
        return self.awaited.rows

    @property
    def tokens(self) -> int:
        """Tokens that the model read, for these rows and those to come."""
        return self.awaited.tokens

    def __iter__(self) -> Iterator[Rows | Labelled]:
        """The batches that are left.

        Raises:
            The errors of `SteerModel.read` and of the corpus.
        """
        try:
            while (batch := self._run(_after(self.awaited))) is not None:
                yield batch
        finally:
            self.close()

    def close(self) -> None:
        """End what runs and free what is held. Idempotent."""
        with suppress(ModelClosed):  # which has ended it
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
    """The functions, and no more."""
    return [*__all__, "__doc__", "__file__", "__name__"]
