"""Cache of generated matrices, limited in bytes; the least recently used are dropped."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

#: Maximum bytes of one `Matrices` cache.
MATRIX_BYTES: Final = 256 << 20


class Matrices:
    """Cache of tensors by key; the one used last is always kept. Thread-safe.

    Args:
        most_bytes: maximum bytes of all tensors.
    """

    def __init__(self, most_bytes: int = MATRIX_BYTES) -> None:
        self._most_bytes = most_bytes
        self._known: dict[Hashable, torch.Tensor] = {}
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the tensor of a key; make it if it is not cached."""
        with self._lock:
            known = self._known.pop(key, None)
            if known is None:
                known = make()
            self._known[key] = known
            while len(self._known) > 1 and sum(one.nbytes for one in self._known.values()) > self._most_bytes:
                del self._known[next(iter(self._known))]
            return known
