"""What an evaluation is told by a YAML file and flags, and the methods, measures and tasks that this means."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from steercap.cli.contents import directions_in, load, only
from steercap.cli.prompts import PromptOptions
from steercap.cli.selections import tokens_of
from steercap.cli.steering import base_of
from steercap.cli.sweep_file import measure_from, measure_of
from steercap.core.extras import extra
from steercap.core.values import choices
from steercap.errors import InvalidFile, InvalidSpec

if TYPE_CHECKING:
    from steercap.lab.studies.evaluation import Evaluation, Method
    from steercap.lab.studies.sweeps import Measure


class MethodFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One method of a YAML file; see `steercap.lab.studies.evaluation.Method`. With no key at all it is no steering.

    Args:
        file: of steering, vectors or directions; a path from the folder of the YAML file.
        name: which of several directions of the file.
        base: of a `.pt`, the row of layer 0.
        layers: of vectors, where they are added, all at once; all that the file has if left out.
        tokens: of vectors, which are steered, as in the shell; generated if left out.
        doses: factors.
        system: a system prompt.
        random: instead of all these: the method that this is a random control of.
        count: of random controls, how many; they are one in tables.
        seed: of their draw.
    """

    file: str = ""
    name: str | None = None
    base: int | None = None
    layers: tuple[int, ...] | None = None
    tokens: str | None = None
    doses: tuple[float, ...] = (1.0,)
    system: str = ""
    random: str = ""
    count: int = 5
    seed: int = 0

    def method(self, name: str) -> Method:
        """The method, if it is no control.

        Raises:
            InvalidFile, InvalidSpec: a file that cannot be read, or what `Method` refuses.
        """
        from steercap.lab.studies.evaluation import Method
        from steercap.steering.spec import SteeringSpec

        given: dict[str, Any] = {"name": name, "doses": self.doses, "system": self.system}
        if not self.file:
            return Method(**given, layers=self.layers, tokens=self.tokens)
        content = load(Path(self.file), base=base_of(self.base))
        if isinstance(content, dict):
            raise InvalidSpec(f"{self.file} holds several experiments; evaluate their specs in Python")
        if isinstance(content, SteeringSpec):
            return Method(**given, steering=content, layers=self.layers, tokens=self.tokens)
        vectors = only(directions_in(content, Path(self.file)), self.name)
        tokens = tokens_of("generated" if self.tokens is None else self.tokens)
        return Method(**given, steering=vectors, layers=self.layers, tokens=tokens)


class EvaluationFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a YAML file of an evaluation holds; see `steercap.lab.studies.evaluation.Evaluation`. Flags come before it.

    Args:
        methods: by their names.
        questions: a file of them, a line each, or a list; one of several turns is a list itself.
        chat, samples, seed: as for `Evaluation`.
        max_tokens, temperature: of the sampling.
        measures: as for a sweep: names in `MEASURES`, "score:evil", "score:mine.yaml:keywords".
        expressions: regular expressions by name; of each, the share of answers in which it is found.
        tasks: names in `steercap.lab.studies.evaluation.TASKS`.
        by: the column that methods are matched by; the first task if left out.
        at: what they are matched at; the most that all reach if left out.
    """

    methods: dict[str, MethodFile]
    questions: str | tuple[str | tuple[str, ...], ...]
    chat: bool = True
    samples: int = 1
    seed: int = 0
    max_tokens: int = 64
    temperature: float = 0.0
    measures: tuple[str, ...] = ("perplexity", "repetition", "refusal")
    expressions: dict[str, str] = {}
    tasks: tuple[str, ...] = ("passages", "choices")
    by: str | None = None
    at: float | None = None

    def evaluation(self) -> Evaluation:
        """What is compared, and on what.

        Raises:
            InvalidFile, InvalidSpec: files that cannot be read, a control of a method that is not there, or what
                `Evaluation` and `Method` refuse.
        """
        from steercap.lab.studies.evaluation import Evaluation

        found = {name: one.method(name) for name, one in self.methods.items() if not one.random}
        methods = list(found.values())
        for name, one in self.methods.items():
            if one.random:
                if one.random not in found:
                    raise InvalidSpec(f"{name!r} is a random control of {one.random!r}; {choices(one.random, found)}")
                methods += found[one.random].random(one.count, seed=one.seed)
        return Evaluation(
            methods=methods,
            questions=self._questions(),
            sampling={"max_tokens": self.max_tokens, "temperature": self.temperature},
            samples=self.samples,
            chat=self.chat,
            seed=self.seed,
        )

    def all_measures(self) -> list[str | Measure]:
        """Measures by name or made, those of expressions included.

        Raises:
            UnknownName, InvalidFile, InvalidSpec: one that does not exist, or does not fit.
        """
        from steercap.lab.measures.matches import Matches

        named = [measure_of(measure) for measure in self.measures]
        return [*named, *(Matches(name, pattern) for name, pattern in self.expressions.items())]

    def _questions(self) -> list[Any]:
        if not isinstance(self.questions, str):
            return list(self.questions)
        read = PromptOptions(file=self.questions).read()
        return [one.content if isinstance(one.content, str) else _said(self.questions, one.content) for one in read]


def read_evaluation(path: Path, flags: Mapping[str, Any]) -> EvaluationFile:
    """The settings of a YAML file, with what flags say in their place.

    Raises:
        InvalidFile: no YAML, or a key that is unknown, missing or does not fit.
    """
    with extra("evaluation"):
        import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidFile(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(found, dict):
        raise InvalidFile(f"{path} holds {type(found).__name__}; give keys and values: methods: and questions:")
    if isinstance(found.get("methods"), dict):
        found["methods"] = {name: _located(path.parent, one) for name, one in found["methods"].items()}
    if isinstance(found.get("questions"), str):
        found["questions"] = str(path.parent / found["questions"])
    if isinstance(found.get("measures"), list):
        found["measures"] = [measure_from(path.parent, measure) for measure in found["measures"]]
    found |= {name: value for name, value in flags.items() if value is not None}
    try:
        return msgspec.convert(found, EvaluationFile)
    except msgspec.ValidationError as error:
        known = ", ".join(EvaluationFile.__struct_fields__)
        raise InvalidFile(f"{path}: {error}; known: {known}; of a method: {_METHOD}") from error


_METHOD = ", ".join(MethodFile.__struct_fields__)


def _located(folder: Path, method: Any) -> Any:
    """A method whose file has its path from a folder; nothing is no steering."""
    if isinstance(method, dict) and isinstance(method.get("file"), str):
        return {**method, "file": str(folder / method["file"])}
    return {} if method is None else method


def _said(path: str, messages: list[dict[str, str]]) -> list[str]:
    """What the user says in a conversation of a file.

    Raises:
        InvalidFile: somebody else speaks in it, whose part the model has.
    """
    if any(message.get("role") != "user" for message in messages):
        raise InvalidFile(f"{path}: a question of several turns holds what the user says alone; the model answers each")
    return [message["content"] for message in messages]
