"""Protocols of open models and fetched rows, a base for objects that cannot be copied, call styles, progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple, NoReturn, Protocol, SupportsIndex, TypeAlias

from steercap.errors import InvalidRequest


class NonCopyable:
    """Base of classes that cannot be copied or pickled: `copy`, `deepcopy` and `pickle` raise InvalidRequest.

    Args:
        instead: advice for the error message; a keyword of the class statement.
    """

    _instead: ClassVar[str]

    def __init_subclass__(cls, *, instead: str) -> None:
        super().__init_subclass__()
        cls._instead = instead

    def __reduce_ex__(self, _protocol: SupportsIndex) -> NoReturn:
        raise InvalidRequest(f"a {type(self).__name__} cannot be copied or pickled: {self._instead}")


class OpenModel(Protocol):
    """An open model, with its name, tokenizer and engine."""

    @property
    def model(self) -> str:
        """Name of the model on the hub, or its path."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer of transformers."""

    @property
    def engine(self) -> Any:
        """vLLM's `AsyncLLM` that serves the model."""


class ReadingModel(OpenModel, Protocol):
    """An open model that runs prompts and returns captured rows."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""

    @property
    def max_model_len(self) -> int:
        """See `SteerModel.max_model_len`."""

    @property
    def origin(self) -> Mapping[str, str]:
        """Revision and dtype of the model; see `SteerModel.origin`."""

    async def tokenize(self, text: Any, *, add_special_tokens: bool | None = None) -> list[int]:
        """Tokenise a text; see `SteerModel.tokenize`."""

    async def read(self, prompts: Any, *, capture: Any, steering: Any) -> Any:
        """Run prompts and return handles of their captured rows; see `SteerModel.read`."""

    async def fetch_captures_batch(self, handles: Sequence[Any]) -> Any:
        """Fetch the rows of many handles into the handles; see `SteerModel.fetch_captures_batch`."""


class SketchingModel(ReadingModel, Protocol):
    """An open model that also accumulates statistics of rows (sketches) in the workers."""

    def sketch(self, kind: str, *, layers: Any, sites: Any, tokens: Any) -> AbstractAsyncContextManager[Any]:
        """Return a context manager that opens a sketch; see `SteerModel.sketch`."""


class CheckpointedModel(Protocol):
    """An open model with a checkpoint on disk or the hub: a `SteerModel` of either call style."""

    @property
    def checkpoint(self) -> tuple[str, str | None]:
        """Name or path of the checkpoint, and revision or None; see `SteerModel.checkpoint`."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer of transformers."""


class FetchedRows(Protocol):
    """Fetched rows of a request with their labels: a `CaptureHandle` of either call style."""

    @property
    def captures(self) -> Any:
        """Rows by point, a `captures.rows.Captures`."""

    @property
    def receipt(self) -> Any:
        """Receipt of the capture; see `CaptureHandle.receipt`."""

    @property
    def directions(self) -> Any:
        """Names of the directions that the rows were projected on; see `CaptureHandle.directions`."""

    @property
    def marks(self) -> Any:
        """Fingerprints of the directions that the rows were projected on, by layer; see `CaptureHandle.marks`."""

    @property
    def model(self) -> str:
        """Path or name of the model, as it was opened."""

    @property
    def lifecycle(self) -> Any:
        """State of the rows, with their origin; see `CaptureHandle.lifecycle`."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers of the model."""

    @property
    def positions(self) -> Any:
        """Position of each row in the sequence, int64 [rows]."""

    @property
    def token_ids(self) -> Any:
        """Id of the model's input token at each row, int64 [rows]."""

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """Token ids of the prompt."""

    @property
    def output_token_ids(self) -> Sequence[int]:
        """Ids of the generated tokens."""


class CallStyle(NamedTuple):
    """Code fragments of the async or blocking call style, for examples in error messages.

    Args:
        call: prefix of a call: "await " or "".
        manager: keyword of a context manager: "async with" or "with".
        script: example script with the `__main__` guard that vLLM's processes need.
    """

    call: str
    manager: str
    script: str


AWAITED: Final = CallStyle(
    "await ",
    "async with",
    """
    async def main():
        async with SteerModel(...) as model:
            ...

    if __name__ == "__main__":
        asyncio.run(main())
""",
)


BLOCKING: Final = CallStyle(
    "",
    "with",
    """
    def main():
        with SteerModel(...) as model:
            ...

    if __name__ == "__main__":
        main()
""",
)


@dataclass(frozen=True)
class Progress:
    """Report of a long call on a stage of its work; as text, a line such as "training, loss 0.25: 64 of 512".

    Args:
        stage: name of the stage, such as "answers"; a call may have several, one after another or at once.
        done: number of the stage's items that are done, those of an interrupted call that is resumed included.
        total: number of the stage's items, None if it is unknown.
        details: further numbers by name, such as "loss" or "tokens/s".
    """

    stage: str
    done: int
    total: int | None
    details: Mapping[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Stage and details, without the counts."""
        figures = {name: f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for name, value in self.details.items()}
        return ", ".join([self.stage, *(f"{name} {figure}" for name, figure in figures.items())])

    def __str__(self) -> str:
        return f"{self.label}: {self.done:,}" + ("" if self.total is None else f" of {self.total:,}")


#: Callback of long calls. It runs in the call's event loop, so it should be quick; an error in it ends the call.
ProgressCallback: TypeAlias = Callable[[Progress], object]


class Count:
    """Counter of a stage's items out of `total`, from `done` on, which reports to `progress` now and at each change."""

    def __init__(self, stage: str, total: int | None, done: int, progress: ProgressCallback | None) -> None:
        self._stage, self._total, self._done, self._progress = stage, total, done, progress
        self.add(0)

    def add(self, count: int = 1) -> None:
        """Add `count` to the finished items and report them."""
        self._done += count
        if self._progress is not None:
            self._progress(Progress(self._stage, self._done, self._total))
