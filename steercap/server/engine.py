"""Engine that vLLM's server calls: requests that use steercap run as jobs and gain results; others pass unchanged."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

import msgspec

from steercap.captures import files
from steercap.captures.handle import CaptureHandle
from steercap.core.plan import EXTRA_ARGS_KEY
from steercap.core.receipt import SteeringReceipt
from steercap.errors import InvalidRequest, SteercapError
from steercap.requests.job import (
    Job,
    Sample,
    enter_sketches,
    handles_of,
    leaving,
    memory_for,
    outputs_of,
    pages_of,
    planned,
    receipts_of,
)
from steercap.requests.preparing import prepare
from steercap.server.call import (
    CURRENT,
    Numbers,
    SteercapField,
    SteercapRequest,
    described,
    entered,
    logits_of,
    receipt_json,
    sketches_json,
)
from steercap.server.folder import CaptureFolder, CaptureStore
from steercap.server.recording import Recorder

if TYPE_CHECKING:
    from steercap.adapters import RequestOutput
    from steercap.core.budget import Reservation
    from steercap.core.spec import CaptureSpec
    from steercap.model import SteerModel

#: Maximum bytes of captures in one answer (`deliver: inline`).
MOST_INLINE: Final = 8 << 20


class ServedEngine:
    """Wrapper of vLLM's engine, to which vLLM's server gives its requests; other attributes are the engine's.

    Args:
        model: the open model.
        captures: store of captures that wait to be fetched.
        translated: function that converts a steercap error to one for which vLLM's server answers the right status.
        folder: folder for rows of requests with `deliver: folder`, None if the operator gave none.
        recorder: recorder of requests without a capture, None if nothing is recorded.

    Attributes:
        failures: number of requests that failed with a steercap error, by its class name.
    """

    def __init__(
        self,
        model: SteerModel,
        captures: CaptureStore,
        translated: Callable[[SteercapError], Exception],
        folder: CaptureFolder | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._model = model
        self._llm: Any = model.engine
        self._captures = captures
        self._translated = translated
        self._folder = folder
        self._recorder = recorder
        self.failures: Counter[str] = Counter()
        self._unembedding = asyncio.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing: the model's opener closes it."""

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request; return the generator of vLLM's outputs. See `AsyncLLM.generate`.

        Raises:
            The translated InvalidRequest: `extra_args`, the body's `vllm_xargs`, has the key of steercap's plans.
        """
        if EXTRA_ARGS_KEY in (sampling_params.extra_args or {}):  # the workers would take it for a plan
            raise self._translated(
                InvalidRequest(
                    f"vllm_xargs[{EXTRA_ARGS_KEY!r}] belongs to steercap; give {EXTRA_ARGS_KEY!r} in the body"
                )
            )
        call = CURRENT.get()
        recorded = self._recorder is not None and self._recorder.wants()
        if call is not None:
            return self._outputs_of(call, prompt, sampling_params, options, request_id if recorded else "")
        if recorded:
            return self._recorded(prompt, sampling_params, request_id, options)
        found: AsyncGenerator[RequestOutput, None] = self._llm.generate(prompt, sampling_params, request_id, **options)
        return found

    async def _recorded(
        self, prompt: Any, params: Any, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request that does not use steercap, recording its rows if there is room."""
        call = SteercapRequest(SteercapField(), "")
        job = await self._recording_job(call, prompt, params, options)
        outputs = (
            self._llm.generate(prompt, params, request_id, **options)
            if job is None
            else self._translating(call, self._run(call, 0, job, request_id))
        )
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def _recording_job(
        self, call: SteercapRequest, prompt: Any, params: Any, options: dict[str, Any]
    ) -> Job | None:
        """Return a job that captures a request's rows for the recorder; None, counted by reason, if it cannot."""
        recorder = self._recorder
        assert recorder is not None
        if call.asked.capture is not None or call.asked.monitors or call.sketches:
            recorder.drop("own_capture")
            return None
        try:
            job = await self._prepared(call, prompt, params, options, recorder.settings.capture)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the request itself goes on
            recorder.refused(error)
            return None
        job = leaving(job, job.engine.admission.budget.pages // 2)
        return job if recorder.fits(job, pages_of(job)) else None

    async def _prepared(
        self, call: SteercapRequest, prompt: Any, params: Any, options: dict[str, Any], capture: CaptureSpec | None
    ) -> Job:
        """Check a request and compile it with the given capture spec to a job.

        Raises:
            InvalidRequest: as for `prepare`.
        """
        from steercap.adapters.prompts import rendered

        left_out = ("prompt_text", "tokenization_kwargs")
        options = {name: value for name, value in options.items() if value is not None and name not in left_out}
        engine, asked = self._model.serving.here(), call.asked
        own: dict[str, Any] = {"options": options, "monitors": asked.monitors, "sketches": call.sketches}
        return await prepare(engine, rendered(prompt), params, capture, asked.steering, **own)

    async def _translating(
        self, call: SteercapRequest, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs; convert steercap errors to those that vLLM's server answers with the right HTTP status."""
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    yield output
        except SteercapError as error:
            call.error = type(error).__name__
            self.failures[call.error] += 1
            raise self._translated(error) from error

    def _outputs_of(
        self, call: SteercapRequest, prompt: Any, params: Any, options: dict[str, Any], recorded: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Return the outputs of a request that uses steercap; `recorded` is its id if it is to be recorded, else ""."""
        first = call.prompts * params.n
        call.prompts += 1

        async def outputs() -> AsyncGenerator[RequestOutput, None]:
            job = await self._recording_job(call, prompt, params, options) if recorded else None
            if call.asked.capture is not None:
                self._room(call).require_room(call.owner)
            name = recorded if job is not None else ""
            job = job or await self._prepared(call, prompt, params, options, call.asked.capture)
            async with aclosing(self._run(call, first, job, name)) as found:
                async for output in found:
                    yield output

        return self._translating(call, outputs())

    async def _run(
        self, call: SteercapRequest, first: int, job: Job, recorded: str = ""
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a job; the last one after its edits are confirmed and its rows delivered.

        `first` is the index of its first choice in the answer; with an id `recorded` the recorder gets the rows
        instead.
        """
        reservation = await memory_for(job, object())
        ours = job.plan is not None  # the workers hold state of the job that we must free
        texts: dict[int, str] = {}
        tokens: dict[int, list[int]] = {}
        numbers = Numbers(call, first, job)
        try:
            async with (
                planned(job) as complete,
                aclosing(outputs_of(job, complete, reservation, partial=None)) as outputs,
            ):
                async for output in outputs:
                    add_output(output, job.params, texts, tokens)
                    samples = [(index, len(ids)) for index, ids in sorted(tokens.items())]
                    receipts = await receipts_of(job, complete.plan, samples, ended=output.finished)
                    await numbers.take(tokens)
                    if output.finished:
                        await enter_sketches(job, sorted(tokens.items()))
                        ours = False
                        ended = [Sample(index, texts[index], ids) for index, ids in sorted(tokens.items())]
                        with entered(call.sketches):
                            found = await self._results_of(call, job, ended, reservation, receipts, recorded=recorded)
                        call.results += [
                            {"choice": first + sample.index} | one for sample, one in zip(ended, found, strict=True)
                        ]
                    yield output
        finally:
            if ours and job.plan is not None:
                job.engine.abandon(job.plan, reservation)
                if recorded and self._recorder is not None:
                    self._recorder.drop("cancelled")

    async def _results_of(
        self,
        call: SteercapRequest,
        job: Job,
        samples: Sequence[Sample],
        reservation: Reservation | None,
        receipts: Sequence[SteeringReceipt] | None,
        *,
        recorded: str,
    ) -> list[dict[str, Any]]:
        """Return each sample's result for the answer; with an id `recorded` the recorder gets the rows instead."""
        entered = sketches_json(call.asked.sketches, call.sketches)
        found: list[dict[str, Any]] = [
            {**entered, **receipt_json(receipt)} for _, receipt in zip_longest(samples, receipts or ())
        ]
        if job.watch is not None:
            for one, sample in zip(found, samples, strict=True):
                one["monitors"] = [msgspec.to_builtins(report) for report in job.watch.reports(sample.index)]
        if reservation is None:
            return found
        if not job.hands_over:
            assert job.plan is not None
            job.engine.done_with(job.plan, reservation)
            return found
        handles = handles_of(job, samples, reservation, receipts)
        if recorded and self._recorder is not None:
            self._recorder.take(handles, recorded)
            return found
        try:
            await self._model.fetch_captures_batch(handles)
            for one, handle, place in zip(found, handles, await self._placed(call, handles), strict=True):
                one["capture"] = described(handle, place)
                if call.asked.logits:
                    async with self._unembedding:  # one at a time, for their memory
                        one["capture"]["_logits"] = await logits_of(
                            handle, self._model.serving.here().vllm.vocabulary, partial(self._put_in_store, call)
                        )
        finally:
            for handle in handles:
                handle.release()
        return found

    def _room(self, call: SteercapRequest) -> CaptureStore | CaptureFolder:
        """Return where a request's rows are delivered: the server's folder or the store."""
        return self._folder if self._folder is not None and call.asked.delivery == "folder" else self._captures

    async def _placed(self, call: SteercapRequest, handles: Sequence[CaptureHandle]) -> list[dict[str, Any]]:
        """Deliver each handle's rows; return the fields that locate them in the answer, in order."""
        if isinstance(folder := self._room(call), CaptureFolder):
            written = await folder.write(handles, call.owner)
            return [{"file": one.file, "bytes": one.bytes, "sha256": one.sha256} for one in written]
        return [self._put(call, await asyncio.to_thread(files.encode, handle.as_saved())) for handle in handles]

    def _put(self, call: SteercapRequest, content: bytes) -> dict[str, Any]:
        """Deliver a file inline if asked for, else by the store; return the fields that locate it in the answer.

        Raises:
            InvalidRequest: the inline files exceed `MOST_INLINE`.
            CaptureMemoryFull: the store has no room.
        """
        if call.asked.delivery == "inline":
            call.inline += len(content)
            if call.inline > MOST_INLINE:
                raise InvalidRequest(
                    f"the rows take {call.inline:,} bytes, and an answer holds {MOST_INLINE:,}; leave deliver= out "
                    "and fetch them, or keep fewer"
                )
            return {"bytes": len(content), "data": base64.b64encode(content).decode()}
        return self._put_in_store(call, content)

    def _put_in_store(self, call: SteercapRequest, content: bytes) -> dict[str, Any]:
        """Put a file into the store; return the fields that locate it. It is deleted if the answer does not arrive.

        Raises:
            CaptureMemoryFull: the store has no room.
        """
        place = self._captures.offer(content, call.owner)
        call.unsaid.append(partial(self._captures.remove, place["id"], call.owner))
        return place


def add_output(output: RequestOutput, params: Any, texts: dict[int, str], tokens: dict[int, list[int]]) -> None:
    """Add an output's texts and token ids to its samples', by sample index; outputs are cumulative or deltas."""
    new = params.output_kind.name == "DELTA"
    for sample in output.outputs:
        texts[sample.index] = (texts.get(sample.index, "") if new else "") + sample.text
        if new:
            tokens.setdefault(sample.index, []).extend(sample.token_ids)
        else:
            tokens[sample.index] = [*sample.token_ids]
