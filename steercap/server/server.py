"""Start and run of one server: vLLM's OpenAI-compatible server over an open model."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from steercap.adapters.entry import quieten
from steercap.adapters.launch import QUIET
from steercap.adapters.releases import importing
from steercap.client.compiling import engine_description
from steercap.concurrency.heartbeat import watching
from steercap.core.display import span
from steercap.core.extras import extra
from steercap.core.names import require_upload_name, variables_of
from steercap.errors import EngineDied, InvalidFile, InvalidSetting
from steercap.files.fingerprint import files_of, nearest_path, surroundings, weights_digest
from steercap.files.warm import WarmEngine, announced, code, identified, socket_of, write
from steercap.model import SteerModel
from steercap.server.asks import steering_of
from steercap.server.engine import ServedEngine
from steercap.server.folder import KEY_BYTES, STORE_BYTES, TIME_TO_LIVE, CaptureFolder, CaptureStore
from steercap.server.folder import MOST_BYTES as FOLDER_BYTES
from steercap.server.folder import MOST_BYTES_OF_A_KEY as FOLDER_BYTES_OF_A_KEY
from steercap.server.library import OPERATOR, Library, Presets
from steercap.server.middleware import PATHS, Keyless, OptOut, SteercapRoute
from steercap.server.passthrough_routes import PassthroughRoute
from steercap.server.record_settings import RecordSettings
from steercap.server.recording import Recorder
from steercap.server.sketch_store import SketchStore
from steercap.steering.edits.add import Add
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from fastapi import FastAPI

_LOG: Final = logging.getLogger(__name__)
#: Engine arguments that a server sets itself, left out when a warm engine is compared with a command's options.
OF_SERVERS: Final = frozenset({"hf_token", "mm_processor_cache_gb", "served_model_name", "use_tqdm_on_load"})


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server: named content and limits.

    Args:
        vectors: files of vectors, directions or steering for all clients, by name.
        saes: folders of SAEs that clients may use, by name.
        presets: steering by name, as requests give it: `{"calm": {"edits": [...]}}`, or the name of one of `vectors`.
        unfetched_seconds: seconds until a capture expires, and a sketch that nothing uses.
        unfetched_bytes: maximum bytes of captures that wait to be fetched.
        unfetched_bytes_of_a_key: maximum bytes of such captures of one API key.
        folder: folder for rows of requests with `deliver: folder`; None to refuse these.
        folder_bytes: maximum bytes of files in the folder.
        folder_bytes_of_a_key: maximum bytes that requests of one API key may write to it.
        record: settings of the recorder of requests that do not use steercap; None to record nothing.
        idle_seconds: seconds without a request after which the server ends; None for never.
        warm: digest of the options of a warm engine, which listens on a Unix socket and is announced; None for a server
            that is not announced. See `steercap.files.warm`.
    """

    vectors: Mapping[str, Path] = field(default_factory=dict)
    saes: Mapping[str, Path] = field(default_factory=dict)
    presets: Mapping[str, Any] = field(default_factory=dict)
    unfetched_seconds: float = TIME_TO_LIVE
    unfetched_bytes: int = STORE_BYTES
    unfetched_bytes_of_a_key: int = KEY_BYTES
    folder: Path | None = None
    folder_bytes: int = FOLDER_BYTES
    folder_bytes_of_a_key: int = FOLDER_BYTES_OF_A_KEY
    record: RecordSettings | None = None
    idle_seconds: float | None = None
    warm: str | None = None


