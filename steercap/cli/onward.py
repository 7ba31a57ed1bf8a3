"""Follow-up commands of a run of personas: sweeps that test whether its vectors cause their traits."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from steercap.cli.engines import ModelOptions
    from steercap.lab.personas import PersonaResult, PersonaSettings

#: Maximum characters per line of a command that is printed for pasting.
FOLD: Final = 94


def sweeps_of(
    result: PersonaResult, settings: PersonaSettings, given: Mapping[str, str], model: ModelOptions
) -> list[str]:
    """Return a sweep command for each vector: at its best layer, on the trait's questions, which are written to the
    folder of the run.

    `given` holds the user's name or file of each trait, by trait name.

    Raises:
        OSError: the questions cannot be written.
    """
    from steercap.files.base import write_whole

    found: list[str] = []
    for trait in settings.resolved():
        layer = result.outcomes[trait.name].best_layer
        if layer is None:
            continue
        questions = result.folder / "questions" / f"{trait.name}.jsonl"
        with write_whole(questions) as scratch:
            scratch.write_bytes(b"".join(msgspec.json.encode({"prompt": one}) + b"\n" for one in trait.questions))
        # A scorer with arguments, such as a judge, has no short name.
        scorer = [] if settings.scorer_args or settings.scorer == "minilm" else [settings.scorer]
        words: dict[str, object] = {
            "--vectors": result.folder / "directions.safetensors",
            "--names": trait.name,
            "--layers": layer,
            "--scales": "1,2",
            "--prompts": questions,
            "--measures": ":".join(["perplexity,score", given[trait.name], *scorer]),
            "--max-tokens": settings.max_tokens,
            "--out": f"{result.folder}-sweep/{trait.name}",
        }
        said = [str(word) for pair in words.items() for word in pair]
        found.append(shlex.join(["steercap", "sweep", *said, "--chat", *model.flags()]))
    return found


def folded(command: str) -> str:
    """Fold a command into shell lines; each starts with an option, with its values on the same line."""
    parts: list[str] = []
    for word in shlex.split(command):
        if not parts or word.startswith("-"):
            parts.append(shlex.quote(word))
        else:
            parts[-1] += f" {shlex.quote(word)}"
    lines = parts[:1]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) < FOLD:
            lines[-1] += f" {part}"
        else:
            lines.append(f"  {part}")
    return " \\\n".join(lines)
