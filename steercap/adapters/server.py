"""vLLM's OpenAI-compatible server on a running engine: its flags, application, socket and serving loop.

It relies on `make_arg_parser`, `validate_parsed_serve_args`, `build_app`, `init_app_state`, `serve_http`; and on this:
`APIRoute.app` is what a route runs, after vLLM's check of keys.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Collection, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import serve_http, setup_server
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser

from steercap.adapters.lora import digest_of
from steercap.errors import (
    CaptureMemoryFull,
    InvalidRequest,
    InvalidSetting,
    SAEMemoryFull,
    SteercapError,
    SteeringSlotsFull,
    UnsupportedRunner,
)

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
except ModuleNotFoundError:  # its module in older releases
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args

# vLLM's `build_app` sets the root logger's level to ERROR (model_hosting_container_standards): warnings would be lost.
if (_OURS := logging.getLogger("steercap")).level == logging.NOTSET:
    _OURS.setLevel(logging.INFO)

#: Seconds between two checks whether the server's socket listens.
LOOK_SECONDS: Final = 0.05
#: Engine arguments that `engine_arguments` leaves out, since SteerModel has its own parameter for them.
_LEFT_OUT: Final = ("model",)
#: Errors that are answered with HTTP status 429.
_FULL: Final = (CaptureMemoryFull, SAEMemoryFull, SteeringSlotsFull)
#: Pattern of flags that do not change answers: addresses, keys, logs, documentation pages, headers.
_OF_ACCESS: Final = re.compile(
    "model_tag|config|host|port|uds|api_key|api_server_count|ssl_.*|enable_ssl_refresh|allow_credentials|allowed_.*|"
    "h11_.*|uvicorn_log_level|disable_.*access_log.*|max_log_len|enable_log_.*|log_error_stack|disable_fastapi_docs|"
    "enable_offline_docs|enable_request_id_headers|enable_server_load_tracking"
)
#: Flags by which vLLM renders conversations, those that clients have it tokenise too.
_OF_CHATS: Final = ("chat_template", "chat_template_content_format", "default_chat_template_kwargs")


def read_flags(model: str, flags: Sequence[str]) -> argparse.Namespace:
    """Parse and validate command-line flags as `vllm serve MODEL` does; each flag and value is one string.

    Raises:
        InvalidSetting: vLLM has no such flag, or its value is invalid.
    """
    parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))
    parser.set_defaults(allowed_origins=[])  # as of 0.32; releases before let any page of a browser ask

    def refuse(message: str) -> None:
        raise InvalidSetting(f"vLLM's server: {message}; `vllm serve --help=all` lists its flags")

    parser.error = refuse
    try:
        found: argparse.Namespace = parser.parse_args([model, *flags])
        found.model = model
        validate_parsed_serve_args(found)
    except InvalidSetting:
        raise
    except (argparse.ArgumentError, TypeError, ValueError) as error:
        raise InvalidSetting(f"vLLM's server: {error}; `vllm serve --help=all` lists its flags") from error
    return found


def tells_clients_apart(flags: argparse.Namespace) -> bool:
    """Check if a server requires API keys or has the operator's middleware, either of which may identify clients."""
    keys = flags.api_key or [os.environ.get("VLLM_API_KEY")]
    return any(keys) or bool(flags.middleware)


def engine_arguments(flags: argparse.Namespace) -> dict[str, Any]:
    """Return engine arguments by name, without the model, for the parsed flags that differ from vLLM's defaults."""
    given, plain = AsyncEngineArgs.from_cli_args(flags), AsyncEngineArgs(model=flags.model)
    found = {}
    for field in dataclasses.fields(AsyncEngineArgs):
        value = getattr(given, field.name, None)
        if field.init and field.name not in _LEFT_OUT and value != getattr(plain, field.name, None):
            found[field.name] = value
    return found


def engine_defaults(model: str) -> dict[str, Any]:
    """Return the scalar engine arguments of `vllm serve MODEL` without flags, by name: None, numbers or text.

    They are the defaults of `AsyncEngineArgs` except where the command line's defaults differ.
    """
    found = {field.name: field.default for field in dataclasses.fields(AsyncEngineArgs)}
    found |= engine_arguments(read_flags(model, []))
    return {name: value for name, value in found.items() if isinstance(value, type(None) | int | float | str)}


def frontend_flags(flags: argparse.Namespace) -> list[str]:
    """Return the names, sorted, of non-engine flags that affect answers and differ from vLLM's defaults."""
    plain = vars(read_flags(flags.model, []))
    of_engine = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    differing = {name for name, value in vars(flags).items() if value != plain.get(name)} - of_engine
    return sorted(name for name in differing if not _OF_ACCESS.fullmatch(name))


def chat_flags(flags: argparse.Namespace) -> str:
    """Return the flags by which conversations are rendered, in JSON, a template as its SHA-256; "" if none is set."""
    found = {name: getattr(flags, name) for name in frontend_flags(flags) if name in _OF_CHATS}
    if "chat_template" in found:
        template = str(found["chat_template"])
        is_file = os.path.isfile(template)  # noqa: PTH113 -- it may be the template itself
        content = Path(template).read_bytes() if is_file else template.encode()
        found["chat_template"] = hashlib.sha256(content).hexdigest()
    return json.dumps(found, sort_keys=True) if found else ""


#: Template that clients know of a server whose own they cannot know.
NO_TEMPLATE: Final = "{{ raise_exception('clients do not know the chat template of this server; give token ids') }}"


