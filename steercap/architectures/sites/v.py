"""Site `v`: the values that attention reads and caches, [kv_heads, head_dim]."""

from __future__ import annotations

from typing import Any, ClassVar

from steercap.architectures.sites.attention import AttentionInput


class V(AttentionInput):
    """Tap on the third argument of the family's attention module, before it is cached."""

    name: ClassVar[str] = "v"
    argument: ClassVar[int] = 2
    before_keys: ClassVar[bool] = True
    per_key_head: ClassVar[bool] = True

    def heads(self, attention: Any) -> tuple[int, int]:
        return int(attention.num_kv_heads), int(attention.head_size_v)


MEMBER = V()
