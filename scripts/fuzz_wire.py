"""Attack the frames between client and workers: python scripts/fuzz_wire.py --rounds 20000, or --guided SECONDS.

Each round sends a worker without a model a question and a plan that may say anything, answers a client anything, and has
it fetch rows that are wrong somewhere; every 50 rounds an honest request must be served to the last bit, and nothing
be held. With --guided, atheris mutates frames by the code that they reach; it is not among the pinned packages.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import resource
import sys
import time

import beside_tests  # noqa: F401 -- support is there

SECONDS = 10  #: between two lines of a guided run


def rounds(count: int, seed: int) -> None:
    """Random rounds, and what they leave behind."""
    from support.wire import fuzz

    started, before, served = time.monotonic(), 0, 0
    for part in range(10):
        served += asyncio.run(fuzz(count // 10, seed * 1_000_003 + part))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        before = before or peak
        print(f"{(part + 1) * (count // 10):,} rounds, {served} honest requests, peak {peak} MiB", flush=True)
    print(f"{time.monotonic() - started:.0f} s; the peak grew by {peak - before} MiB after the first tenth")


def guided(seconds: int, seed: int) -> None:
    """Frames that atheris makes, read by both sides."""
    import atheris

    with atheris.instrument_imports(include=["steercap.core", "steercap.worker", "steercap.engine"]):
        from support import wire

    rng = random.Random(seed)
    reader, told = wire.AnyReader(rng), time.monotonic() + SECONDS

    def one(data: bytes) -> None:
        nonlocal told
        reader.read(data)
        if time.monotonic() > told:
            told += SECONDS
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            print(f"{reader.frames:,} frames, peak {peak} MiB: nothing but refusals", flush=True)

    def mutated(data: bytes, most: int, _seed: int) -> bytes:
        """What atheris makes of a frame, or now and then a new one."""
        return reader.fresh()[:most] if rng.random() < 1 / 8 else atheris.Mutate(data, most)

    flags = ["-max_len=4096", "-verbosity=0", "-rss_limit_mb=8192", f"-max_total_time={seconds}"]
    atheris.Setup([sys.argv[0], *flags], one, custom_mutator=mutated)
    atheris.Fuzz()


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--guided", type=int, metavar="SECONDS", help="have atheris make the frames, for so long")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if given.guided:
        guided(given.guided, given.seed)
    else:
        rounds(given.rounds, given.seed)


if __name__ == "__main__":
    main()
