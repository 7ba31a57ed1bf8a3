"""Fetch bandwidth without a model: finished requests' records in shared memory, delivered as tensors.

Pages are handed out as a decoding batch gets them: the pages of a request lie far apart, two records of all points each.

    python scripts/bench_fetch.py --requests 24 --rows 128 --points 36 --width 4096 --threads 1 2
"""

from __future__ import annotations

import argparse
import asyncio
import time

import numpy as np
import torch

from steercap.core.messages import Attached, CapturedRows, LineRange, Owner
from steercap.core.rows import page_shape
from steercap.core.schema import LINE_BYTES, RAW, PointSchema
from steercap.engine.fetching import Fetcher
from steercap.engine.ranks import Rank
from steercap.kernels.codecs import record_of
from steercap.worker.memory import HEADER_BYTES, SharedReader, SharedSegment

TICK = 0.0005


def captured(args: argparse.Namespace) -> tuple[SharedSegment, Attached, list[CapturedRows]]:
    """An arena full of requests, and where each one's rows are."""
    schemas = (PointSchema((args.width,), "bfloat16"),) * args.points
    record = record_of(schemas, RAW).lines
    shape = page_shape(record)
    pages = shape.pages(args.rows, record)
    segment = SharedSegment.create(args.requests * pages * shape.page_bytes)
    memory = np.frombuffer(segment.memory, dtype=np.int64, offset=HEADER_BYTES)
    memory[:] = np.arange(len(memory))
    attached = Attached(
        points=tuple(range(args.points)),
        schemas=schemas,
        shard=0,
        page_lines=shape.lines,
        pages=args.requests * pages,
        bank_rows=0,
        bank_width=args.width,
        reductions=0,
        held=0,
        path=segment.path,
        nonce=segment.nonce,
    )
    per_page = shape.records(record)
    found = []
    for request in range(args.requests):
        ranges = tuple(
            LineRange(
                (page * args.requests + request) * shape.lines,
                min(per_page, args.rows - page * per_page) * record,
            )
            for page in range(pages)
        )
        labels = np.arange(args.rows).tobytes()
        found.append(
            CapturedRows(
                owner=Owner(f"r{request}", 0),
                coding=RAW,
                points=attached.points,
                lines=ranges,
                stored_rows=args.rows,
                positions=labels,
                token_ids=labels,
                writes=args.rows,
                failure=None,
            )
        )
    return segment, attached, found


async def stalls(seen: list[float]) -> None:
    """Seconds by which the loop was late, until cancelled."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(TICK)
        seen.append(time.perf_counter() - before - TICK)


async def main(args: argparse.Namespace) -> dict[int, list[float]]:
    """Deliver everything, a few times; GB a second by the number of threads."""
    _segment, attached, found = captured(args)
    moved = args.requests * args.rows * args.points * args.width * 2
    reader = SharedReader(attached)
    rank = Rank(0, attached, reader)
    lines = (await reader.read(())).lines
    rates: dict[int, list[float]] = {}
    for threads in args.threads:
        fetcher = Fetcher(threads or None)
        seconds, seen = [], list[float]()
        for _ in range(args.repeat):
            watch = asyncio.create_task(stalls(seen))
            start = time.perf_counter()
            deliveries = await fetcher.deliver([[rank]], [[[captured_rows]] for captured_rows in found])
            seconds.append(time.perf_counter() - start)
            watch.cancel()
            assert all(delivery.failure is None for delivery in deliveries)
            for captured_rows, delivery in zip(found, deliveries, strict=True):
                stop = captured_rows.lines[-1].start + captured_rows.lines[-1].count
                size = args.width * 2
                last = lines[stop - -(-size // LINE_BYTES) : stop].flatten()[:size]
                (rows,) = delivery.shards[args.points - 1]
                assert isinstance(rows, torch.Tensor)
                assert torch.equal(rows[-1].view(torch.uint8), last)
            del deliveries
        late = seen or [0.0]
        rates[fetcher.threads] = [moved / 1e9 / second for second in seconds]
        print(
            f"{moved / 1e9:.2f} GB, {fetcher.threads} threads: {', '.join(f'{rate:.2f}' for rate in rates[fetcher.threads])} GB/s; "
            f"the loop was late by {np.quantile(late, 0.99) * 1e3:.2f} ms (99 %), {max(late) * 1e3:.2f} ms at most"
        )
        fetcher.close()
    return rates


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("requests", 24), ("rows", 128), ("points", 36), ("width", 4096), ("repeat", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--threads", type=int, nargs="+", default=[0])
    return parser.parse_args(words)


if __name__ == "__main__":
    asyncio.run(main(arguments()))
