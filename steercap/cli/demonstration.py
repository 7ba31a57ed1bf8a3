"""The demonstration of `steercap demo`: the main job on a small real model, in a minute, with a picture.

SmolLM2-135M answers several prompts at once; every layer's rows are captured while vLLM generates. The picture shows a
logit lens of one prompt (what each layer would say next, if it were the last) and how far each layer separates
praise from complaint along a direction computed from the rows. Added to and subtracted from one layer, it then
changes how a sentence continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

from steercap.core.extras import extra
from steercap.core.protocols import Count, ProgressCallback

if TYPE_CHECKING:
    import torch

    from steercap.captures.handle import CaptureHandle
    from steercap.cli.terminal import Terminal
    from steercap.model import SteerModel

QUESTIONS: Final = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Why is the sky blue?",
    "Write one line about the sea.",
)
LENS: Final = "The Eiffel Tower is in the city of"
PRAISE: Final = ("wonderful", "delightful", "excellent", "beautiful", "superb", "charming", "brilliant", "lovely")
COMPLAINT: Final = ("terrible", "dreadful", "awful", "ugly", "horrible", "boring", "hopeless", "nasty")
#: Templates of sentences; their direction is computed from the first words, and shown on the last `HELD_OUT` words.
SENTENCES: Final = (
    "The film was {}",
    "I found the food {}",
    "Their new song is {}",
    "This town is {}",
    "My day has been {}",
)
HELD_OUT: Final = 3
#: Steered text, layer, and multiple of the difference of means.
OPENING: Final = "My day at work was"
LAYER, DOSE = 18, 1.0


async def run(out: Path, terminal: Terminal) -> Path:
    """Run the demo and write its picture; return the picture's path.

    Args:
        out: folder for the picture.
        terminal: terminal for bars and the report.
    """
    with extra("demo"):
        import matplotlib as mpl

    from steercap.lab.demo import smollm2
    from steercap.model import SteerModel

    mpl.use("Agg")
    with terminal.progress() as tell:
        count = Count("converting SmolLM2 (once)", 1, 0, tell)
        path = await asyncio.to_thread(smollm2)
        count.add()
        count = Count("starting vLLM, probing every tap", 1, 0, tell)
        async with SteerModel(path, preset="cpu") as model:
            count.add()
            answers = await _answers(model, tell)
            lens, told = await _studies(model, tell)
            turned = await _turned(model, told, tell)
        count = Count("drawing", 1, 0, tell)
        picture = await asyncio.to_thread(_draw, path, lens, told, out)
        count.add()
    _report(answers, turned, lens, picture, terminal.err if terminal.json else terminal.out)
    return picture


async def _answers(model: SteerModel, tell: ProgressCallback) -> list[CaptureHandle]:
    """Ask all questions at once; return the answers' handles in order, with the rows of all layers fetched."""
    from steercap.captures.stacking import flat

    count = Count("generating, all layers captured", len(QUESTIONS), 0, tell)

    async def ask(question: str) -> CaptureHandle:
        params = {"max_tokens": 40, "temperature": 0.0}
        _, found = await model.chat([{"role": "user", "content": question}], params, capture_layers="all")
        count.add()
        (handle,) = flat(found)
        return handle

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(question)) for question in QUESTIONS]
    handles = [task.result() for task in tasks]
    await model.fetch_captures_batch(handles)
    return handles


async def _studies(model: SteerModel, tell: ProgressCallback) -> tuple[CaptureHandle, dict[str, torch.Tensor]]:
    """Return the lens prompt's handle, and last rows of praise and complaint by name: [sentences, layers, hidden]."""
    from steercap.captures.stacking import stack
    from steercap.core.spec import CaptureSpec

    lens = await model.read(LENS)
    await lens.fetch()
    told: dict[str, torch.Tensor] = {}
    count = Count("reading praise and complaint", 2, 0, tell)
    for name, words in (("praise", PRAISE), ("complaint", COMPLAINT)):
        prompts = [sentence.format(word) for word in words for sentence in SENTENCES]
        handles = await model.read(prompts, capture=CaptureSpec(tokens="last_prompt", codec="raw"))
        await model.fetch_captures_batch(handles)
        told[name] = stack(handles)
        count.add()
    return lens, told


