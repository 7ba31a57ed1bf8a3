"""Site `q`: the queries that attention reads, after rotary embedding and norms, [heads, head_dim]."""

from __future__ import annotations

from typing import Any, ClassVar

from steercap.architectures.sites.attention import AttentionInput


class Q(AttentionInput):
    """Tap on the first argument of the family's attention module."""

    name: ClassVar[str] = "q"
    argument: ClassVar[int] = 0

    def heads(self, attention: Any) -> tuple[int, int]:
        return int(attention.num_heads), int(attention.head_size)


MEMBER = Q()
