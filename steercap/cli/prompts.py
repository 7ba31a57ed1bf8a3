"""Prompts and texts from the command line, files and stdin; and their requests, of which a limited number runs at once,
so that captured rows have room.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
import typer

from steercap.concurrency.loops import each_of
from steercap.errors import InvalidFile, InvalidPrompt

if TYPE_CHECKING:
    from steercap.captures.handle import CaptureHandle
    from steercap.core.spec import CaptureSpec
    from steercap.lab.training.training import AnyExample
    from steercap.model import SteerModel
    from steercap.requests.call_types import Generation
    from steercap.steering.spec import SteeringSpec

_prompts = partial(typer.Option, rich_help_panel="Prompts")
#: Maximum requests in flight without captures: more than vLLM runs at once by default, so that its batch is full.
UNDER_WAY: Final = 512
#: Maximum requests in flight with captures, whose rows stay in memory until they are written.
CAPTURING: Final = 32
#: Option `--special-tokens` of the commands that read texts.
SpecialTokens: TypeAlias = Annotated[
    bool | None,
    _prompts(
        "--special-tokens/--no-special-tokens",
        help="Add the tokenizer's special tokens, such as <bos>; turn off for rendered chats, which have them.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class PromptOptions:
    """Options for prompts: texts, files, and how they become input of the model."""

    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Prompts, or [cyan]-[/cyan] for stdin.")
    ] = None
    file: Annotated[
        str | None,
        _prompts(
            "--prompts",
            help="File of prompts: one per line; in .jsonl a string, or an object with [cyan]prompt[/cyan] or "
            "[cyan]messages[/cyan]; [cyan]-[/cyan] is stdin.",
        ),
    ] = None
    chat: Annotated[bool, _prompts("--chat", help="Apply the chat template to each prompt.")] = False
    system: Annotated[str | None, _prompts(help="System message; implies --chat.")] = None
    special_tokens: SpecialTokens = None

    def read(self) -> list[Prompt]:
        """Return every prompt, in order: those of the command line, then stdin, then the file.

        Raises:
            typer.BadParameter: there is no prompt, one that is no text, or --system beside a conversation with a system
                message of its own.
            InvalidFile: a file cannot be read, or a line is not a prompt.
        """
        given = [text for text in self.prompts or () if text != "-"]
        for name, text in [*(("PROMPT", text) for text in given), ("--system", self.system or "")]:
            if not text.isascii() and text != text.encode(errors="replace").decode():
                raise typer.BadParameter(f"{text!r} holds bytes that are no text in UTF-8", param_hint=name)
        found = [Prompt(text) for text in given]
        stdin = "-" if "-" in (self.prompts or ()) else None
        for name in dict.fromkeys(filter(None, (stdin, self.file))):
            found += [_prompt(name, number, value) for number, value in records_of(name)]
        if not found:
            raise typer.BadParameter("no prompt; give one or several, or --prompts", param_hint="PROMPT")
        return self.templated(found)

    def templated(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return prompts with the system message and, if asked for, as conversations.

        Raises:
            typer.BadParameter: --system beside a conversation with a system message of its own.
        """
        return [self._templated(prompt) for prompt in prompts]

    def _templated(self, prompt: Prompt) -> Prompt:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        if isinstance(prompt.content, str):
            if not self.chat and not system:
                return Prompt(prompt.content, self.special_tokens)
            return Prompt([*system, {"role": "user", "content": prompt.content}], self.special_tokens)
        if system and any(message["role"] == "system" for message in prompt.content):
            raise typer.BadParameter("a conversation has its own system message; leave it out", param_hint="--system")
        return Prompt([*system, *prompt.content], self.special_tokens)


@dataclass(frozen=True)
class Prompt:
    """Text to be continued, or conversation to be answered.

    Args:
        content: the text, or messages as dicts with "role" and "content".
        special: True to add the tokenizer's special tokens; None means True for a text, with a warning if the text has
            them already, and False for a conversation.
    """

    content: str | list[dict[str, str]]
    special: bool | None = None

    @property
    def shown(self) -> str:
        """Text that represents the prompt in output: the text itself, or the last message's."""
        return self.content if isinstance(self.content, str) else self.content[-1]["content"]


def questions_of(given: str | tuple[Any, ...]) -> list[Any]:
    """Return questions from a file, one per line, or from a tuple; a question of several turns is a sequence of texts.

    Raises:
        InvalidFile: the file cannot be read, or a conversation in it has messages that are not the user's.
    """
    if not isinstance(given, str):
        return list(given)
    read = PromptOptions(file=given).read()
    return [one.content if isinstance(one.content, str) else _questions(given, one.content) for one in read]


