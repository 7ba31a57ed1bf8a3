"""YAML file and flags of an evaluation, and their conversion to methods, measures and tasks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from steercap.cli.contents import directions_in, load, only
from steercap.cli.parsing import base_of, tokens_of
from steercap.cli.prompts import PromptOptions
from steercap.cli.sweep_file import measure_from, measure_of
from steercap.core.extras import extra
from steercap.core.values import choices
from steercap.errors import InvalidFile, InvalidSpec

if TYPE_CHECKING:
    from steercap.lab.studies.evaluation import Evaluation, Method
    from steercap.lab.studies.sweeps import Measure


class MethodFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Method in a YAML file; see `steercap.lab.studies.evaluation.Method`. Without any key it means no steering.

    Args:
        file: path of steering, vectors or directions, relative to the folder of the YAML file.
        name: one of several directions of the file.
        base: row of layer 0 in a `.pt` file.
        layers: layers at which vectors are added, all at once; all of the file's if left out.
        tokens: tokens at which vectors are added, as in the shell; generated if left out.
        doses: factors of the steering.
        system: a system prompt.
        random: name of the method that this is a random control of; excludes all keys above.
        count: number of random controls; they are one row in tables.
        seed: seed of the random controls.
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
        """Return the method, if it is no control.

        Raises:
            InvalidFile, InvalidSpec: a file cannot be read, or `Method` refuses its arguments.
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
    """Evaluation in a YAML file; see `steercap.lab.studies.evaluation.Evaluation`. Flags override it.

    Args:
        methods: methods by name.
        questions: a file with a question per line, or a list; a question of several turns is a list itself.
        chat, samples, seed: as for `Evaluation`.
        max_tokens, temperature: sampling parameters.
        measures: as for a sweep: names in `MEASURES`, "score:evil", "score:mine.yaml:keywords".
        expressions: regular expressions by name; each measures the share of answers that match.
        tasks: names in `steercap.lab.studies.evaluation.TASKS`.
        by: column that methods are matched by; the first task if left out.
        at: value that they are matched at; the most that all reach if left out.
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
        """Create the evaluation.

        Raises:
            InvalidFile, InvalidSpec: files cannot be read, a control names a method that does not exist, or
                    `Evaluation` or `Method` refuse their arguments.
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
        """Return all measures, by name or as objects, those of expressions included.

        Raises:
            UnknownName, InvalidFile, InvalidSpec: a measure does not exist, or does not fit.
        """
        from steercap.lab.measures.texts import Matches

        named = [measure_of(measure) for measure in self.measures]
        return [*named, *(Matches(name, pattern) for name, pattern in self.expressions.items())]

    def _questions(self) -> list[Any]:
        if not isinstance(self.questions, str):
            return list(self.questions)
        read = PromptOptions(file=self.questions).read()
        return [one.content if isinstance(one.content, str) else _said(self.questions, one.content) for one in read]


def read_evaluation(path: Path, flags: Mapping[str, Any]) -> EvaluationFile:
    """Read the settings of a YAML file; flags override them.

    Raises:
        InvalidFile: no valid YAML, or a key that is unknown, missing or of the wrong type.
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
    """Return a method with its file's path relative to a folder resolved; None becomes no steering."""
    if isinstance(method, dict) and isinstance(method.get("file"), str):
        return {**method, "file": str(folder / method["file"])}
    return {} if method is None else method


def _said(path: str, messages: list[dict[str, str]]) -> list[str]:
    """Return the user's messages of a conversation in a file.

    Raises:
        InvalidFile: the conversation has messages that are not the user's.
    """
    if any(message.get("role") != "user" for message in messages):
        raise InvalidFile(f"{path}: a question of several turns holds what the user says alone; the model answers each")
    return [message["content"] for message in messages]
