"""Per-token numbers that are streamed with generated tokens: projections of rows, and crossings of monitors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from steercap.captures.arriving import Arrived
from steercap.requests.job import Job, rows_so_far
from steercap.server.call import Live, SteercapRequest


class Numbers:
    """Streamed numbers of one job.

    Args:
        call: call that the numbers belong to.
        first: index of the job's first choice in the call.
        job: the running job; numbers are only streamed if its answer is a stream.
    """

    def __init__(self, call: SteercapRequest, first: int, job: Job) -> None:
        self._call, self._first, self._job = call, first, job
        params: Any = job.params
        self._streams = params.output_kind.name == "DELTA"
        self._projects = job.hands_over and job.projected is not None and self._streams
        self._tokens: dict[int, int] = {}
        self._rows: dict[int, int] = {}
        self._crossings: dict[int, int] = {}

    async def take(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Queue the new numbers for the stream.

        Args:
            tokens: tokens generated so far, by the index of the sample.

        Raises:
            CaptureIncomplete, CaptureNotFinite: a row is missing or invalid.
        """
        if self._projects:
            grown = {index: ids for index, ids in tokens.items() if len(ids) > self._tokens.get(index, 0)}
            self._tokens |= {index: len(ids) for index, ids in grown.items()}
            some = {index: (ids, self._rows.get(index, 0)) for index, ids in grown.items()}
            for index, came in (await rows_so_far(self._job, some)).items():
                self._rows[index] = self._rows.get(index, 0) + len(came.positions)
                if len(came.positions):
                    self._put(index, "scores", self._scores(came))
        if self._streams and self._job.watch is not None:
            for index in tokens:
                found = self._job.watch.crossings(index)
                for one in found[self._crossings.get(index, 0) :]:
                    self._put(index, "crossings", msgspec.to_builtins(one))
                self._crossings[index] = len(found)

    def _scores(self, came: Arrived) -> dict[str, Any]:
        """Return the projections of rows, by point and direction."""
        assert self._job.projected is not None
        names = self._job.projected.names
        scores = {
            f"{point.site}.{point.layer}": dict(zip(names, came.captures[point].T.tolist(), strict=True))
            for point in came.captures
        }
        return {"positions": came.positions.tolist(), "scores": scores}

    def _put(self, index: int, kind: str, content: dict[str, Any]) -> None:
        self._call.live.append(Live(self._first + index, kind, content))
