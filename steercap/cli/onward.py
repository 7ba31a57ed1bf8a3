"""How to go on from a run of personas: the commands of the sweeps that say whether its vectors cause their traits."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from steercap.cli.engines import ModelOptions
    from steercap.lab.personas import PersonaResult, PersonaSettings

#: Letters of a line of a command that is printed to be pasted.
FOLD: Final = 94


def sweeps_of(
    result: PersonaResult, settings: PersonaSettings, given: Mapping[str, str], model: ModelOptions
) -> list[str]:
    """The command that goes on with each vector: at its best layer, on the trait's questions, which are written into
    the run's folder.

    Args:
        result: of the run.
        settings: of the run.
        given: what the user called each trait, by its name: the same, or a file.
        model: which model it was.

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
        # A scorer with arguments, such as a judge, cannot be named in a word.
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
    """A command on several lines, which a shell joins; options begin them, with their values beside them."""
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