@dataclass(frozen=True)
class Names:
    """Named content that the operator gave: vectors and SAEs in a library, and presets."""

    library: Library
    presets: Mapping[str, SteeringSpec]

    @staticmethod
    def of(settings: ServerSettings) -> Names:
        """Read the files that settings name; needs no model, so that it can run before the engine's start.

        Raises:
            InvalidSpec: an invalid name or preset.
            InvalidFile: a file of vectors, or of an SAE, cannot be used.
        """
        with extra("cuda", "cpu"):
            from steercap.server.statistics_routes import loaded

        library = Library(folder=settings.folder is not None, saes=loaded(settings.saes))
        for name, path in settings.vectors.items():
            try:
                library.add(name, OPERATOR, path.read_bytes())
            except (InvalidFile, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise InvalidFile(f"vectors {name}={path}: {reason}{nearest_path(path)}") from error
        for name in settings.presets:
            require_upload_name(name, "preset")
        presets = {name: steering_of(asked, library, OPERATOR) for name, asked in settings.presets.items()}
        for name, spec in presets.items():
            layers = sorted({edit.layer for edit in spec.edits if isinstance(edit, Add) and edit.layer is not None})
            if len(layers) > 1 and not _names_layers(settings.presets[name]):
                _LOG.warning(
                    "preset %r adds at layers %s, the whole vector at each, which can break texts; to add at one, "
                    'give {"op": "add", "vector": ..., "layers": [%d]}',
                    *(name, span(layers), layers[len(layers) // 2]),
                )
        return Names(library, presets)


def _names_layers(asked: Any) -> bool:
    """Return whether a preset's JSON names layers anywhere."""
    if isinstance(asked, Mapping):
        return "layer" in asked or "layers" in asked or any(map(_names_layers, asked.values()))
    return isinstance(asked, list) and any(map(_names_layers, asked))


async def application(
    model: SteerModel,
    flags: argparse.Namespace,
    settings: ServerSettings,
    folder: CaptureFolder | None = None,
    names: Names | None = None,
    *,
    recorder: Recorder | None = None,
) -> FastAPI:
    """Create vLLM's ASGI application over an open model, with the `steercap` field and the routes of steercap added.

    Args:
        model: open model, which must stay open while it is served.
        flags: parsed flags of `vllm serve`, see `adapters.server.read_flags`; engine flags are ignored.
        settings: settings of the server.
        folder: open folder for rows of requests with `deliver: folder`; must stay open while the model is served.
        names: result of `Names.of`; computed here if left out.
        recorder: recorder of requests without a capture; must stay open while the model is served.

    Raises:
        InvalidSpec: an SAE reads rows that this model does not have, or a recorded codec would not make rows smaller.
        LayerOutOfRange, PointNotArmed, UnknownName: a layer or site to record is not there.
        UnsupportedRunner: vLLM's server does not have the expected structure.
        InvalidSetting: the model has `restart=True`, or a recorder is given and the model pools.
        The errors of `Names.of`.
    """
    _require_no_restart(model)
    with extra("cuda", "cpu"), importing():
        from steercap.adapters import server
        from steercap.server.inspect_routes import InspectRoutes
        from steercap.server.metrics import Metrics
        from steercap.server.pooling_routes import ENCODE, PoolingRoutes
        from steercap.server.routes import Routes, explorer_routes
        from steercap.server.statistics_routes import FeaturesOfRows, SketchRoutes, require_fitting

    names = names or Names.of(settings)
    require_fitting(names.library.saes, model)
    names.library.warn_of_other_models(model.serving.here().names)
    library, served_names = names.library, flags.served_model_name or [flags.model]
    presets = Presets(served_names, names.presets)
    served = argparse.Namespace(**{**vars(flags), "served_model_name": [*served_names, *presets.aliases]})
    captures = CaptureStore(
        time_to_live=settings.unfetched_seconds,
        most_bytes=settings.unfetched_bytes,
        most_of_a_key=settings.unfetched_bytes_of_a_key,
    )
    sketches, pools = SketchStore(settings.unfetched_seconds), model.serving.here().vllm.pools
    if pools and recorder is not None:
        raise InvalidSetting("--record: requests of a pooling model are not recorded; leave it out")
    engine = ServedEngine(model, captures, server.translated, folder, recorder)
    app = await server.application(
        engine,
        served,
        () if pools else PATHS,
        lambda route: SteercapRoute(route, library, presets, sketches=sketches),
        lambda route: PassthroughRoute(route, presets, (ENCODE,) if pools else PATHS),
    )
    identity = await asyncio.to_thread(model.identity)
    if chats := server.chat_flags(flags):
        identity["chat_flags"] = chats
    description = await asyncio.to_thread(engine_description, model.serving.here())
    if described := description["tokenizer"]:
        template = server.chat_template(flags, getattr(model.tokenizer, "chat_template", None))
        described |= {} if template is None else {"chats": template}
        read = variables_of(model.tokenizer, {"chat_template": template})
        if read is not None and template != server.NO_TEMPLATE:
            described["variables"] = " ".join(sorted(read))
    description["variants"] = {**presets.variants, **await asyncio.to_thread(server.adapters, flags)}
    routes = Routes(model, captures, library, presets.aliases, folder, identity=identity, description=description)
    app.router.routes.extend(routes.routes)
    inspecting = [*InspectRoutes(model, captures, library).routes, *FeaturesOfRows(captures, library.saes).routes]
    pooling = PoolingRoutes(model, captures, library, presets, sketches, failures=engine.failures)
    app.router.routes.extend([*inspecting, *pooling.routes, *SketchRoutes(model, library, sketches).routes])
    app.router.routes.extend(explorer_routes())
    app.router.middleware_stack = Metrics(app.router.middleware_stack, model, captures, engine.failures, recorder)
    if not server.tells_clients_apart(flags):
        app.router.middleware_stack = Keyless(app.router.middleware_stack)
    if recorder is not None:
        recorder.check(model)
        app.router.middleware_stack = OptOut(app.router.middleware_stack)
    return app


async def serve(
    model: str,
    flags: Sequence[str],
    settings: ServerSettings,
    names: Names | None = None,
    *,
    stage: Callable[[str], object] = lambda _stage: None,
    up: Callable[[str, str], object] = lambda _address, _name: None,
    usual: Mapping[str, Any] = MappingProxyType({}),
    **steercap: Any,
) -> None:
    """Open a model, and serve it until the process is told to end.

    Args:
        model: path or name of the model.
        flags: flags of `vllm serve`.
        settings: settings of the server.
        names: result of `Names.of`; computed here, before the engine's start, if left out.
        stage: function that is called with the name of the start's current stage, several times a second.
        up: function that is called once with the server's address and the model's name, when clients can connect.
        usual: default engine arguments, which flags that differ from vLLM's defaults override.
        **steercap: settings of `SteerModel`, beside vLLM's arguments, which are among the flags.

    Raises:
        InvalidRequest, InvalidFile: flags, files or presets cannot be used, or the model's files changed meanwhile.
        EngineDied: the engine died while it was served.
        The errors of `SteerModel.start`.
    """
    around = surroundings()  # before vLLM is imported, which sets variables of its own
    quieten(log=QUIET)  # vLLM writes to its log while it is imported
    with extra("cuda", "cpu"), importing():
        from steercap.adapters import server
        from steercap.server.metrics import IdleClock

    names = names or Names.of(settings)
    read = server.read_flags(model, flags)
    # vLLM's cache would omit pictures that came with an earlier request; requests that wait
    # for room would change the order.
    arguments = {"mm_processor_cache_gb": 0, **usual, **server.engine_arguments(read), **steercap}
    unopened = SteerModel(model, **arguments)
    _require_no_restart(unopened)
    with ExitStack() as held:
        if settings.warm is not None:
            defaults, front = server.engine_defaults(model), server.frontend_flags(read)
            warm = _warm_engine(unopened, read, defaults, asked=settings.warm, surroundings=around, flags=front)
            held.enter_context(announced(warm))
        sock = held.enter_context(closing(server.listening(read)))  # before the engine: a port in use fails at once
        if settings.warm is not None:
            await asyncio.to_thread(os.chmod, read.uds, 0o600)  # nobody can connect yet: it does not listen
        folder = held.enter_context(opened_folder(model, settings))
        recorder = None if settings.record is None else Recorder.of(settings.record, model)
        loaded = _weights(model)
        async with _started(unopened, stage) as opened, recorder or nullcontext():
            if loaded != _weights(model):
                raise InvalidFile(f"{model}: its files changed while they were loaded; start the server again")
            if settings.warm is not None:
                await asyncio.to_thread(_record_snapshot, warm, opened)
            app = await application(opened, read, settings, folder, names, recorder=recorder)
            idle = IdleClock(app.router.middleware_stack, settings.idle_seconds)
            app.router.middleware_stack = idle
            ending = asyncio.create_task(idle.end())
            try:
                name, address = (read.served_model_name or [read.model])[0], server.address_of(sock, read)
                await server.serve(app, sock, read, lambda: up(address, name))
            finally:
                ending.cancel()
            if (engine := opened.serving.engine) is not None and engine.died:  # vLLM's server then ends as if told to
                raise EngineDied(engine.death)


@asynccontextmanager
async def _started(model: SteerModel, stage: Callable[[str], object]) -> AsyncIterator[SteerModel]:
    """Start a model, calling `stage` with the start's current stage; close the model after the block."""
    try:
        async with watching(lambda: model.serving.stage, lambda running, _seconds: stage(running)):
            await model.serving.start()
        yield model
    finally:
        await model.aclose()


def _require_no_restart(model: SteerModel) -> None:
    if model.settings.restart:
        raise InvalidSetting(
            "restart=True: vLLM's server ends with its engine; leave it out, and let your process supervisor restart "
            "the server"
        )


def _warm_engine(model: SteerModel, read: argparse.Namespace, usual: Mapping[str, Any], **known: Any) -> WarmEngine:
    """Describe the server as a warm engine, and set the flags' Unix socket.

    Args:
        model: model that is not open yet.
        read: parsed flags of `vllm serve`; changed here.
        usual: default values of vLLM's engine arguments.
        **known: further fields of `WarmEngine`.

    Raises:
        InvalidSetting: the flags name another socket; or as for `socket_of`.
    """
    if read.uds is not None:
        raise InvalidSetting(f"--uds {read.uds}: a warm engine has a socket of its own; leave it out")
    read.uds, read.disable_uvicorn_access_log = str(socket_of(model.model)), True
    served = read.served_model_name or [read.model]
    ours = {field.name: getattr(model.settings, field.name) for field in fields(model.settings)}
    theirs = {name: value for name, value in model.serving.engine_args.items() if name not in OF_SERVERS}
    theirs = {name: value for name, value in theirs.items() if name not in usual or value != usual[name]}
    return WarmEngine(
        model=served[0],
        path=identified(model.model),
        named=not os.path.exists(served[0]),  # noqa: PTH110 -- it may be no path
        pid=os.getpid(),
        socket=read.uds,
        code=code(),
        weights=files_of(model.model, theirs.get("revision")),
        started=time.monotonic(),
        keyed=bool(read.api_key or os.environ.get("VLLM_API_KEY")),
        settings=ours,
        arguments=theirs,
        defaults=dict(usual),
        **known,
    )


def _weights(model: str) -> str:
    """Return the digest of the weights in a model's folder; "" for a name on the hub."""
    return weights_digest(model) if Path(model).exists() else ""


def _record_snapshot(engine: WarmEngine, model: SteerModel) -> None:
    """Announce the files of a hub model once more; they may have been downloaded only during the start."""
    if not Path(engine.path).exists():
        write(replace(engine, weights=files_of(engine.path, model.identity()["weights"])))


@contextmanager
def opened_folder(model: str, settings: ServerSettings) -> Iterator[CaptureFolder | None]:
    """Open the folder that settings name while the block runs, and yield it; None if they name none.

    Raises:
        The errors of `CaptureFolder`.
    """
    if settings.folder is None:
        yield None
        return
    limits = {"most_bytes": settings.folder_bytes, "most_of_a_key": settings.folder_bytes_of_a_key}
    with CaptureFolder(settings.folder, model=model, **limits) as folder:
        yield folder
