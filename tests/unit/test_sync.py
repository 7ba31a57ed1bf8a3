"""`steercap.sync` has every name that is awaited, under its own signature, and never speaks of `await`."""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures
import copy
import importlib
import inspect
import pkgutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sync
from handles import a_handle

import steercap
import steercap.sync
from steercap import SteerModel, errors
from steercap.captures.handle import CaptureHandle
from steercap.captures.lifecycle import Lifecycle
from steercap.core.protocols import BLOCKING
from steercap.sync.bridge import Bridge

ROOT = Path(steercap.__file__).parent
#: Packages that are no part of what a user imports for work of their own.
INTERNAL = (
    "steercap.cli",
    "steercap.testing",
    "steercap.sync",
    "steercap.worker",
    "steercap.adapters",
)


def public_coroutine_functions() -> dict[str, object]:
    """Coroutine functions of public packages' `__all__` whose first argument is an open model, by `package.name`."""
    found = {}
    for module in pkgutil.walk_packages(steercap.__path__, "steercap."):
        if module.ispkg and not module.name.startswith(INTERNAL):
            package = importlib.import_module(module.name)
            for name in getattr(package, "__all__", ()):
                function = getattr(package, name)
                if inspect.iscoroutinefunction(function) and "model" in inspect.signature(function).parameters:
                    found[f"{module.name.removeprefix('steercap.')}.{name}"] = function
    return found


def test_the_functions_that_need_a_twin_are_found() -> None:
    """The search below cannot come to nothing."""
    assert set(public_coroutine_functions()) >= {
        "lab.directions.extract",
        "lab.directions.mean_rows",
        "lab.personas.run_persona",
        "lab.studies.sweeps.run_sweep",
    }


def test_generated_modules_are_those_that_the_script_writes() -> None:
    """After a change of an original: python scripts/sync.py."""
    for name, text in sync.modules().items():
        assert (sync.SYNC / f"{name}.py").read_text() == text, f"{name}.py differs; run python scripts/sync.py"


@pytest.mark.parametrize("name", public_coroutine_functions())
def test_a_coroutine_function_has_a_twin(name) -> None:
    """`steercap.sync.NAME` takes the same arguments, says the same, and is not awaited."""
    there = public_coroutine_functions()[name]
    known = {path: twin for twin, path in sync.FUNCTIONS.items()}
    assert f"steercap.{name}" in known, "write it into the table of scripts/sync.py"
    twin = getattr(steercap.sync, known[f"steercap.{name}"])
    assert bare(twin) == bare(there)
    assert sync.blocking(there.__doc__, name) == twin.__doc__
    assert not inspect.iscoroutinefunction(twin)
    assert "await" not in (twin.__doc__ or "")
    required = {known: [] for known, _, default in bare(twin)[1:] if default is inspect.Parameter.empty}
    with pytest.raises(errors.InvalidRequest, match=r"takes a steercap\.sync\.SteerModel, not SteerModel"):
        twin(SteerModel("nothing"), **required)


def bare(function) -> list[tuple[object, ...]]:
    """Parameters of a function with their kinds and defaults."""
    return [(known.name, known.kind, known.default) for known in inspect.signature(function).parameters.values()]


OTHERWISE_NAMED = {"aclose": "close"}


@pytest.mark.parametrize("name", [name for name in dir(SteerModel) if not name.startswith("_")])
def test_a_method_of_the_model_has_a_twin(name) -> None:
    """Every public name of SteerModel, with its arguments; nothing of them is a coroutine function."""
    there, here = getattr(SteerModel, name), getattr(steercap.sync.SteerModel, OTHERWISE_NAMED.get(name, name))
    assert here.__doc__
    if not isinstance(there, property):
        assert bare(here) == bare(there)
        assert not inspect.iscoroutinefunction(inspect.unwrap(here))


def test_the_model_takes_the_same_arguments() -> None:
    """`inspect.signature`, and with it completion, shows them; public attributes are there too."""
    assert inspect.signature(steercap.sync.SteerModel) == inspect.signature(SteerModel)
    there, here = SteerModel("nothing"), steercap.sync.SteerModel("nothing")
    public = {name for name in dir(there) if not name.startswith("_")} - {"aclose"}
    assert public <= set(dir(here))
    assert (here.model, here.settings) == (there.model, there.settings)


def test_completion_shows_what_a_handle_has() -> None:
    """`dir()` of a handle of `steercap.sync` names all that the handle behind it has, and each can be had."""
    there = a_handle()
    here = steercap.sync.CaptureHandle(there, None)
    public = {name for name in dir(there) if not name.startswith("_")}
    assert public <= set(dir(here))
    assert all(getattr(here, name) is not None for name in public)
    with pytest.raises(AttributeError, match="no attribute '_nothing'"):
        _ = here._nothing
    with pytest.raises(errors.InvalidRequest, match="cannot be copied"):
        copy.copy(object.__new__(steercap.sync.CaptureHandle))


