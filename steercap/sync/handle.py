"""Capture handle for blocking callers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from steercap.captures import handle as handles
from steercap.captures.experts import Experts
from steercap.captures.lens import MOST_BYTES, Lens
from steercap.core.call_style import BLOCKING
from steercap.core.ownership import NonCopyable
from steercap.core.spec import Point
from steercap.errors import InvalidRequest
from steercap.sync.loop import LoopThread

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    import torch

    from steercap.captures.lifecycle import Lifecycle
    from steercap.captures.rows import Captures, Coded, Featured
    from steercap.captures.tuned_lens import TunedLens
    from steercap.core.attention import AttentionRule
    from steercap.core.chat import MediaSpan, MessageSpan
    from steercap.core.receipt import Receipt
    from steercap.core.tokens import Tokens, TokenSelection
    from steercap.steering.directions import Mark


class CaptureHandle(NonCopyable, instead=handles.INSTEAD):
    """Handle of a request's rows: `steercap.CaptureHandle` without `await`.

    `fetch()` returns when the rows are here, and `with handle:` fetches and frees. All else is that of the handle.

    Attributes:
        awaited: the `steercap.CaptureHandle`, whose `fetch` is awaited in the model's event loop.
    """

    request_id: str
    model: str
    text: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    points: tuple[Point, ...]
    messages: tuple[MessageSpan, ...]
    media: tuple[MediaSpan, ...]
    num_layers: int
    directions: tuple[str, ...]
    marks: dict[int, tuple[Mark, ...]]
    attention_rules: dict[int, AttentionRule]
    lifecycle: Lifecycle
    fetched: bool
    captures: Captures
    coded: Coded
    features: Featured
    receipt: Receipt
    positions: torch.Tensor
    token_ids: torch.Tensor
    token_types: npt.NDArray[np.str_]

    def __init__(self, awaited: handles.CaptureHandle, thread: LoopThread | None) -> None:
        awaited.lifecycle.idiom = BLOCKING
        self.awaited = awaited
        self._thread = thread

    def fetch(self) -> Self:
        """Bring the rows here, and free them in the worker. A second call does nothing.

        Returns:
            This handle, its `captures`, `positions`, `token_ids`, `token_types` and `receipt` readable.

        Raises:
            CaptureIncomplete: rows are missing or belong to another token.
            CaptureReleased: the handle was released before.
            EngineFailure: the engine has died or was closed.
        """
        if self._thread is not None and not self.awaited.fetched:
            self._thread.run(self.awaited.fetch())
        return self

    def lens(
        self,
        layer: int | None = None,
        *,
        site: str | None = None,
        tokens: Tokens | TokenSelection | None = None,
        translator: TunedLens | None = None,
        top: int = 10,
        ids: Sequence[int] = (),
        full: bool = False,
        max_bytes: int = MOST_BYTES,
    ) -> Lens:
        """Compute the logit lens of the handle's rows; see `steercap.CaptureHandle.lens`.

        Args:
            layer, site, tokens, translator, top, ids, full, max_bytes: as for `steercap.CaptureHandle.lens`.

        Raises:
            The errors of `steercap.CaptureHandle.lens`.
        """
        if self._thread is None:
            raise InvalidRequest("lens: the handle is from a file; give its rows to unembed() of an open model")
        asked = self.awaited.lens(
            layer,
            site=site,
            tokens=tokens,
            translator=translator,
            top=top,
            ids=ids,
            full=full,
            max_bytes=max_bytes,
        )
        return self._thread.run(asked)

    def experts(self, layer: int, *, tokens: Tokens | TokenSelection | None = None) -> Experts:
        """Return the experts that a layer chose for tokens, with their weights; see `steercap.CaptureHandle.experts`.

        Args:
            layer, tokens: as for `steercap.CaptureHandle.experts`.

        Raises:
            The errors of `steercap.CaptureHandle.experts`.
        """
        if self._thread is None:
            raise InvalidRequest(
                "experts: the handle is from a file; the workers of an open model choose, so ask before"
            )
        return self._thread.run(self.awaited.experts(layer, tokens=tokens))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a handle that `save` wrote; it is fetched already.

        Raises:
            InvalidFile: the file is truncated, of another kind, or of a newer version.
        """
        return cls(handles.CaptureHandle.load(path), None)

    def release(self) -> None:
        """Drop the rows, here and in the worker. Idempotent; nothing can be read afterwards."""
        self.awaited.release()

    def __enter__(self) -> Self:
        return self.fetch()

    def __exit__(self, *_exc: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "awaited":  # a copy that is being made has no attributes yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.awaited, name)

    def __dir__(self) -> list[str]:
        """Return its own names, and those of the asynchronous handle."""
        return sorted({*super().__dir__(), *(name for name in dir(self.awaited) if not name.startswith("_"))})

    def __repr__(self) -> str:
        return repr(self.awaited)
