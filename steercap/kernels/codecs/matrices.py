"""Matrices that follow from a seed, kept as long as there is room: those used last."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

#: Memory of all that one `Matrices` keeps, in bytes.
MATRIX_BYTES: Final = 256 << 20


class Matrices:
    """Tensors by what they follow from; at least the last one is kept. For any thread.

    Args:
        most_bytes: most memory of all.
    """

    def __init__(self, most_bytes: int = MATRIX_BYTES) -> None:
        self._most_bytes = most_bytes
        self._known: dict[Hashable, torch.Tensor] = {}
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor of a key, made if it is not known."""
        with self._lock:
            known = self._known.pop(key, None)
            if known is None:
                known = make()
            self._known[key] = known
            while len(self._known) > 1 and sum(one.nbytes for one in self._known.values()) > self._most_bytes:
                del self._known[next(iter(self._known))]
            return known
