"""Protocols of an open model and of fetched rows, the base of objects that are not copied, and styles of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Final, NamedTuple, NoReturn, Protocol, SupportsIndex

from steercap.errors import InvalidRequest


class NonCopyable:
    """Base of classes that cannot be copied or pickled: `copy`, `deepcopy` and `pickle` raise InvalidRequest.

    Args:
        instead: advice in the message, what to do instead; a keyword of the class statement.
    """

    _instead: ClassVar[str]

    def __init_subclass__(cls, *, instead: str) -> None:
        super().__init_subclass__()
        cls._instead = instead

    def __reduce_ex__(self, _protocol: SupportsIndex) -> NoReturn:
        raise InvalidRequest(f"a {type(self).__name__} cannot be copied or pickled: {self._instead}")


class OpenModel(Protocol):
    """An open model."""

    @property
    def model(self) -> str:
        """Name on the hub, or path."""

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of transformers."""

    @property
    def engine(self) -> Any:
        """vLLM engine that serves the model."""


class ReadingModel(OpenModel, Protocol):
    """An open model that reads texts and returns their rows."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""

    @property
    def max_model_len(self) -> int:
        """See `SteerModel.max_model_len`."""

    @property
    def origin(self) -> Mapping[str, str]:
        """See `SteerModel.origin`."""

    async def token_ids(self, text: Any, *, add_special_tokens: bool = True) -> list[int]:
        """See `SteerModel.token_ids`."""

    async def read(self, prompts: Any, *, capture: Any, steering: Any) -> Any:
        """See `SteerModel.read`."""

    async def fetch_captures_batch(self, handles: Sequence[Any]) -> Any:
        """Fetch the rows of many handles, which then hold them; see `SteerModel.fetch_captures_batch`."""


class SketchingModel(ReadingModel, Protocol):
    """An open model that also makes sketches."""

    def sketch(self, kind: str, *, layers: Any, sites: Any, tokens: Any) -> AbstractAsyncContextManager[Any]:
        """See `SteerModel.sketch`."""


class CheckpointedModel(Protocol):
    """An open model whose weights lie in a checkpoint: a `SteerModel` of either call style."""

    @property
    def checkpoint(self) -> tuple[str, str | None]:
        """See `SteerModel.checkpoint`."""

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of transformers."""


class FetchedRows(Protocol):
    """Fetched rows of a request and their labels: a `CaptureHandle` of either call style."""

    @property
    def captures(self) -> Any:
        """Rows by point, `captures.rows.Captures`."""

    @property
    def receipt(self) -> Any:
        """See `CaptureHandle.receipt`."""

    @property
    def directions(self) -> Any:
        """See `CaptureHandle.directions`."""

    @property
    def marks(self) -> Any:
        """See `CaptureHandle.marks`."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers of the model."""

    @property
    def positions(self) -> Any:
        """Position of each row in the sequence, int64 [rows]."""

    @property
    def token_ids(self) -> Any:
        """Token that the model read at each row, int64 [rows]."""

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """Token ids of the prompt."""

    @property
    def output_token_ids(self) -> Sequence[int]:
        """Token ids that were generated."""


class CallStyle(NamedTuple):
    """Code fragments of a call style, async or blocking, so that examples in error messages run in the caller's code.

    Args:
        call: prefix of a call: "await ", or nothing.
        manager: keyword of a context manager: "async with", or "with".
        script: a script with the guard that vLLM's processes need.
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
