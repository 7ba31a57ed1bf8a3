"""Vectors of many traits at several precisions: `python scripts/persona_batch.py poetic formal --devices 0,1 --out out/batch`.

A job is a group of traits at one precision. Jobs wait in one queue; each device takes the next when it is free, and runs
it in a process and an engine of its own, so that whatever becomes of one, an out-of-memory kill included, does not touch the
others. A job's folder is a run of `steercap.lab.personas`: cut off, it goes on; finished, it is skipped. It is named after precision,
traits and a digest of model and engine arguments, so answers of two engines never meet in one folder.

A child reads its job from stdin, tells its progress as short lines of JSON on stdout, and stops when stdin closes: so no
child outlives this process, however it ends. Outcomes are in `job.json` in the folder; what vLLM and Python print is in
`JOB.log` beside it.

`--ray` hands the same jobs to Ray, a GPU each; `--out` and this file must then be at the same path on every machine. Written
against Ray's public API, not tested.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from steercap.errors import InvalidSetting, SteercapError

CPU: Final = "cpu"
#: Seconds that a child has to stop its engine when it is told to.
GRACE: Final = 60.0
#: Bytes of a line of a child at most. Lines are short; an error may quote a long list of traits.
LINE: Final = 1 << 20
#: Letters of a job's name at most: a name of a file has 255 bytes on Linux.
NAME: Final = 100


class Precision(msgspec.Struct, frozen=True):
    """A way to serve the model: its name, part of folders, and the engine arguments that make it."""

    name: str
    arguments: dict[str, Any]


class Job(msgspec.Struct, frozen=True):
    """Traits that share an engine.

    Args:
        name: of its folder.
        precision: its name.
        model: as the command line takes it.
        arguments: of SteerModel, those of the precision included.
        settings: of PersonaSettings; traits by name or path.
        small: whether sizes left out are a laptop's.
        folder: of the run.
    """

    name: str
    precision: str
    model: str
    arguments: dict[str, Any]
    settings: dict[str, Any]
    small: bool
    folder: str

    @property
    def digest(self) -> str:
        """Of all that it is asked to do, YAML files of traits read: what a finished folder is known by."""
        texts = [Path(name).read_text() for name in self.settings["traits"] if name.endswith((".yaml", ".yml"))]
        told = [self.model, self.arguments, self.settings, self.small, texts]
        return hashlib.sha256(msgspec.json.encode(told, order="deterministic")).hexdigest()


class Status(msgspec.Struct, frozen=True):
    """How a job is: "waiting", "running", "done", "skipped" or "failed"."""

    state: str = "waiting"
    device: str = ""
    stage: str = ""
    done: int = 0
    total: int = 0
    seconds: float = 0.0
    error: str = ""
    outcomes: dict[str, Any] = {}


class Mark(msgspec.Struct, frozen=True):
    """What `job.json` says of a finished folder: what was asked, and the outcome of each trait."""

    digest: str
    outcomes: dict[str, Any]


class Board(msgspec.Struct, frozen=True):
    """All jobs with their status, in the order in which they are taken."""

    jobs: tuple[Job, ...]
    status: dict[str, Status]

    def told(self, job: str, **changes: Any) -> Board:
        """The board after news of one job."""
        new = msgspec.structs.replace(self.status[job], **changes)
        return msgspec.structs.replace(self, status={**self.status, job: new})

    def next(self) -> Job | None:
        """The first job that waits."""
        return next((job for job in self.jobs if self.status[job.name].state == "waiting"), None)

    @property
    def failed(self) -> int:
        """Jobs that failed."""
        return sum(status.state == "failed" for status in self.status.values())


def precision_of(text: str) -> Precision:
    """A precision as written: `float32` is a dtype, `NAME:KEY=VALUE,KEY=VALUE` are engine arguments, values in JSON or text.

    Raises:
        InvalidSetting: no name, or an argument without "=".
    """
    name, colon, rest = text.partition(":")
    if not name or "/" in name:
        raise InvalidSetting(f"precision {text!r}; give a dtype, or NAME:KEY=VALUE[,KEY=VALUE]")
    return Precision(name, dict(_pairs(rest.split(","))) if colon else {"dtype": name})


def _pairs(texts: Iterable[str]) -> Iterable[tuple[str, Any]]:
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise InvalidSetting(f"{text!r}; give KEY=VALUE, its value in JSON or text")
        try:
            yield key.replace("-", "_"), json.loads(value)
        except json.JSONDecodeError:
            yield key.replace("-", "_"), value


def plan(
    traits: Sequence[str],
    precisions: Sequence[Precision],
    *,
    group: int,
    model: str,
    arguments: dict[str, Any],
    settings: dict[str, Any],
    small: bool,
    out: Path,
) -> tuple[Job, ...]:
    """The jobs: every group of traits at every precision, precision by precision.

    Raises:
        InvalidSetting: nothing to do, something twice, or a group of none.
    """
    names = [Path(trait).stem for trait in traits]
    for what, given in (("traits", names), ("precisions", [precision.name for precision in precisions])):
        if not given or len(set(given)) < len(given):
            raise InvalidSetting(f"{what} {given}; give one at least, and each once")
    if group < 1:
        raise InvalidSetting(f"group={group}; give 1 or more")
    groups = [range(first, min(first + group, len(traits))) for first in range(0, len(traits), group)]
    return tuple(
        Job(
            name=(name := _name(precision.name, [names[at] for at in places])),
            precision=precision.name,
            model=model,
            arguments=(merged := {**arguments, **precision.arguments}),
            settings={**settings, "traits": [traits[at] for at in places]},
            small=small,
            folder=str(out / f"{name}-{_short([model, merged])}"),
        )
        for precision in precisions
        for places in groups
    )


def _name(precision: str, traits: Sequence[str]) -> str:
    """Precision and traits; of many traits the first, their number and a digest of all."""
    name = f"{precision}-{'+'.join(traits)}"
    return name if len(name) <= NAME else f"{precision}-{traits[0]}+{len(traits) - 1}-{_short(traits)}"


def _short(told: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(told, order="deterministic")).hexdigest()[:8]


def board_of(jobs: Sequence[Job]) -> Board:
    """The board at the beginning: what is finished, as it is asked for now, is skipped."""
    return Board(tuple(jobs), {job.name: _kept(job) for job in jobs})


def _kept(job: Job) -> Status:
    try:
        kept = msgspec.json.decode(_mark(job).read_bytes(), type=Mark)
    except FileNotFoundError:
        return Status()
    return Status("skipped", outcomes=kept.outcomes) if kept.digest == job.digest else Status()


def _mark(job: Job) -> Path:
    return Path(job.folder) / "job.json"


# In the child


async def work(job: Job, tell: Callable[[dict[str, Any]], None]) -> None:
    """Do a job in this process, and mark the folder as finished, with the outcome of each trait."""
    from steercap import SteerModel
    from steercap.cli.engines import SMOLLM2, located
    from steercap.cli.persona import trait_of
    from steercap.config import CPU
    from steercap.files.base import write_whole
    from steercap.lab.personas import PersonaSettings, run_persona

    said = {**job.settings, "traits": tuple(trait_of(text) for text in job.settings["traits"])}
    said |= {name: tuple(value) for name, value in said.items() if isinstance(value, list)}
    settings = PersonaSettings.small(*said.pop("traits"), **said) if job.small else PersonaSettings(**said)
    arguments = {**(CPU if job.model == SMOLLM2 else {}), "use_tqdm_on_load": False, **job.arguments}
    tell({"stage": "start"})
    async with SteerModel(str(located(job.model)), sites=settings.site, **arguments) as model:
        progress = lambda now: tell({"stage": now.stage, "done": now.done, "total": now.total})  # noqa: E731
        result = await run_persona(model, settings, job.folder, progress=progress)
    found: dict[str, Any] = {name: vars(one) for name, one in result.outcomes.items()}
    with write_whole(_mark(job)) as scratch:
        scratch.write_bytes(msgspec.json.encode(Mark(job.digest, found)))


def child() -> int:
    """A job from stdin, its progress to stdout; ends when it is done, or when stdin does."""
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to 1
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)

    def tell(news: dict[str, Any]) -> None:
        told.write(msgspec.json.encode(news).decode() + "\n")

    async def main() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def watch() -> None:
            while os.read(0, 1024):  # not through sys.stdin: Python dies at its end if a thread holds its lock
                pass
            loop.call_soon_threadsafe(task.cancel)

        threading.Thread(target=watch, daemon=True).start()
        await work(job, tell)

    try:
        asyncio.run(main())
    except (SteercapError, OSError) as error:
        tell({"error": f"{type(error).__name__}: {error}"})
        return 1
    except asyncio.CancelledError:
        return 130
    return 0


# In the parent


async def in_process(job: Job, device: str, tell: Callable[..., None]) -> None:
    """Do a job in a process of its own, on one device; `tell` hears how it goes, and how it ends."""
    began, log = time.monotonic(), Path(f"{job.folder}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": device} if device not in {CPU, ""} else {})}
    tell(state="running", device=device)
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).resolve()),
            "--job",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=environment,
            limit=LINE,
            start_new_session=True,  # an interrupt is ours to pass on
        )
        assert process.stdin is not None
        assert process.stdout is not None
        news: dict[str, Any] = {}
        try:
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            async for line in process.stdout:
                news = json.loads(line)
                tell(**news, seconds=time.monotonic() - began)
            await process.wait()
        finally:
            await asyncio.shield(_ended(process))
    seconds = time.monotonic() - began
    if process.returncode == 0:
        tell(state="done", outcomes=msgspec.json.decode(_mark(job).read_bytes(), type=Mark).outcomes, seconds=seconds)
    else:
        error = news.get("error") or f"its process ended with {process.returncode}; see {log}"
        tell(state="failed", error=error, seconds=seconds)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Tell a child to stop, by closing its stdin; after a while, end it and what it started."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(GRACE):
            while await process.stdout.read(LINE):  # one that still writes must not wait for a full pipe
                pass
            await process.wait()
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def attempt(job: Job, device: str, tell: Callable[..., None]) -> None:
    """Do a job as `in_process` does; whatever goes wrong with it is told, and stops no other."""
    try:
        await in_process(job, device, tell)
    except Exception as error:  # noqa: BLE001 -- a process that cannot start, a line that is none: this job's failure
        tell(state="failed", device=device, error=f"{type(error).__name__}: {error}")


async def run_all(board: Board, devices: Sequence[str], show: Callable[[Board], None]) -> Board:
    """Run what waits, a job a device at a time; returns the board at the end."""

    async def serve(device: str) -> None:
        nonlocal board

        def tell(name: str, **changes: Any) -> None:
            nonlocal board
            board = board.told(name, **changes)
            show(board)

        while (job := board.next()) is not None:
            await attempt(job, device, lambda name=job.name, **changes: tell(name, **changes))

    async with asyncio.TaskGroup() as group:
        for device in devices:
            group.create_task(serve(device))
    return board


def run_on_ray(board: Board, show: Callable[[Board], None]) -> Board:
    """The same with Ray, a GPU a job; Ray says which. Not tested."""
    import ray

    def told(job: Job) -> dict[str, Any]:
        last: dict[str, Any] = {}
        asyncio.run(attempt(job, "", lambda **changes: last.update(changes)))
        return last

    remote = ray.remote(num_gpus=1, max_retries=0)(told)
    waiting = {remote.remote(job): job for job in board.jobs if board.status[job.name].state == "waiting"}
    while waiting:
        (one,), _ = ray.wait(list(waiting), num_returns=1)
        board = board.told(waiting.pop(one).name, **ray.get(one))
        show(board)
    return board


def table_of(board: Board) -> Any:
    """A row a job."""
    from rich.table import Table

    table = Table()
    for name in ("job", "on", "state", "stage", "of it", "seconds", "AUC by trait, or what went wrong"):
        table.add_column(name, overflow="fold", justify="right" if name in {"of it", "seconds"} else "left")
    for name, status in board.status.items():
        said = status.error or ", ".join(
            f"{trait} {'left out' if one['auc'] is None else format(one['auc'], '.2f')}"
            for trait, one in status.outcomes.items()
        )
        part = f"{status.done}/{status.total}" if status.total else ""
        table.add_row(name, status.device, status.state, status.stage, part, f"{status.seconds:.0f}", said)
    return table


def main(
    traits: Annotated[list[str], typer.Argument(help="Shipped traits by name, or YAML files.")],
    out: Annotated[Path, typer.Option(help="Folder; a run folder for every job in it.")],
    model: Annotated[str, typer.Option("--model", "-m", help="Name on the hub, path, or smollm2.")] = "smollm2",
    devices: Annotated[str, typer.Option(help="GPUs, such as 0,1,2; or cpu.")] = CPU,
    precision: Annotated[
        list[str], typer.Option(help="A dtype, or NAME:KEY=VALUE,KEY=VALUE of the engine; may be repeated.")
    ] = ["auto"],  # noqa: B006 -- typer copies it
    group: Annotated[int, typer.Option(help="Traits that share an engine.")] = 8,
    small: Annotated[bool, typer.Option("--small", help="Sizes for a small model on a CPU.")] = False,
    setting: Annotated[list[str], typer.Option(help="KEY=VALUE of PersonaSettings; may be repeated.")] = [],  # noqa: B006
    engine_arg: Annotated[list[str], typer.Option(help="KEY=VALUE of the engine; may be repeated.")] = [],  # noqa: B006
    ray: Annotated[bool, typer.Option("--ray", help="Hand the jobs to Ray; not tested.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON on stdout.")] = False,
) -> None:
    """Find the vectors of traits at several precisions, on several devices; what is finished is skipped."""
    from rich.console import Console
    from rich.live import Live

    try:
        jobs = plan(
            traits,
            [precision_of(text) for text in precision],
            group=group,
            model=model,
            arguments=dict(_pairs(engine_arg)),
            settings=dict(_pairs(setting)),
            small=small,
            out=out.resolve(),
        )
        board = board_of(jobs)
    except (SteercapError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    console = Console(stderr=True)
    with Live(table_of(board), console=console, refresh_per_second=2) as live:
        show = lambda now: live.update(table_of(now))  # noqa: E731
        try:
            names = [name.strip() for name in devices.split(",")]
            board = run_on_ray(board, show) if ray else asyncio.run(run_all(board, names, show))
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    if as_json:
        summary = [
            {"job": job.name, "folder": job.folder, **msgspec.to_builtins(board.status[job.name])} for job in jobs
        ]
        print(msgspec.json.format(msgspec.json.encode({"jobs": summary, "failed": board.failed}), indent=2).decode())
    raise typer.Exit(1 if board.failed else 0)


if __name__ == "__main__":
    if sys.argv[1:] == ["--job"]:
        sys.exit(child())
    typer.run(main)
