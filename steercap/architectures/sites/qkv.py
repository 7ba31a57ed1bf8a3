"""Sites `q`, `k` and `v`: queries, keys and values that attention reads, after rotary embedding and norms.

[heads, head_dim] and [kv_heads, head_dim]; keys and values are also what it caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from steercap.architectures.sites.attention import AttentionInput
from steercap.architectures.sites.base import Site


class Q(AttentionInput):
    """Tap on the first argument of the family's attention module."""

    name: ClassVar[str] = "q"
    argument: ClassVar[int] = 0

    def heads(self, attention: Any) -> tuple[int, int]:
        return int(attention.num_heads), int(attention.head_size)


class K(AttentionInput):
    """Tap on the second argument of the family's attention module, before it is cached."""

    name: ClassVar[str] = "k"
    argument: ClassVar[int] = 1
    before_keys: ClassVar[bool] = True
    per_key_head: ClassVar[bool] = True

    def heads(self, attention: Any) -> tuple[int, int]:
        return int(attention.num_kv_heads), int(attention.head_size)


class V(AttentionInput):
    """Tap on the third argument of the family's attention module, before it is cached."""

    name: ClassVar[str] = "v"
    argument: ClassVar[int] = 2
    before_keys: ClassVar[bool] = True
    per_key_head: ClassVar[bool] = True

    def heads(self, attention: Any) -> tuple[int, int]:
        return int(attention.num_kv_heads), int(attention.head_size_v)


#: By name.
MEMBERS: Final[Mapping[str, Site]] = {
    "q": Q(),
    "k": K(),
    "v": V(),
}
