"""Site `k`: the keys that attention reads and caches, after rotary embedding and norms.

[kv_heads, head_dim].
"""

from __future__ import annotations

from typing import Any, ClassVar

from steercap.architectures.sites.attention import AttentionInput


class K(AttentionInput):
    """Tap on the second argument of the family's attention module, before it is cached."""

    name: ClassVar[str] = "k"
    argument: ClassVar[int] = 1
    before_keys: ClassVar[bool] = True
    per_key_head: ClassVar[bool] = True

    def heads(self, attention: Any) -> tuple[int, int]:
        return int(attention.num_kv_heads), int(attention.head_size)


MEMBER = K()
