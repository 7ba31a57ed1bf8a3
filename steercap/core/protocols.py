"""What functions of the library need of an open model, such as a `SteerModel`, whose class they need not know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol


class OpenModel(Protocol):
    """A model that was opened."""

    @property
    def model(self) -> str:
        """Its name on the hub, or path."""

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer."""

    @property
    def engine(self) -> Any:
        """vLLM's engine that serves it."""


class ReadingModel(OpenModel, Protocol):
    """An open model that reads texts and hands over rows."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""

    @property
    def origin(self) -> Mapping[str, str]:
        """See `SteerModel.origin`."""

    async def token_ids(self, text: Any, *, add_special_tokens: bool = True) -> list[int]:
        """See `SteerModel.token_ids`."""

    async def read(self, prompts: Any, *, capture: Any, steering: Any) -> Any:
        """See `SteerModel.read`."""

    async def fetch_captures_batch(self, handles: Sequence[Any]) -> Any:
        """See `SteerModel.fetch_captures_batch`."""


class SketchingModel(ReadingModel, Protocol):
    """An open model that takes rows into statistics, too."""

    def sketch(self, kind: str, *, layers: Any, sites: Any, tokens: Any) -> AbstractAsyncContextManager[Any]:
        """See `SteerModel.sketch`."""
