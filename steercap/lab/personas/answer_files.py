"""Reader of files of existing answers and scores: `responses/NAME.jsonl` and `extract_scores/NAME.json`.

A line of the first is an object with `conversation`, a list of {"role", "content"} whose last turn is the assistant's,
`label`, `prompt_index` and `question_index`; the second maps `LABEL_pP_qQ` to a number or "REFUSAL".
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from steercap.core.prompts import templated
from steercap.core.values import choices, shown
from steercap.errors import InvalidFile, InvalidPrompt, InvalidSpec, UnknownName
from steercap.files.base import require_file
from steercap.lab.personas.levels import LEVELS, REFUSAL, PersonaKind, plan_levels

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Maximum number of keys that an error lists.
_SHOWN: Final = 3
_Index: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class _AnswerLine(msgspec.Struct, frozen=True):
    """Line of a file of answers; other fields are ignored."""

    conversation: list[dict[str, Any]]
    label: Literal["pos", "neg", "default"]
    prompt_index: _Index
    question_index: _Index


class ExistingAnswer(NamedTuple):
    """Answer in a file.

    Args:
        key: key of the answer, `LABEL_pP_qQ`, of label, prompt index and question index.
        line: number of the answer's line in the file, from 1.
        conversation: messages, the last of which is the answer.
    """

    key: str
    line: int
    conversation: list[dict[str, Any]]


@dataclass(frozen=True)
class PersonaFiles:
    """Files of one persona, checked.

    Args:
        name: name of the persona, the stem of its files' names.
        responses: path of the file of answers.
        scores: score of each scored answer by key; None for a role's default answers, which are not scored.
        keys: keys of the answers, in the order of the file.
        digest: SHA-256 of the file of answers, in hexadecimal.
    """

    name: str
    responses: Path
    scores: Mapping[str, float | str] | None
    keys: tuple[str, ...]
    digest: str

    @property
    def is_default(self) -> bool:
        """True if all answers are default answers."""
        return only_default(self.keys)

    @property
    def scores_digest(self) -> str:
        """SHA-256 of the scores, in hexadecimal."""
        return hashlib.sha256(msgspec.json.encode(self.scores, order="deterministic")).hexdigest()


def only_default(keys: Iterable[str]) -> bool:
    """Return True if all keys are of default answers."""
    return all(key.startswith("default_") for key in keys)


def read_personas(
    responses: str | Path, scores: str | Path, kind: PersonaKind, names: Sequence[str] | None = None
) -> list[PersonaFiles]:
    """Read and check the files of personas, and return them in the order of their names.

    Args:
        responses: folder of `NAME.jsonl`.
        scores: folder of `NAME.json`.
        kind: "trait" or "role". A role's file with only answers labelled "default" needs no scores.
        names: names of the personas; all that have answers by default.

    Raises:
        UnknownName: `kind` is neither, or there is no file of answers of a name.
        InvalidFile: the folder has no files of answers; or a file is not valid, is missing, or does not fit the other.
    """
    if kind not in LEVELS:
        raise UnknownName(f"kind={shown(kind)}; {choices(kind, LEVELS)}")
    found = {path.stem: path for path in sorted(Path(responses).glob("*.jsonl"))}
    if not found:
        raise InvalidFile(f"{responses} holds no answers; give the folder of the files NAME.jsonl")
    if unknown := [name for name in names or () if name not in found]:
        raise UnknownName(f"no answers of {unknown[0]!r} in {responses}; {choices(unknown[0], found)}")
    lonely = [path for path in sorted(Path(scores).glob("*.json")) if path.stem not in found]
    if lonely and names is None:
        more = f" and {len(lonely) - 1} more" if len(lonely) > 1 else ""
        raise InvalidFile(f"{lonely[0]}{more}: scores without {responses}/{lonely[0].stem}.jsonl; name the personas")
    return [
        _persona(path, Path(scores) / f"{name}.json", kind)
        for name, path in found.items()
        if names is None or name in names
    ]


def _persona(path: Path, scores: Path, kind: PersonaKind) -> PersonaFiles:
    keys = tuple(answer.key for answer in read_answers_file(path))
    unscored = kind == "role" and only_default(keys) and not scores.exists()
    found = None if unscored else read_scores(scores, keys, path)
    try:
        plan_levels(kind, keys, found or {})
    except InvalidSpec as error:
        raise InvalidFile(f"{scores}: {error}") from error
    return PersonaFiles(path.stem, path, found, keys, hashlib.sha256(path.read_bytes()).hexdigest())


def read_answers_file(path: Path) -> list[ExistingAnswer]:
    """Read a file of answers, and return them in order.

    Raises:
        InvalidFile: the file is missing or empty, or a line is not valid, is cut off, has the key of another line, or
            has an answer without text; the message names the file, the line and the key.
    """
    require_file(path)
    content, lines = path.read_bytes(), dict[str, int]()
    found: list[ExistingAnswer] = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            decoded = msgspec.json.decode(line, type=_AnswerLine)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            cut = " (the file ends in this line: it was cut off)" if content.endswith(line) else ""
            raise InvalidFile(
                f"{path}, line {number}{cut}: {error}; expected conversation, label, prompt_index and question_index"
            ) from error
        key = f"{decoded.label}_p{decoded.prompt_index}_q{decoded.question_index}"
        where = f"{path}, line {number}, {key}"
        if key in lines:
            raise InvalidFile(f"{where}: line {lines[key]} has this key, too; remove one of them")
        _check_conversation(decoded.conversation, where)
        lines[key] = number
        found.append(ExistingAnswer(key, number, decoded.conversation))
    if not found:
        raise InvalidFile(f"{path} holds no answers; remove it")
    return found


def _check_conversation(conversation: Sequence[Mapping[str, Any]], where: str) -> None:
    """Check that all messages have text, and that the last is a non-empty answer of the assistant."""
    for index, message in enumerate(conversation):
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise InvalidFile(f"{where}: message {index} is {shown(message)}; expected role and content, both text")
    last = conversation[-1]["role"] if conversation else None
    if last != "assistant":
        raise InvalidFile(f"{where}: the conversation ends in {shown(last)}; expected a turn of 'assistant'")
    if not conversation[-1]["content"].strip():
        raise InvalidFile(f"{where}: the answer is empty, and has no rows; remove the line")


def read_scores(path: Path, keys: Sequence[str], responses: Path) -> dict[str, float | str]:
    """Read a file of scores: by key of the answer, a number or "REFUSAL".

    `keys` are the keys of the answers in the file `responses`.

    Raises:
        InvalidFile: the file is missing or not valid, a key is given twice or has no answer, or a score is neither.
    """
    require_file(path)
    try:
        found = json.loads(path.read_bytes(), object_pairs_hook=lambda pairs: _once(pairs, path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidFile):
            raise
        raise InvalidFile(f"{path} cannot be read as JSON: {error}; score the answers again") from error
    if not isinstance(found, dict):
        raise InvalidFile(f"{path} holds {shown(found)}; expected an object from keys to scores")
    known = set(keys)
    if extra := [key for key in found if key not in known]:
        named = ", ".join(extra[:_SHOWN]) + (f" and {len(extra) - _SHOWN} more" if len(extra) > _SHOWN else "")
        raise InvalidFile(f"{path} scores {named}, which is not in {responses}; {choices(extra[0], keys)}")
    for key, score in found.items():
        number = isinstance(score, (int, float)) and not isinstance(score, bool) and math.isfinite(score)
        if not number and score != REFUSAL:
            raise InvalidFile(f"{path}, {key}: the score is {shown(score)}; expected a number or {REFUSAL!r}")
    return found


def _once(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    found = dict[str, Any]()
    for key, value in pairs:
        if key in found:
            raise InvalidFile(f"{path} has the key {key!r} twice; keep one of them")
        found[key] = value
    return found


def placed_in(
    model: SteerModel, path: Path, answer: ExistingAnswer, template: Mapping[str, Any]
) -> tuple[list[int], int]:
    """Return the token ids of a conversation up to the end of its answer, and the position of the answer's first token.

    Args:
        model: the model that will read the conversation.
        path: file of the answer, for error messages.
        answer: the answer.
        template: further arguments of the chat template.

    Raises:
        InvalidFile: the chat template does not render the answer exactly once.
        InvalidPrompt: the conversation is too long for the context.
    """
    where, index = f"{path}, line {answer.line}, {answer.key}", len(answer.conversation) - 1
    arguments = {"add_generation_prompt": False, **template}
    ids, spans = templated(model.tokenizer, answer.conversation, arguments, spans=True)
    mine = [span for span in spans if span.index == index]
    if len(mine) != 1 or mine[0].missing or mine[0].start == mine[0].stop:
        why = mine[0].missing if len(mine) == 1 else f"the chat template writes it {len(mine)} times"
        raise InvalidFile(f"{where}: the tokens of the answer cannot be found: {why or 'it has none'}")
    if mine[0].stop >= model.max_model_len:
        raise InvalidPrompt(
            f"{where}: {mine[0].stop} tokens, and the model has room for {model.max_model_len - 1}; start it with "
            "a larger max_model_len, or remove the line"
        )
    return ids[: mine[0].stop], mine[0].start
