"""Data sets of training examples: folders of them, token budgets, and the results of training on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from steercap.core.display import brief
from steercap.core.hints import dataclass
from steercap.core.values import choices, count_of, shown
from steercap.errors import InvalidFile, InvalidPrompt, InvalidSetting, RunDiffers, UnknownName
from steercap.files.base import blame, require_file
from steercap.lab.training.examples import Example, Preference, Prompted
from steercap.steering.spec import SteeringSpec

#: File of the result of training on a data set, and file of its held-out examples.
RESULT, HELD_OUT = "result.json", "held_out.jsonl"
#: Type of example by the fields of its line, sorted, without `source`.
FORMS: Final = {
    ("prompt", "response"): Example,
    ("chosen", "prompt", "rejected"): Preference,
    ("prompt", "response", "system"): Prompted,
}


def example_of(given: Mapping[str, Any]) -> Example | Preference | Prompted:
    """Return the example in a decoded line of JSONL, by its fields.

    In place of the fields of an example, a line may have `text`, a response without a prompt, or `conversation` (or
    `messages`): turns, the last one being the response, and a first one of `system` the system prompt of a `Prompted`.

    Raises:
        InvalidPrompt: the fields, or the turns, are not those of an example.
    """
    fields = {name: value for name, value in given.items() if name != "system" or value is not None}
    forms = [name for name in ("text", "conversation", "messages") if name in fields]
    if forms and len(fields.keys() - {"source"}) > 1:
        raise InvalidPrompt(f"fields {shown(sorted(given))}: {forms[0]} already is the whole example; give {ACCEPTED}")
    if "text" in fields:
        fields |= {"prompt": "", "response": fields.pop("text")}
    for name in forms:
        if name != "text":
            fields |= _turns(fields.pop(name))
    kind = FORMS.get(tuple(sorted(fields.keys() - {"source"})))
    if kind is None:
        raise InvalidPrompt(f"fields {shown(sorted(given))}; give {ACCEPTED}, each with or without 'source'")
    made: Example | Preference | Prompted = kind(**fields)
    return made


#: Accepted sets of fields of a line, for errors.
ACCEPTED: Final = "text; conversation; prompt, response; prompt, chosen, rejected; or system, prompt, response"


def _turns(turns: Any) -> dict[str, Any]:
    """Convert a conversation to the fields of an example: prompt, response, and system if it has one."""
    fits = isinstance(turns, Sequence) and not isinstance(turns, str) and len(turns) > 1
    if not fits or not all(isinstance(turn, Mapping) and {"role", "content"} <= turn.keys() for turn in turns):
        raise InvalidPrompt(f"conversation={shown(turns)}; give turns of role and content, the last the response")
    *before, last = turns
    if last["role"] != "assistant" or not isinstance(last["content"], str):
        raise InvalidPrompt(f"a conversation ends in {shown(last)}; give a text of 'assistant' as its last turn")
    found: dict[str, Any] = {"response": last["content"]}
    if before[0]["role"] == "system":
        found["system"] = before.pop(0)["content"]
    if not before:
        raise InvalidPrompt(f"conversation={shown(turns)}; give a turn of 'user' before the response")
    return found | {"prompt": before}


class ExampleFolder(Mapping[str, "list[Example | Preference | Prompted]"]):
    """Data sets of examples in a folder: a mapping by name, NAME.jsonl, each file read when its name is looked up.

    Lines are as for `example_of`. Lines of persona files also have `label`, `prompt_index` and `question_index`: only
    lines with the given `label` are examples, and lines of one question have one source.

    Args:
        folder: path of the folder.
        names: pattern of the names, such as "qwen-3-32b__trait__*".
        label: label of the examples, such as "pos", where lines have labels; None if they have none.

    Raises:
        InvalidFile: no file has such a name.
    """

    def __init__(self, folder: str | Path, names: str = "*", label: str | None = None) -> None:
        self.folder, self.label = Path(folder), label
        known = sorted(path.stem for path in self.folder.glob("*.jsonl"))
        self._names = [name for name in known if fnmatchcase(name, names)]
        if not self._names:
            raise InvalidFile(f"{folder}: no data set {names!r}.jsonl; {choices(names, known)}")

    def __getitem__(self, name: str) -> list[Example | Preference | Prompted]:
        """Read the examples of the data set `name`, in order of lines.

        Raises:
            UnknownName: there is no data set of this name; also a KeyError.
            InvalidFile: a line is no example, or has a label although `label` is None, or none although it is given.
        """
        if name not in self._names:
            raise UnknownName(f"no data set {shown(name)} in {self.folder}; {choices(name, self._names)}")
        path = self.folder / f"{name}.jsonl"
        require_file(path)
        lines = path.read_bytes().split(b"\n")
        found = [self._example(f"{path}, line {at}", line) for at, line in enumerate(lines, 1) if line.strip()]
        return [example for example in found if example is not None]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _example(self, where: str, line: bytes) -> Example | Preference | Prompted | None:
        """Return the example of a line, None if its label is another; `where` is the line's place, for errors."""
        try:
            given = msgspec.json.decode(line, type=dict[str, Any])
            label, question = given.pop("label", None), given.pop("question_index", None)
            given.pop("prompt_index", None)
            if question is not None and given.get("source") is None:
                given["source"] = str(question)
            found = example_of(given)
        except (msgspec.MsgspecError, UnicodeDecodeError, InvalidPrompt) as error:
            raise InvalidFile(f"{where}: {error}") from error
        if (label is None) != (self.label is None):
            wanted = "give label= of those to learn, such as 'pos'" if label else "leave label= out"
            raise InvalidFile(f"{where} has the label {shown(label)}, and label={shown(self.label)}; {wanted}")
        return found if label == self.label else None


