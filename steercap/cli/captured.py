"""Captures of many prompts in a folder that goes on where it was, or in another when it cannot be written to."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from steercap.cli.requests import run_each

if TYPE_CHECKING:
    from steercap.captures.handle import CaptureHandle
    from steercap.captures.manifest import Layout, Manifest, Request
    from steercap.captures.saving import CaptureRun
    from steercap.cli.prompts import Prompt
    from steercap.cli.terminal import Terminal
    from steercap.core.spec import CaptureSpec
    from steercap.model import SteerModel
    from steercap.requests.answers import RawOutput
    from steercap.steering.spec import SteeringSpec


class Captured(msgspec.Struct, frozen=True):
    """What was kept of one prompt.

    Args:
        file: where.
        prompt: what was asked.
        text: what was generated.
        points: how many.
        rows: at each point.
        hidden: elements of a row.
        dtype: of its elements.
        bytes: of all rows.
    """

    file: str
    prompt: str
    text: str
    points: int
    rows: int
    hidden: int
    dtype: str
    bytes: int


class Store:
    """The run that captures are written to; where it cannot be written to any more, another one beneath the temporary
    folder.

    Args:
        folder: where they are to be.
        terminal: for what is said.
        afresh: whether to remove a run that is there first; else it goes on.
    """

    def __init__(self, folder: Path, terminal: Terminal, *, afresh: bool = False) -> None:
        self._folder, self._terminal, self._afresh = folder, terminal, afresh
        self._begun: dict[str, Any] = {}
        self._runs: list[CaptureRun] = []
        #: Why not all of them are where they are to be.
        self.error: OSError | None = None

    @contextmanager
    def opened(self, **begun: Any) -> Iterator[Manifest]:
        """Have the run open, as `CaptureRun(folder, **begun)`; yields what it holds already.

        Raises:
            The errors of `CaptureRun`.
        """
        from steercap.captures.saving import forget_run

        if self._afresh and self._folder.exists():
            forget_run(self._folder)
        self._begun = begun
        try:
            run = self._begin(self._folder)
        except OSError as error:
            run = self._elsewhere(error)
        try:
            yield run.manifest
        finally:
            for run in self._runs:
                run.close()

    def save(self, handle: CaptureHandle, name: str) -> tuple[Path, Layout, Request]:
        """Write rows under a name, and list them; returns where, and what the manifest says.

        Raises:
            OSError: neither folder can be written to.
        """
        run = self._runs[-1]
        try:
            request = run.add(handle, name)
        except OSError as error:
            run = self._elsewhere(error)
            request = run.add(handle, name)
        return run.folder, run.layout_of(request), request

    def _elsewhere(self, error: OSError) -> CaptureRun:
        """Go on beneath the temporary folder, once."""
        if self.error is not None:
            raise error
        self.error = error
        run = self._begin(Path(tempfile.mkdtemp(prefix="steercap-captures-")))
        self._terminal.say(f"{error}; captures go on in {run.folder}")
        return run

    def _begin(self, folder: Path) -> CaptureRun:
        from steercap.captures.saving import CaptureRun

        run = CaptureRun(folder, **self._begun)
        self._runs.append(run)
        return run


async def capture_to(
    model: SteerModel,
    prompts: list[Prompt],
    params: dict[str, Any],
    spec: CaptureSpec,
    out: Path | Store,
    terminal: Terminal,
    *,
    steering: SteeringSpec | None = None,
) -> list[Captured]:
    """Capture every prompt, and write each down as it ends; what is written needs no memory.

    A folder that holds a part of the same captures goes on: what its manifest lists is not asked for again.

    Args:
        model: an open model.
        prompts: texts and conversations.
        params: fields of vLLM's SamplingParams.
        spec: what is kept.
        out: folder for `0000.safetensors` and so on, see `CaptureHandle.load`, and their manifest; or a store of it.
        terminal: for the bar.
        steering: what is changed.

    Raises:
        RunDiffers: the folder holds other captures.
        The errors of `SteerModel.generate`.
    """
    from steercap.captures.files import read_header

    found: dict[int, Captured] = {}
    store = out if isinstance(out, Store) else Store(out, terminal)
    digits = max(4, len(str(len(prompts) - 1)))
    names = [f"{number:0{digits}}.safetensors" for number in range(len(prompts))]
    engine = model.serving.here()
    asked = {**asked_before(prompts, params, spec), **asked_of(model, spec, steering)}

    def take(place: int, _raw: RawOutput | None, handle: CaptureHandle | None) -> None:
        assert handle is not None
        number = todo[place]
        written = store.save(handle, names[number])
        found[number] = captured_of(*written, prompts[number], handle.text)
        bar.advance(task)

    with store.opened(model=engine.vllm.model_name, asked=asked) as there, terminal.progress() as bar:
        for request in there.requests:
            if request.file in names:
                number, header = names.index(request.file), read_header(there.folder / request.file)
                layout = there.layout_of(request)
                found[number] = captured_of(there.folder, layout, request, prompts[number], header.text)
        todo = [number for number in range(len(prompts)) if number not in found]
        task = bar.add_task("capturing", total=len(prompts), completed=len(found))
        await run_each(model, [prompts[number] for number in todo], params, take, steering=steering, capture=spec)
    return [found[number] for number in sorted(found)]


def asked_before(prompts: list[Prompt], params: dict[str, Any], spec: CaptureSpec) -> dict[str, Any]:
    """What captures depend on, so far as it is known before the model is open: plain data for a manifest."""
    known = [prompt.content if prompt.special is None else [prompt.content, prompt.special] for prompt in prompts]
    contents = msgspec.json.encode(known)
    return {
        "prompts": hashlib.sha256(contents).hexdigest(),
        "sampling": params,
        "layers": repr(spec.layers),
        "sites": spec.sites,
        "tokens": f"TokenSelection(terms={spec.selection.terms!r})",  # in manifests, whatever the class is called
        "reduce": spec.reduce,
    }


def asked_of(model: SteerModel, spec: CaptureSpec, steering: SteeringSpec | None) -> dict[str, Any]:
    """The rest of it: the model, how rows are stored, and digests of what is changed and projected on."""
    engine = model.serving.here()
    projected = engine.projected(spec)
    return {
        "model": model.identity(),
        "codec": str(engine.coding(spec)),
        "steering": None if steering is None else engine.lowered(steering).digest.hex(),
        "directions": None if projected is None else projected.lowered.digest.hex(),
    }


def captured_of(folder: Path, layout: Layout, request: Request, prompt: Prompt, text: str) -> Captured:
    """What was kept of one prompt, as the manifest of its run has it."""
    first = next(iter(layout.points[0].tensors.values()))
    return Captured(
        file=str(folder / request.file),
        prompt=prompt.shown,
        text=text,
        points=len(layout.points),
        rows=request.rows,
        hidden=prod(first.shape),
        dtype=first.dtype,
        bytes=request.rows * layout.row_bytes,
    )


def check_goes_on(out: Path, asked: dict[str, Any]) -> bool:
    """Whether a folder holds captures that were asked alike, as far as is known before the model is open.

    Raises:
        RunDiffers: it holds others.
        InvalidFile: its manifest cannot be read.
    """
    from steercap.captures.manifest import CAPTURES, FILE

    if not (out / FILE).exists():
        return False
    plain = msgspec.json.decode(msgspec.json.encode(asked))
    CAPTURES.check_same(out, lambda found: msgspec.structs.replace(found, asked={**found.asked, **plain}))
    return True
