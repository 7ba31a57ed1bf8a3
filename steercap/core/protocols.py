"""Protocols of open models and fetched rows, a base for objects that cannot be copied, and call styles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Final, NamedTuple, NoReturn, Protocol, SupportsIndex

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