async def _turned(model: SteerModel, projections: dict[str, torch.Tensor], tell: ProgressCallback) -> dict[str, str]:
    """Return continuations of the opening by name, from one batch: unsteered, towards praise, towards complaint."""
    from steercap.steering.edits.add import Add

    count = Count("steering", 1, 0, tell)
    direction = (projections["praise"].mean(0) - projections["complaint"].mean(0))[LAYER]
    specs = {
        "as it is": None,
        "towards praise": Add(direction, DOSE, layer=LAYER, tokens=slice(1, None)),
        "towards complaint": Add(direction, -DOSE, layer=LAYER, tokens=slice(1, None)),
    }
    params = {"max_tokens": 14, "temperature": 0.0}
    found = await model.generate([OPENING] * len(specs), params, steering=list(specs.values()))
    count.add()
    return {name: str(text) for name, text in zip(specs, found, strict=True)}


def separation(projections: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines of held-out rows with their layer's direction from complaint to praise: two [sentences, layers].

    The direction is the difference of means over the words that are not held out; rows are centred on their midpoint.
    """
    import torch

    unseen = HELD_OUT * len(SENTENCES)
    seen = {name: rows[:-unseen] for name, rows in projections.items()}
    middle = (seen["praise"].mean(0) + seen["complaint"].mean(0)) / 2
    direction = seen["praise"].mean(0) - seen["complaint"].mean(0)
    left, right = (
        torch.cosine_similarity(projections[name][-unseen:] - middle, direction, dim=-1)
        for name in ("praise", "complaint")
    )
    return left, right


def _draw(checkpoint: Path, lens: CaptureHandle, projections: dict[str, torch.Tensor], out: Path) -> Path:
    from steercap.lab.mechanism.views import logit_lens

    with extra("demo"):
        from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 8.5), width_ratios=[1.35, 1], layout="constrained")
    image = logit_lens(lens, checkpoint).draw(left)
    figure.colorbar(image, ax=left, label="probability of that token", shrink=0.6)
    _draw_separation(right, *separation(projections))
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "demo.png"
    figure.savefig(picture, dpi=110)
    plt.close(figure)
    return picture


def _draw_separation(axes: Any, praise: torch.Tensor, complaint: torch.Tensor) -> None:
    for name, colour, rows in (("praise", "tab:green", praise), ("complaint", "tab:red", complaint)):
        axes.plot(rows.T, color=colour, alpha=0.15, linewidth=1)
        axes.plot(rows.mean(0), color=colour, linewidth=2.5, label=f"{name}: {len(rows)} sentences with unseen words")
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set(
        title="Praise against complaint, along a direction\nfound from rows of other words",
        xlabel="layer",
        ylabel="cosine with the layer's direction",
    )
    axes.legend(loc="best")


def _report(
    answers: Sequence[CaptureHandle], turned: dict[str, str], lens: CaptureHandle, picture: Path, console: Console
) -> None:
    table = Table("question", "answer", "captured", title="SmolLM2-135M-Instruct, one batch", show_lines=True)
    for question, handle in zip(QUESTIONS, answers, strict=True):
        rows = handle.captures[0]
        shape = f"{len(handle.captures)} layers × {tuple(rows.shape)}\n{str(rows.dtype).removeprefix('torch.')}"
        table.add_row(question, handle.text.strip(), shape)
    console.print(table)
    table = Table("steered", f"{OPENING} ...", title=f"layer {LAYER}, the same batch again", show_lines=True)
    for name, text in turned.items():
        table.add_row(name, " ".join(text.split()))
    console.print(table)
    console.print(f"lens prompt: {LENS!r}, rows {tuple(lens.captures[0].shape)} at {len(lens.captures)} layers")
    console.print(f"picture: {picture}")
