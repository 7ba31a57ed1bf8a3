"""A stream of activations for callers that do not await: an ordinary iterator, which torch takes as a data set."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from steercap.core.ownership import Unshared
from steercap.errors import ModelClosed

if TYPE_CHECKING:
    from steercap.collecting import streaming
    from steercap.datasets.normalising import Normalisation
    from steercap.datasets.rows import Labelled, Rows

INSTEAD = "it is read by the process that has the model; in a DataLoader use num_workers=0 and batch_size=None"


class ActivationStream(Unshared, IterableDataset["Rows | Labelled"], instead=INSTEAD):
    """Shuffled batches of a model's rows, made by `SteerModel.activations`; it is read once.

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