def test_a_loaded_handle_is_read_without_await(tmp_path) -> None:
    """`steercap.sync.CaptureHandle.load` gives its own kind, whose `fetch` and `with` need no engine."""
    path = a_handle().save(tmp_path / "rows.safetensors")
    with steercap.sync.CaptureHandle.load(path) as handle:
        assert isinstance(handle, steercap.sync.CaptureHandle)
        assert handle.fetch() is handle
        assert steercap.stack([handle]).shape == (1, 2, 2)
    with pytest.raises(errors.CaptureReleased):
        _ = handle.captures


@pytest.mark.parametrize("module", [steercap, steercap.sync])
def test_dir_names_what_is_loaded_on_use(module) -> None:
    """Completion offers every public name, each can be had, and no name of the machinery is offered."""
    offered = dir(module)
    assert set(module.__all__) <= set(offered)
    assert all(getattr(module, name) is not None for name in offered)
    assert not [name for name in offered if name.startswith("_") and not name.startswith("__")]
    assert not {"import_module", "TYPE_CHECKING"} & set(offered)


def test_packages_are_reached_from_the_top() -> None:
    """After `import steercap` alone, `steercap.lab.directions.extract` is there, and in `dir`."""
    code = "import steercap; assert {'lab', 'stack'} <= set(dir(steercap)); steercap.lab.directions.extract"
    subprocess.run([sys.executable, "-c", code + "; import steercap.sync as s; s.run_persona"], check=True)


def test_messages_without_await(tmp_path) -> None:
    """What is raised through the facade shows code that runs there."""
    model = steercap.sync.SteerModel("nothing")
    with pytest.raises(errors.ModelClosed, match=r"never started; use it inside `with SteerModel") as raised:
        model.generate("x")
    assert "async" not in str(raised.value)
    for name in ("num_layers", "tokenizer", "engine", "points"):
        with pytest.raises(errors.ModelClosed) as raised:
            getattr(model, name)
        assert "async" not in str(raised.value)
    unfetched = a_handle()
    unfetched.lifecycle = Lifecycle("r")
    with pytest.raises(errors.CaptureNotFetched, match=r"`await handle\.fetch"):
        _ = unfetched.captures
    here = steercap.sync.CaptureHandle(unfetched, None)
    with pytest.raises(errors.CaptureNotFetched, match=r"not fetched; `handle\.fetch") as raised:
        _ = here.captures
    assert "await" not in str(raised.value)
    script = tmp_path / "script.py"
    script.write_text("from steercap.sync import SteerModel\nSteerModel('nothing').start()\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert "MainGuardMissing" in done.stderr
    assert "with SteerModel(...) as model" in done.stderr
    assert "async" not in done.stderr


class Closing:
    """Model with one call, which returns a handle once the model is being closed, and which then closes."""

    call_style = BLOCKING

    def __init__(self) -> None:
        self.called, self.closing, self.last_call = asyncio.Event(), asyncio.Event(), threading.Event()

    async def start(self) -> None:
        """Start at once."""

    def opened(self) -> None:
        """Be open to the end, as a model is whose `aclose` has not run yet."""

    async def aclose(self) -> None:
        """Wait for the caller's last call."""
        self.closing.set()
        assert await asyncio.to_thread(self.last_call.wait, 60)

    async def call(self) -> tuple[str, CaptureHandle]:
        """Return when the model is being closed."""
        self.called.set()
        await self.closing.wait()
        return "text", a_handle()


def test_a_call_that_ends_while_the_model_is_closed_has_its_result() -> None:
    """Between `close` and the end of the model's loop a call returns what it made, or raises ModelClosed."""
    model = Closing()
    bridge = Bridge(model, model)
    bridge.start()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        call = pool.submit(bridge.done, model.call)
        bridge.run(model.called.wait())
        close = pool.submit(bridge.close)
        text, handle = call.result(timeout=60)
        with pytest.raises(errors.ModelClosed):
            bridge.done(model.call)
        with pytest.raises(errors.ModelClosed):
            bridge.run(model.call())
        model.last_call.set()
        close.result(timeout=60)
    assert text == "text"
    assert isinstance(handle, steercap.sync.CaptureHandle)


def test_no_message_of_the_library_says_await_itself() -> None:
    """`await` and `async with` come into messages from `steercap.core.protocols` alone, which the facade sets."""
    guilty = []
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] in {"cli", "testing"}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise):
                said = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                guilty += [f"{path.name}: {text}" for text in said if isinstance(text, str) and mentions(text)]
    assert guilty == []
    assert mentions("`await handle.fetch()`")


def mentions(text: str) -> bool:
    """Whether a text shows code that awaits."""
    return any(word in text for word in ("await ", "async with", "asyncio.run"))
