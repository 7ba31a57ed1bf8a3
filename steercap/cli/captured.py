"""Captures of many prompts in a folder, resumable; if the folder becomes unwritable, they go to a temporary one."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from steercap.cli.prompts import run_each
from steercap.core.protocols import Count

if TYPE_CHECKING:
    from steercap.captures.handle import CaptureHandle
    from steercap.captures.manifest import Layout, Manifest, ManifestRequest
    from steercap.captures.saving import CaptureRun
    from steercap.cli.prompts import Prompt
    from steercap.cli.terminal import Terminal
    from steercap.core.spec import CaptureSpec
    from steercap.model import SteerModel
    from steercap.requests.call_types import Generation
    from steercap.steering.spec import SteeringSpec


class Captured(msgspec.Struct, frozen=True):
    """Summary of one prompt's capture.

    Args:
        file: path of the file.
        prompt: text of the prompt.
        text: generated text.
        points: number of points.
        rows: number of rows at each point.
        hidden: number of elements of a row.
        dtype: dtype of the elements.
        bytes: size of all rows.
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
    """Writer of captures to a run's folder; if the folder becomes unwritable, to a run in a temporary folder.

    Args:
        folder: folder of the run.
        terminal: terminal for messages.
        afresh: True to remove an existing run first; else it is resumed.
    """

    def __init__(self, folder: Path, terminal: Terminal, *, afresh: bool = False) -> None:
        self._folder, self._terminal, self._afresh = folder, terminal, afresh
        self._begun: dict[str, Any] = {}
        self._runs: list[CaptureRun] = []
        #: Error of the first folder, if some captures are in the temporary one.
        self.error: OSError | None = None

    @contextmanager
    def opened(self, **begun: Any) -> Iterator[Manifest]:
        """Open the run, as `CaptureRun(folder, **begun)`, and close it after the block; yield its captures' manifest.

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

    def save(self, handle: CaptureHandle, name: str) -> tuple[Path, Layout, ManifestRequest]:
        """Write a capture as the file `name` and list it; return the folder, and its layout and entry in the manifest.

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

    def discard(self, names: list[str]) -> None:
        """Remove entries and files of the run, whose prompts are captured again."""
        if not names:
            return
        self._terminal.say(f"{len(names)} captures are lost or changed, such as {names[0]}, and are captured again")
        try:
            self._runs[-1].discard(names)
        except OSError as error:
            self._elsewhere(error)

    def _elsewhere(self, error: OSError) -> CaptureRun:
        """Begin a run in a temporary folder after `error`; raise it if the run is in a temporary folder already."""
        if self.error is not None:
            raise error
        self.error = error
        run = self._begin(Path(tempfile.mkdtemp(prefix="steercap-captures-")))
        self._terminal.say(f"{error}; the captures so far are in {run.folder}, and the same command resumes")
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
    """Capture every prompt, writing each capture as its request ends; return their summaries, in order of prompts.

    `out`, a folder or its store, receives `0000.safetensors` and so on, see `CaptureHandle.load`, and their manifest.
    A folder with some of the same captures is resumed: prompts that its manifest lists are skipped, unless the file is
    lost, of another size, or of another request.

    Raises:
        RunDiffers: the folder holds other captures.
        The errors of `SteerModel.generate`.
    """
    found: dict[int, Captured] = {}
    store = out if isinstance(out, Store) else Store(out, terminal)
    digits = max(4, len(str(len(prompts) - 1)))
    names = [f"{number:0{digits}}.safetensors" for number in range(len(prompts))]
    engine = model.serving.here()
    asked = {**arguments_of_call(prompts, params, spec), **arguments_of_model(model, spec, steering)}

    def take(place: int, _raw: Generation | None, handle: CaptureHandle | None) -> None:
        assert handle is not None
        number = todo[place]
        written = store.save(handle, names[number])
        found[number] = captured_of(*written, prompts[number], handle.text)
        count.add()

    with store.opened(model=engine.vllm.model_name, asked=asked) as there, terminal.progress() as tell:
        listed = {request: there.header_of(request) for request in there.requests if request.file in names}
        store.discard([request.file for request, header in listed.items() if header is None])
        for request, header in listed.items():
            if header is not None:
                number, layout = names.index(request.file), there.layout_of(request)
                found[number] = captured_of(there.folder, layout, request, prompts[number], header.text)
        todo = [number for number in range(len(prompts)) if number not in found]
        count = Count("capturing", len(prompts), len(found), tell)
        await run_each(model, [prompts[number] for number in todo], params, take, steering=steering, capture=spec)
    return [found[number] for number in sorted(found)]


#: Arguments that a folder's manifest names only where they are given.
_FURTHER: Final = ("attention", "at", "before_edits", "sae")


def arguments_of_call(prompts: list[Prompt], params: dict[str, Any], spec: CaptureSpec) -> dict[str, Any]:
    """Return the inputs of captures that are known before the model is open, to compare with a folder's manifest.

    Returns:
        The SHA-256 of all prompts, the sampling parameters, and the spec's layers, sites, tokens and reduction, by
        name, and further arguments that it has; `arguments_of_model` returns those that need the model.
    """
    known = [prompt.content if prompt.special is None else [prompt.content, prompt.special] for prompt in prompts]
    contents = msgspec.json.encode(known)
    saes = [sae.encoder.digest().hex() for sae in spec.saes] or None
    further = dict(zip(_FURTHER, (spec.attention, spec.at, spec.before_edits or None, saes), strict=True))
    return {
        "prompts": hashlib.sha256(contents).hexdigest(),
        "sampling": params,
        "layers": repr(spec.layers),
        "sites": spec.sites,
        "tokens": f"TokenSelection(terms={spec.selection.terms!r})",  # in manifests, whatever the class is called
        "reduce": spec.reduce,
        **{name: value for name, value in further.items() if value is not None},  # older manifests have no such keys
    }


def arguments_of_model(model: SteerModel, spec: CaptureSpec, steering: SteeringSpec | None) -> dict[str, Any]:
    """Return the inputs of captures that need an open model: model, codec, digests of edits and directions, and the
    tokens that are steered.
    """
    engine = model.serving.here()
    projected = engine.compiler.projected(spec)
    return {
        "model": model.identity(),
        "codec": str(engine.compiler.coding(spec)),
        **({"steering": None} if steering is None else engine.compiler.lowered(steering).described),
        "directions": None if projected is None else projected.lowered.digest.hex(),
    }


def captured_of(folder: Path, layout: Layout, request: ManifestRequest, prompt: Prompt, text: str) -> Captured:
    """Return the summary of one prompt's capture, from the manifest of its run; `text` is the generated text."""
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


def check_goes_on(out: Path, arguments: dict[str, Any]) -> bool:
    """Return whether a folder has captures with these inputs (of `arguments_of_call`), which a call would resume.

    Raises:
        RunDiffers: it holds captures with other inputs.
        InvalidFile: its manifest cannot be read.
    """
    from steercap.captures.manifest import CAPTURES, FILE

    if not (out / FILE).exists():
        return False
    plain = msgspec.json.decode(msgspec.json.encode(arguments))
    left_out = {*_FURTHER} - {*plain}

    def asked(found: Any) -> Any:
        kept = {name: value for name, value in found.asked.items() if name not in left_out}
        return msgspec.structs.replace(found, asked={**kept, **plain})

    CAPTURES.check_same(out, asked)
    return True
