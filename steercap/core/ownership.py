"""Base of objects with one owner, such as an engine or rows in a worker; a copy would free them twice."""

from __future__ import annotations

from typing import ClassVar, NoReturn, SupportsIndex

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
