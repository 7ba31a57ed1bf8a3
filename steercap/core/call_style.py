"""Call style of the caller's code, async or blocking, so that examples in error messages run there.

`steercap.SteerModel` and its handles are awaited; those of `steercap.sync` are not.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Idiom(NamedTuple):
    """Code fragments of a call style.

    Args:
        call: prefix of a call: "await ", or nothing.
        manager: keyword of a context manager: "async with", or "with".
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