@dataclass(frozen=True)
class TokenBudget:
    """Numbers of tokens to train on and to validate on.

    Whole examples are drawn, source by source, until their sequences together have at least that many tokens; the rest
    are not used.

    Args:
        training, validation: numbers of tokens.

    Raises:
        InvalidSetting: a number is not a whole number of 1 or more.
    """

    training: int = 100_000
    validation: int = 10_000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            count_of(value, name, wrong=InvalidSetting)

    def draw(self, tokens: Sequence[int], sources: Sequence[str | None], seed: int) -> tuple[list[int], list[int]]:
        """Draw examples; return the indices, ascending, of those to train on and of those to hold out.

        Args:
            tokens: number of tokens of each example.
            sources: source of each example, in one part alone; None for a source of its own.
            seed: seed of the draw, which does not depend on the order of the sources.
        """
        groups: dict[tuple[str, str], list[int]] = {}
        for place, source in enumerate(sources):
            groups.setdefault((f"{place:012}", "") if source is None else ("", str(source)), []).append(place)
        order = sorted(groups)
        Random(seed).shuffle(order)  # noqa: S311 -- a split, no secret
        left = iter(order)
        held_out, seen = (_until(bound, left, groups, tokens) for bound in (self.validation, self.training))
        return seen, held_out


def _until(bound: int, order: Iterator[Any], groups: Mapping[Any, list[int]], tokens: Sequence[int]) -> list[int]:
    """Return the indices, ascending, of examples taken source by source until they have `bound` tokens."""
    found: list[int] = []
    count = 0
    while count < bound and (source := next(order, None)) is not None:
        for place in groups[source]:
            if count < bound:
                found.append(place)
                count += tokens[place]
    return sorted(found)


class TextLoss(msgspec.Struct, frozen=True):
    """Loss and perplexity of responses.

    Args:
        loss: mean over the examples of their mean negative log probability per token, in nats: the validation loss.
        perplexity: exp of the mean negative log probability over all tokens of all responses.
        tokens: number of tokens of all responses.
    """

    loss: float
    perplexity: float
    tokens: int


class RateLoss(msgspec.Struct, frozen=True):
    """Result of training at one learning rate.

    Args:
        lr: learning rate.
        validation_loss: lowest held-out loss; None if losses were not finite.
        best_step, steps: step of the lowest loss, 0 before the first step; step of the last validation.
    """

    lr: float
    validation_loss: float | None = None
    best_step: int = 0
    steps: int = 0


class DatasetTrained(msgspec.Struct, frozen=True):
    """Result of one data set, in its `result.json`.

    Args:
        name: name of the data set.
        model: name of the model.
        lr: learning rate of the vector that is kept.
        norm: Euclidean norm of the trained parameters.
        rates: result of each learning rate.
        examples, held_out, left_out: numbers of examples trained on, held out, and beyond the budgets.
        tokens, held_out_tokens: numbers of tokens trained on and held out, prompts included.
        validation: losses of the held-out responses: "unsteered", "trained", and if all examples have a system
            prompt "prompted"; empty for preferences.
    """

    name: str
    model: str
    lr: float
    norm: float
    rates: list[RateLoss]
    examples: int
    held_out: int
    left_out: int
    tokens: int
    held_out_tokens: int
    validation: dict[str, TextLoss]


@dataclass(frozen=True)
class TrainedDatasets:
    """Results of `train_datasets`.

    Args:
        out: folder of the run. In `NAME/`: the edit at its best (`NAME.safetensors`, and as `steering_vector.pt` where
            it is one vector of the stream), its history, `result.json` and `held_out.jsonl`.
        results: result of each data set that was trained, by name.
        skipped: reasons, by name, why other data sets were not trained.
    """

    out: Path
    results: Mapping[str, DatasetTrained]
    skipped: Mapping[str, str]

    __repr__ = brief

    def spec(self, name: str) -> SteeringSpec:
        """Read the trained edit of the data set `name`."""
        return SteeringSpec.load(self.out / name / f"{name}.safetensors")

    def __str__(self) -> str:
        skipped = "".join(f"; skipped: {name} ({reason})" for name, reason in self.skipped.items())
        return f"{len(self.results)} data sets trained{skipped}"


def read_result(folder: str | Path) -> DatasetTrained:
    """Read the result of training on a data set from its folder.

    Raises:
        InvalidFile: `result.json` is missing, or is not such a result.
    """
    file = Path(folder) / RESULT
    try:
        return msgspec.json.decode(file.read_bytes(), type=DatasetTrained)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidFile(f"{file} cannot be read as the result of a data set: {error}") from error


def check_systems(folder: Path, held_out: Sequence[Any]) -> None:
    """Check that a folder's held-out examples, by which its result was computed, have the given ones' system prompts.

    Raises:
        RunDiffers: they have other system prompts.
        InvalidFile: the folder's examples cannot be read.
    """
    with blame(file := folder / HELD_OUT):
        lines = file.read_bytes().splitlines() if file.exists() else []
        known = [msgspec.json.decode(line, type=dict[str, Any]).get("system") for line in lines]
    if known and known != [getattr(example, "system", None) for example in held_out]:
        raise RunDiffers(
            f"{folder} holds a training on other system prompts, see {HELD_OUT}; give another folder, or them"
        )
