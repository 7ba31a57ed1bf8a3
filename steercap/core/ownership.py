"""What has one owner: an engine, or rows that wait in a worker. A copy would be a second owner and free them twice."""

from __future__ import annotations

from typing import ClassVar, NoReturn, SupportsIndex

from steercap.errors import InvalidRequest


class Unshared:
    """Cannot be copied or pickled: `copy`, `deepcopy` and `pickle` raise InvalidRequest, which says what to do.

    Args:
        instead: what to do instead; a keyword of the class statement.
    """

    _instead: ClassVar[str]

    def __init_subclass__(cls, *, instead: str) -> None:
        super().__init_subclass__()
        cls._instead = instead

    def __reduce_ex__(self, _protocol: SupportsIndex) -> NoReturn:
        raise InvalidRequest(f"a {type(self).__name__} cannot be copied or pickled: {self._instead}")
