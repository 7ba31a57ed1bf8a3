"""The starts of an engine, which a stub stands for: each is closed, one lives at a time, and all have the same weights.

What an engine that is started again needs of everything else: a setting, a word in receipts, and no server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from handles import a_handle

from steercap import CaptureHandle, SteerModel
from steercap.adapters.launch import Launch
from steercap.captures.fetching import fetch_all
from steercap.captures.lifecycle import Lifecycle
from steercap.cli.engines import ModelOptions
from steercap.concurrency.loops import OwnerLoop
from steercap.errors import CaptureMemoryFull, EngineDied, InvalidRequest, InvalidSetting, ModelClosed, ModelNotLoaded
from steercap.requests import serving as of_requests
from steercap.requests.recompute import Recompute
from steercap.server.server import ServerSettings, application


@pytest.mark.parametrize("value", [1, "yes", 0, "false"])
def test_it_is_asked_for_by_true_alone(value) -> None:
    """Nothing else means it, as 1 might mean one restart."""
    with pytest.raises(InvalidSetting, match="give True or False"):
        SteerModel("m", restart=value)


def test_a_command_asks_for_it_by_its_flag() -> None:
    """And leaves it to the environment without."""
    assert ModelOptions(restart=True).arguments()["restart"] is True
    assert "--restart" in ModelOptions(restart=True).flags()
    assert "restart" not in ModelOptions().arguments()


async def test_a_server_refuses_it() -> None:
    """It ends with its engine."""
    with pytest.raises(InvalidSetting, match="ends with its engine"):
        await application(SteerModel("m", restart=True), None, ServerSettings())


def test_rows_that_were_computed_again_say_so_in_their_file(tmp_path) -> None:
    """Whoever loads them can know."""
    handle = a_handle()
    assert not CaptureHandle.load(handle.save(tmp_path / "a.safetensors")).receipt.recomputed
    found = handle.lifecycle.found
    handle.lifecycle.found = found._replace(receipt=replace(found.receipt, recomputed=True))
    assert CaptureHandle.load(handle.save(tmp_path / "b.safetensors")).receipt.recomputed


@pytest.mark.parametrize("room", [1, 0])
async def test_lost_rows_that_have_no_room_together_come_one_by_one(room) -> None:
    """With overflow="error" a claim does not wait; each alone has the room that it had before."""
    running, found = 0, a_handle().lifecycle.found

    async def rows() -> Any:
        nonlocal running
        if running >= room:
            raise CaptureMemoryFull("the arena is full")
        running += 1
        await asyncio.sleep(0.01)
        running -= 1
        return found

    again = SimpleNamespace(place=None, rows=rows)
    source = SimpleNamespace(
        place=None,
        recompute=again,
        require_open=lambda: None,
        give_back=lambda: None,
        give_back_from_any_thread=lambda: None,
    )
    lost = [Lifecycle(f"lost {place}", source=source) for place in range(3)]
    if not room:
        with pytest.raises(CaptureMemoryFull, match=r"the arena is full \(and 2 other handles"):
            await fetch_all(lost)
        return
    await fetch_all(lost)
    assert all(one.require_here() is found for one in lost)


async def test_rows_whose_request_is_refused_by_now_are_lost() -> None:
    """As one with an adapter whose files have changed: the death is said, and why the rows are not computed again."""

    async def refused(_work: Any) -> None:
        raise InvalidRequest("the files of the LoRA adapter have changed")

    recipe = SimpleNamespace(serving=SimpleNamespace(with_restart=refused))
    job = SimpleNamespace(
        engine=SimpleNamespace(death="it died"), prompt=SimpleNamespace(media=()), steering=None, plan=None
    )
    with pytest.raises(EngineDied, match="it died; its rows cannot be recomputed: the files of the LoRA adapter have"):
        await Recompute(recipe, job, None).rows()  # type: ignore[arg-type]


class Engines:
    """Engines that start at once, or fail; each knows if it was closed.

    Attributes:
        started: all of them.
        failures: number of starts that are to fail.
        commit: of the model on the hub.
        followed: vLLM's part of the engines that were followed by another.
    """

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.failures = 0
        self.commit = ""
        self.followed: list[Any] = []

    async def start(self, _model: str, _settings: Any, _arguments: Any, launch: Launch, _candidate: int) -> Any:
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            launch.end()
            raise ModelNotLoaded("not this time")
        engine = SimpleNamespace(died=False, death="it died", closed=False, home=OwnerLoop("this engine"))
        engine.vllm = SimpleNamespace(commit=self.commit, follow=self.followed.append)
        engine.loaded = SimpleNamespace(candidates=1)

        async def aclose() -> None:
            launch.end()
            engine.closed = True

        engine.aclose = aclose
        self.started.append(engine)
        return engine

    @property
    def open(self) -> list[Any]:
        """Those that nobody has closed."""
        return [engine for engine in self.started if not engine.closed]


@pytest.fixture
def engines(monkeypatch) -> Engines:
    """Stubs in place of engines; nothing is proved of them."""
    found = Engines()

    async def proved(_engine: Any) -> tuple[()]:
        return ()

    monkeypatch.setattr(of_requests.Engine, "start", found.start)
    monkeypatch.setattr(of_requests, "probe", proved)
    monkeypatch.setattr(of_requests, "require_room", lambda *_: None)
    monkeypatch.setattr(of_requests, "BACKOFF", (0.0, 0.0, 0.0))
    return found


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model's files, as far as a start looks at them."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


async def test_starts_at_once_with_one_that_is_tried_again_make_one_engine(engines, folder) -> None:
    """One fails, a second waits for it, and whoever tried the first tries again before the second has its turn."""
    engines.failures = 1
    serving = SteerModel(folder).serving

    async def persistent() -> None:
        with pytest.raises(ModelNotLoaded):
            await serving.start()
        await serving.start()

    await asyncio.gather(persistent(), serving.start(), serving.start())
    assert len(engines.started) == 1
    await serving.aclose()
    assert engines.open == []


def test_a_closed_model_says_so_in_any_event_loop(engines, folder) -> None:
    """It is not the loop that is wrong."""
    serving = SteerModel(folder).serving

    async def whole() -> None:
        await serving.start()
        await serving.aclose()

    asyncio.run(whole())
    with pytest.raises(ModelClosed):
        asyncio.run(serving.start())
    assert engines.open == []


async def test_an_engine_that_has_started_when_its_start_is_cancelled_is_closed(engines, folder) -> None:
    """The task that waits for it has not run since."""
    serving = SteerModel(folder).serving
    starting = asyncio.create_task(serving.start())
    while not (serving._starting and serving._starting.done()):
        await asyncio.sleep(0)
    assert not starting.done()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert len(engines.started) == 1
    assert engines.open == []
    await serving.start()
    assert len(engines.open) == 1
    await serving.aclose()


def rewrite(folder: Path, _engines: Engines) -> None:
    (folder / "model.safetensors").write_bytes(b"changed")


def remove(folder: Path, _engines: Engines) -> None:
    (folder / "model.safetensors").unlink()


def commit(_folder: Path, engines: Engines) -> None:
    engines.commit = "another"


def tokenize(folder: Path, _engines: Engines) -> None:
    (folder / "tokenizer.json").write_text("[]")


def template(folder: Path, _engines: Engines) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def template_by_name(folder: Path, _engines: Engines) -> None:
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")


def tokenize_elsewhere(folder: Path, _engines: Engines) -> None:
    (folder / "words" / "tokenizer.json").write_text("[]")


@pytest.mark.parametrize(
    ("change", "arguments"),
    [
        *((one, {}) for one in (rewrite, remove, commit, tokenize, template, template_by_name)),
        (tokenize_elsewhere, {"tokenizer": "words"}),
    ],
)
async def test_an_engine_is_not_started_again_with_other_files(
    engines, folder, change: Callable[[Path, Engines], None], arguments
) -> None:
    """Requests that are repeated and rows that are computed again would be another model's."""
    for name in ("words", "vocab", "additional_chat_templates"):
        (folder / name).mkdir()
    (folder / "words" / "tokenizer.json").write_text("{}")
    arguments = {name: str(folder / value) for name, value in arguments.items()}
    serving = SteerModel(folder, restart=True, **arguments).serving
    await serving.start()
    engines.started[-1].died = True
    (folder / "log.txt").write_text("no weights")
    second = await serving.alive()
    assert second is engines.started[-1]
    assert engines.followed == [engines.started[0].vllm]
    second.died = True
    change(folder, engines)
    for _ in range(2):
        with pytest.raises(EngineDied, match="have changed since it was started"):
            await serving.alive()
    assert len(engines.started) == 3
    assert engines.open == []
    await serving.aclose()