def chat_template(flags: argparse.Namespace, own: Any) -> str | None:
    """Return the text of the template by which the server renders conversations, with the flags' default arguments.

    None if the flags name neither: conversations are rendered by the tokenizer's own.

    Args:
        flags: result of `read_flags`.
        own: template of the model's tokenizer.
    """
    text, given = own, flags.chat_template
    if given is None and not flags.default_chat_template_kwargs:
        return None
    if given is not None:
        is_file = os.path.isfile(given)  # noqa: PTH113 -- it may be the template itself
        text = Path(given).read_text() if is_file else given if {*given} & {*"{}\n"} else None  # a name of vLLM's own
    if not isinstance(text, str):
        return NO_TEMPLATE
    defaults = (flags.default_chat_template_kwargs or {}).items()
    # Rendering drops the line end behind a tag, so the text begins a line as before.
    named = [
        f"{{% set {name} = {name} if {name} is defined else {value!r} %}}\n"
        for name, value in defaults
        if name.isidentifier()
    ]
    return "".join((*named, text))


def adapters(flags: argparse.Namespace) -> dict[str, str]:
    """Return the names of LoRA adapters that the server is started with, and their digests."""
    return {module.name: digest_of(module.path) for module in flags.lora_modules or ()}


async def application(
    engine: Any,
    flags: argparse.Namespace,
    paths: Collection[str],
    around: Callable[[ASGIApp], ASGIApp],
    beside: Callable[[ASGIApp], ASGIApp],
) -> FastAPI:
    """Build vLLM's application with wrapped routes.

    Args:
        engine: object that vLLM uses as its engine.
        flags: result of `read_flags`; its configuration of structured outputs becomes the engine's.
        paths: paths of POST routes to wrap with `around`.
        around: function that wraps the ASGI app of each of these routes.
        beside: function that wraps the ASGI app of every other POST route.

    Raises:
        UnsupportedRunner: vLLM's application lacks one of the paths.
    """
    # In `vllm serve` flags and engine share this object, where the engine's start enters the reasoning parser.
    flags.structured_outputs_config = engine.vllm_config.structured_outputs_config
    tasks = await engine.get_supported_tasks()
    app: FastAPI = build_app(flags, tasks, engine.model_config)
    found = [one for one in app.routes if isinstance(one, APIRoute) and "POST" in one.methods]
    if not {route.path for route in found} >= set(paths):
        raise UnsupportedRunner(f"vLLM's server has not all of {', '.join(sorted(paths))}; steercap knows no other way")
    for route in found:
        route.app = around(route.app) if route.path in paths else beside(route.app)
    await init_app_state(engine, app.state, flags, tasks)
    return app


def listening(flags: argparse.Namespace) -> socket.socket:
    """Return a socket that is bound to the address in the flags.

    Raises:
        OSError: it cannot be bound; the message names --host and --port.
    """
    try:
        _, found = setup_server(flags, reuse_port=False)
    except OSError as error:
        where = flags.uds if flags.uds is not None else f"--host {flags.host or '0.0.0.0'} --port {flags.port}"  # noqa: S104
        raise OSError(
            error.errno, f"{error.strerror}: {where}; give another address, or end the process that listens there"
        ) from error
    bound: socket.socket = found
    return bound


def address_of(sock: socket.socket, flags: argparse.Namespace) -> str:
    """Return the address of a bound socket, as clients on this machine write it."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{flags.uds}"
    host, port, *_ = sock.getsockname()
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 -- no address that is listened on
    return f"http{'s' if flags.ssl_certfile else ''}://{f'[{host}]' if ':' in host else host}:{port}"


async def serve(
    app: FastAPI, sock: socket.socket, flags: argparse.Namespace, up: Callable[[], object] = lambda: None
) -> None:
    """Serve the application until the process receives a stop signal; `up` is called once clients can connect."""
    listens = asyncio.create_task(_once_listening(sock, up))
    try:
        await _served(app, sock, flags)
    finally:
        listens.cancel()


async def _once_listening(sock: socket.socket, up: Callable[[], object]) -> None:
    while not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # noqa: ASYNC110 -- uvicorn tells nobody when
        await asyncio.sleep(LOOK_SECONDS)
    up()


def _is_of_requests(record: logging.LogRecord) -> bool:
    """Check that a log record is not uvicorn's note that it cancelled 0 tasks."""
    return not (str(record.msg).startswith("Cancel %s running task") and record.args == (0,))


async def _served(app: FastAPI, sock: socket.socket, flags: argparse.Namespace) -> None:
    logging.getLogger("uvicorn.error").addFilter(_is_of_requests)
    ended = await serve_http(
        app,
        sock=sock,
        enable_ssl_refresh=flags.enable_ssl_refresh,
        host=flags.host,
        port=flags.port,
        log_level=flags.uvicorn_log_level,
        access_log=not flags.disable_uvicorn_access_log,
        timeout_keep_alive=int(os.environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5")),
        ssl_keyfile=flags.ssl_keyfile,
        ssl_certfile=flags.ssl_certfile,
        ssl_ca_certs=flags.ssl_ca_certs,
        ssl_cert_reqs=flags.ssl_cert_reqs,
        ssl_ciphers=flags.ssl_ciphers,
        h11_max_incomplete_event_size=flags.h11_max_incomplete_event_size,
        h11_max_header_count=flags.h11_max_header_count,
        # vLLM ends its engine and so all requests; ours is closed later, so one slow client would delay the end.
        timeout_graceful_shutdown=getattr(flags, "shutdown_timeout", 0),
    )
    await ended


def translated(error: SteercapError) -> Exception:
    """Convert an error of steercap to one that vLLM's server answers with a fitting HTTP status: 429, 400 or 500."""
    found: Exception = GenerationError(str(error))
    if isinstance(error, _FULL):
        found = GracefulHTTPError(str(error), HTTPStatus.TOO_MANY_REQUESTS)
    elif isinstance(error, InvalidRequest):
        found = VLLMValidationError(str(error), parameter="steercap")
    return found