def _prompt(name: str, number: int, value: Any) -> Prompt:
    match value:
        case str() if value:
            return Prompt(value)
        case {"messages": [*messages]} if messages:
            try:
                conversation = msgspec.convert(messages, list[dict[str, str]])
            except msgspec.ValidationError as error:
                raise InvalidFile(f"{name}, line {number}: messages: {error}") from error
            if not all({"role", "content"} <= message.keys() for message in conversation):
                raise InvalidFile(
                    f"{name}, line {number}: messages: each needs a 'role', such as 'user', and 'content'"
                )
            return Prompt(conversation)
        case {"prompt": str(text)} if text:
            return Prompt(text)
    raise InvalidFile(f"{name}, line {number}: {value!r}; give text, {{'prompt': text}} or {{'messages': [...]}}")


def records_of(name: str) -> Iterator[tuple[int, Any]]:
    """Yield the number, from 1, and text of each non-empty line of a file ("-" for stdin); JSONL lines are decoded.

    A file is JSONL if its name ends in .jsonl, in any case, and stdin if its first line starts with a brace; a byte
    order mark is no part of either.

    Raises:
        InvalidFile: the file cannot be read, is empty, or a line is not JSON.
    """
    try:
        text = _stdin() if name == "-" else Path(name).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFile(f"{name} cannot be read as text: {error}") from error
    text = text.removeprefix("\ufeff")
    # Not splitlines: U+2028, U+0085 and the like are ordinary characters within a line, in JSON too.
    ends = ((number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1))
    lines = [(number, line) for number, line in ends if line.strip()]
    if not lines:
        raise InvalidFile(f"{name} holds no line of text; give one text a line")
    decoded = name.lower().endswith(".jsonl") or (name == "-" and lines[0][1].startswith("{"))
    for number, line in lines:
        yield number, _parsed(name, number, line) if decoded else line


def _stdin() -> str:
    """Return all of stdin as text; a lone carriage return does not end a line."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(newline="\n")
    if sys.stdin is None:
        raise InvalidFile("stdin is closed; give a file, or pipe texts in")
    return sys.stdin.read()


def examples_in(path: Path, name: str) -> dict[str, list[AnyExample]]:
    """Read the examples of a JSONL file, as lists by trait; `name` is the trait of lines without one.

    A line is as for `steercap.lab.training.datasets.example_of`, and has a `trait` where several are trained.

    Raises:
        InvalidFile: it cannot be read, or a line is not an example.
    """
    from steercap.lab.training.datasets import example_of

    found: dict[str, list[AnyExample]] = {}
    for number, value in records_of(str(path)):
        given = dict(value) if isinstance(value, dict) else {}
        trait = str(given.pop("trait", name))
        try:
            found.setdefault(trait, []).append(example_of(given))
        except InvalidPrompt as error:
            raise InvalidFile(f"{path}, line {number}: {error}") from error
    return found


def _parsed(name: str, number: int, line: str) -> Any:
    """Decode line `number` of the file `name` as JSON; raise InvalidFile, which names both, if it is not JSON."""
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise InvalidFile(f"{name}, line {number} is not JSON: {error}; give one JSON value per line") from error


async def run_each(
    model: SteerModel,
    prompts: Sequence[Prompt],
    params: Mapping[str, Any],
    take: Callable[[int, Generation | None, CaptureHandle | None], None],
    *,
    steering: SteeringSpec | None = None,
    capture: CaptureSpec | None = None,
) -> None:
    """Run prompts as one request each, and pass each result to `take` as its request ends, in any order.

    `take` is called with the prompt's index, its Generation (None for a pooling model, which generates nothing), and,
    with `capture`, a fetched handle, which is released afterwards. With `capture`, `params` asks for one sample.

    Raises:
        The errors of `SteerModel.generate`, the first of them.
    """
    from steercap.core.tokens import TokenSelection
    from steercap.lab.directions.extraction import prompts_and_rows

    texts = [prompt.content for prompt in prompts if isinstance(prompt.content, str) and prompt.special is None]
    await prompts_and_rows(model, texts, TokenSelection.parse("all"))  # warns once of doubled special tokens

    async def run(numbered: tuple[int, Prompt]) -> None:
        number, prompt = numbered
        special = prompt.special if prompt.special is not None else isinstance(prompt.content, str)
        asked: Any = {"capture": capture, "steering": steering, "add_special_tokens": special}
        if capture is not None and isinstance(prompt.content, str) and model.serving.here().vllm.pools:
            async with await model.read(prompt.content, **asked) as read:
                take(number, None, read)
            return
        found: Generation = await model.run(prompt.content, params, **asked)
        if capture is None:
            take(number, found, None)
            return
        async with found.handle as handle:
            take(number, found, handle)

    await each_of(enumerate(prompts), run, UNDER_WAY if capture is None else CAPTURING)


def _questions(path: str, messages: list[dict[str, str]]) -> list[str]:
    """Return the texts of a conversation in the file `path`, all of whose messages must be the user's.

    Raises:
        InvalidFile: the conversation has messages that are not the user's.
    """
    if any(message.get("role") != "user" for message in messages):
        raise InvalidFile(
            f"{path}: a question of several turns must hold only the user's messages; the model answers each"
        )
    return [message["content"] for message in messages]
