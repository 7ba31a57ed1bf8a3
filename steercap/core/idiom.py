"""How the caller's code is written, so that the examples in error messages are code that would run there.

`steercap.SteerModel` and its handles are awaited; those of `steercap.sync` are not.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Idiom(NamedTuple):
    """What is written before a call and before a context manager, and how a script starts.

    Args:
        call: "await ", or nothing.
        manager: "async with", or "with".
        script: a script with the guard that vLLM's processes need.
    """

    call: str
    manager: str
    script: str


AWAITED: Final = Idiom(
    "await ",
    "async with",
    """
    async def main():
        async with SteerModel(...) as model:
            ...

    if __name__ == "__main__":
        asyncio.run(main())
""",
)
BLOCKING: Final = Idiom(
    "",
    "with",
    """
    def main():
        with SteerModel(...) as model:
            ...

    if __name__ == "__main__":
        main()
""",
)
