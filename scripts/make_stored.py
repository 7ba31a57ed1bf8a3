"""Make the files and folders of tests/stored, which later versions of steercap must read: `python scripts/make_stored.py NAME...`.

Run it only for a new kind of file or folder, with its name. What is there was written by an earlier version, as users'
files were: made anew, it would prove nothing. Never run it to make a red test green.
"""

import argparse
import asyncio
from pathlib import Path

import beside_tests  # noqa: F401 -- they are in tests/
import handles
import stored_runs as known
from support.rows import ALL_SITES, TINY_ENGINE

from steercap import Progress, SteerModel
from steercap.testing import tiny_checkpoint

#: What needs no engine and is no native file.
OTHERS = ("handle", "training", "training_stopped")


class Stopped(Exception):
    """What stops a training half-way."""


def offline(name: str, out: Path) -> None:
    """Make what needs no engine."""
    if name in known.FILES:
        known.FILES[name]().save(out / f"{name}.safetensors")
    elif name == "handle":
        handles.a_handle(layers=(0, 2), reduce=None).save(out / "handle.safetensors")
    elif name == "training":
        known.trained(tiny_checkpoint("qwen3"), out / name)
    else:
        stopped(out / name)


def stopped(out: Path) -> None:
    """A training that ends after its first step, as a killed one does."""

    def stop(at: Progress) -> None:
        if at.done:
            raise Stopped

    try:
        known.trained(tiny_checkpoint("qwen3"), out, progress=stop)
    except Stopped:
        return
    raise AssertionError("the training was not stopped")


async def of_an_engine(names: list[str], out: Path) -> None:
    """Make the folders of runs."""
    async with SteerModel(str(tiny_checkpoint("qwen3")), sites=ALL_SITES, **TINY_ENGINE) as model:
        with known.chatting(model):
            for name in names:
                await known.RUNS[name](model, out / name)
                for path in [*(out / name).glob("*.png"), *(out / name).glob(".lock")]:  # nothing reads them
                    path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=[*known.FILES, *OTHERS, *known.RUNS], metavar="NAME")
    parser.add_argument("--out", type=Path, default=known.STORED, help="folder; by default tests/stored")
    args = parser.parse_args()
    for name in args.names:
        if (args.out / name).exists() or (args.out / f"{name}.safetensors").exists():
            parser.error(f"{name} is there already; what is stored stays as it is")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        if name not in known.RUNS:
            offline(name, args.out)
    if runs := [name for name in args.names if name in known.RUNS]:
        asyncio.run(of_an_engine(runs, args.out))


if __name__ == "__main__":  # vLLM's processes import the script again
    main()
