"""Checks of a command's settings before its engine is started; and the choice of a warm engine in its place."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import typer

from steercap.cli.engines import (
    SMOLLM2,
    ModelOptions,
    ReachOptions,
    as_stored,
    differing,
    elsewhere,
    located,
    opened,
    until_ready,
)
from steercap.cli.parsing import refuse
from steercap.cli.terminal import Terminal
from steercap.core.values import check_seed
from steercap.errors import InvalidFile, InvalidRequest, InvalidSetting, InvalidVector
from steercap.files import warm

if TYPE_CHECKING:
    from steercap.config import Settings
    from steercap.core.spec import CaptureSpec, Layers, Point
    from steercap.engine.checkpoint import Checkpoint
    from steercap.server.record_settings import RecordSettings
    from steercap.steering.directions import DirectionSet
    from steercap.steering.spec import SteeringSpec

#: Sites whose rows are as wide as the residual stream, which config.json gives.
HIDDEN_WIDTH_SITES = ("embed", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "final_norm")
#: Engine arguments of vLLM that override a model's config.json.
OVERRIDES = ("hf_overrides", "hf_config_path")
#: Engine arguments in which a warm engine may differ from a command that leaves them out.
TAKEN: Final = frozenset(
    {
        *("dtype", "max_model_len", "enforce_eager", "gpu_memory_utilization", "kv_cache_memory_bytes"),
        *("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "pipeline_parallel_size"),
    }
)
#: Settings of steercap in which a warm engine must equal a command even if it leaves them out: they determine rows.
COMPARED: Final = frozenset({"codec", "codec_k", "codec_seed"})


@dataclass(frozen=True)
class Preflight:
    """Facts about an engine that are known before it is started, and checks against them.

    Args:
        model: checkpoint, from its config.json; layers and width are 0 if unknown, and then nothing is checked.
        settings: steercap's own settings.
    """

    model: Checkpoint
    settings: Settings

    @property
    def points(self) -> tuple[Point, ...]:
        """Points at which the engine will have taps.

        Raises:
            LayerOutOfRange: the settings name a layer that the model does not have.
        """
        return self.settings.armed(self.model.layers)

    def check_capture(self, spec: CaptureSpec) -> None:
        """Check that the rows of a capture spec can be captured.

        Raises:
            UnknownName, LayerOutOfRange, PointNotArmed: a point of the spec does not exist, or has no tap.
            InvalidSpec: there are no directions for a layer that is asked for, or a codec keeps more numbers than a row
                of the stream has.
            InvalidVector: the directions are not as wide as the rows.
        """
        if self.model.layers:
            from steercap.architectures.sites import SITES, placed
            from steercap.core.spec import check_armed
            from steercap.engine.compiler import codec_for
            from steercap.errors import InvalidSpec
            from steercap.steering.lowering import points_of

            wanted = spec.points if spec.project is None else partial(points_of, spec)
            coding, points = codec_for(spec, self.settings), placed(wanted(self.model.layers), self.model.layers)
            check_armed(points, self.points, SITES)
            wide = [point for point in points if point.site in HIDDEN_WIDTH_SITES and 0 < self.model.width < coding.k]
            if wide and spec.project is None:
                raise InvalidSpec(
                    f"codec={coding.encoding!r} with k={coding.k} keeps more numbers than the {self.model.width} of a "
                    f"row at {wide[0]}; give a smaller k="
                )
            if spec.project is not None and spec.project.site in HIDDEN_WIDTH_SITES:
                self.check_width(spec.project.width, "--project")

    def check_recorded(self, settings: RecordSettings) -> None:
        """Check that the rows that a server records can be captured, in their codecs.

        Raises:
            typer.BadParameter: rows of a layer or site cannot be captured, or not in their codec.
        """
        from steercap.core.spec import resolve_layers
        from steercap.errors import SteercapError

        option = "--record-layers"
        try:
            if self.model.layers:
                resolve_layers(settings.layers, self.model.layers)
            option = "--record-site"
            for spec in (settings.capture, *settings.codecs.specs(layers=settings.layers)):
                self.check_capture(spec)
        except SteercapError as error:
            raise typer.BadParameter(str(error), param_hint=option) from error

    def check_layers(self, layers: Iterable[int], site: str) -> None:
        """Check that the layers have taps at a site.

        Raises:
            UnknownName, LayerOutOfRange, PointNotArmed: a tap is missing.
        """
        from steercap.core.spec import CaptureSpec

        self.check_capture(CaptureSpec(layers=tuple(layers), sites=site))

    def check_steering(self, spec: SteeringSpec | None) -> None:
        """Check that the edits of a spec fit the model; nothing is checked for None, or sites of unknown width.

        Raises:
            The errors of `steercap.steering.lowering.lower`.
        """
        if spec is not None and self.model.layers and self.model.width:
            from steercap.core.schema import PointSchema
            from steercap.steering.lowering import lower

            if any(edit.site not in HIDDEN_WIDTH_SITES for edit in spec.of_rows()):
                return  # the width of other rows is known only when the model is loaded
            schema = PointSchema((self.model.width,), self.model.dtype or "float32")
            lower(
                spec,
                armed={point: place for place, point in enumerate(self.points)},
                schemas=dict.fromkeys(self.points, schema),
                num_layers=self.model.layers,
                edits_per_point=self.settings.edits_per_point,
            )

    def check_directions(self, directions: DirectionSet, layers: Layers | None, what: str) -> None:
        """Check directions' layers (None: all), if the model's are known, and width; `what` is as for `check_width`.

        Raises:
            LayerOutOfRange, PointNotArmed: a layer that the model or the directions do not have.
            InvalidVector: the directions are not as wide as the rows.
        """
        from steercap.core.spec import resolve_layers

        if self.model.layers:
            at = directions.layers if layers is None else resolve_layers(layers, self.model.layers)
            directions.at_layers(at)
            self.check_layers(at, directions.site)
        if directions.site in HIDDEN_WIDTH_SITES:
            self.check_width(directions.width, what)

    def check_width(self, width: int, what: str) -> None:
        """Check that vectors of `width` elements are as wide as the residual stream; `what` names them in the error.

        Raises:
            InvalidVector: the widths differ.
        """
        if self.model.width and width != self.model.width:
            raise InvalidVector(
                f"{what}: the vectors have width {width}, rows of {self.model.name} have {self.model.width}; they were "
                "made for another model"
            )


def preflight(options: ModelOptions, **settings: Any) -> Preflight:
    """Return the facts known about the engine that `opened` would start with the same arguments; nothing is started.

    Raises:
        ModelNotLoaded: the model can only be on this machine, and is not.
        InvalidSetting, UnknownName, LayerOutOfRange: a setting is not valid, or names a layer that the model lacks.
    """
    from steercap.config import Settings, environment

    arguments = {**settings, **options.arguments()}
    names = {field.name for field in dataclasses.fields(Settings)}
    ours = environment.settings(**{name: value for name, value in arguments.items() if name in names})
    model = options.look_up()
    if any(arguments.get(name) for name in OVERRIDES):
        import msgspec

        model = msgspec.structs.replace(model, layers=0, width=0)
    if model.layers:
        ours.armed(model.layers)
    return Preflight(model, ours)


def check_sampling(*, temperature: float, seed: int | None = None, samples: int = 1, max_tokens: int = 1) -> None:
    """Check that vLLM accepts these sampling parameters; `samples` is the number of answers per prompt.

    Raises:
        typer.BadParameter: a parameter is out of range.
    """
    if not math.isfinite(temperature) or temperature < 0:
        raise typer.BadParameter(f"{temperature}; give a finite number, 0 or above", param_hint="temperature")
    try:
        check_seed(seed, samples)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error), param_hint="--seed") from error
    if not 1 <= max_tokens < 1 << 63:
        raise typer.BadParameter(f"{max_tokens}; give a whole number from 1 to 2**63 - 1", param_hint="max_tokens")


@asynccontextmanager
async def reached(options: ReachOptions, terminal: Terminal, **settings: Any) -> AsyncIterator[Any]:
    """Open the model for the block: the server at --url, a warm engine that fits, or else an engine of the command.

    Args:
        options, terminal, settings: as for `opened`.

    Yields:
        A RemoteModel for a server or warm engine, else a SteerModel.

    Raises:
        typer.BadParameter: options of an engine, or of its memory for rows, beside --url; an API key for neither.
        The errors of `SteerModel.connect`, or of `opened`.
    """
    url, words = options.url, [*options.flags(), *(f"--{name.replace('_', '-')}" for name in settings)]
    if url is None:
        engine, reason = await asyncio.to_thread(fitting, options, settings)
        if engine is not None:
            with terminal.status(f"waiting for the warm engine of {engine.model}"):
                url = await until_ready(engine)
            reason = "" if url else f"the warm engine of {engine.model} ended; its log: {engine.log}"
        else:
            refuse(reason or "no engine is warm that would take it", {"--api-key": options.api_key})
        if url is None:
            async with opened(options, terminal, reason=reason, **settings) as model:
                yield model
            return
    elif said := [one for one in words if one.startswith("--") and one not in {"--model", "--url", "--sites"}]:
        raise typer.BadParameter("the server at --url decides this; leave it out", param_hint=said[0])
    from steercap.model import SteerModel

    named = options.model if options.url and options.model != SMOLLM2 else None
    async with SteerModel.connect(url, api_key=options.api_key, model=named) as remote:
        terminal.say(
            f"using {remote.url}: {remote.served_name}, {remote.origin['dtype']}, {remote.max_model_len} tokens"
        )
        yield remote


def fitting(options: ReachOptions, settings: Mapping[str, Any]) -> tuple[warm.WarmEngine | None, str]:
    """Return a warm engine that fits, and ""; or None, and the reason why none fits, "" if there is no warm engine."""
    try:
        there = warm.engines()
    except (InvalidFile, InvalidSetting, OSError) as error:
        return None, str(error)
    if not there:
        return None, ""
    path = warm.identified(str(located(options.model)))
    mine = [one for one in there if one.path == path]
    if not mine:
        return None, f"the warm engine is of {', '.join(one.model for one in there)}"
    reason = _mismatch(mine[0], options, settings)
    return (None, f"the warm engine differs: {reason}") if reason else (mine[0], "")


def _mismatch(engine: warm.WarmEngine, options: ReachOptions, settings: Mapping[str, Any]) -> str:
    """Return the reason why a warm engine of the model does not fit the command, "" if it fits."""
    from steercap.config import Settings, environment

    reason = warm.outdated(engine)
    if reason := f"{reason}; renew it with `steercap down` and `up`" if reason else elsewhere(engine):
        return reason
    if engine.flags:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in engine.flags)
        return f"it was started with {flags}, which commands do not expect; --url {engine.url} uses it anyway"
    if engine.keyed and options.api_key is None:
        return "it wants an API key; give --api-key"
    given = {**settings, **options.said()}
    names = {field.name for field in dataclasses.fields(Settings)}
    own = {name: value for name, value in given.items() if name in names}
    ours = environment.settings(**own)
    if lacking := set(ours.sites) - set(engine.settings["sites"]):
        return f"it has no site {', '.join(sorted(lacking))}; start it by `steercap up` with --sites"
    said = COMPARED | own.keys() | environment.from_environment().keys()
    for name in sorted(said - {"sites"}):
        here, known = as_stored(getattr(ours, name)), engine.settings[name]
        if here != known and not (name == "layers" and known == "all"):
            return f"{name}: {known!r} there, {here!r} asked for"
    return differing(engine, {name: given[name] for name in given.keys() - names}, TAKEN)
