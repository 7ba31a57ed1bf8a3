"""YAML files and flags of an evaluation and of rollouts, and their conversion to methods, measures and data sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import msgspec

from steercap.cli.contents import directions_in, load, only
from steercap.cli.parsing import loaded, tokens_of
from steercap.cli.prompts import questions_of
from steercap.cli.sweep_file import measure_of, not_none, sampling_of, settings_of, yaml_keys
from steercap.core.values import choices
from steercap.errors import InvalidSpec

if TYPE_CHECKING:
    from steercap.lab.measures.scores.judge import Judge
    from steercap.lab.studies.evaluation import Evaluation, Method
    from steercap.lab.studies.rollouts import RolloutSet
    from steercap.lab.studies.sweeps import Measure
    from steercap.steering.layers import LayerVectors


class MethodFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Method in a YAML file; see `steercap.lab.studies.evaluation.Method`. Without any key it is no steering.

    Args:
        file: path of steering, vectors or directions, relative to the folder of the YAML file.
        name: name of the direction to use, if the file has several.
        first_row: row of layer 0 in a `.pt` file.
        layers: layers at which vectors are added, all at once; all of the file's if left out.
        tokens: tokens at which vectors are added, as for the option `--tokens`; generated if left out.
        doses: factors by which the steering is multiplied.
        system: system prompt.
        random: name of the method of which this is a random control; excludes all keys above.
        count: number of random controls; tables have one row for all of them.
        seed: seed of the random controls.
    """

    file: str = ""
    name: str | None = None
    first_row: Literal[0, 1] | None = None
    layers: tuple[int, ...] | None = None
    tokens: str | None = None
    doses: tuple[float, ...] = (1.0,)
    system: str = ""
    random: str = ""
    count: Annotated[int, msgspec.Meta(ge=1)] | None = None
    seed: int | None = None

    def check(self, name: str) -> None:
        """Check that no key of the method, called `name`, is without effect.

        Raises:
            InvalidSpec: a control has keys of a method, or a method those of a control, or of a file that it lacks.
        """
        given = {key for key, default in msgspec.structs.asdict(MethodFile()).items() if getattr(self, key) != default}
        unused = given & {"count", "seed", *(() if self.file else ("name", "first_row"))}
        if self.random:
            unused = given - {"random", "count", "seed"}
        if unused:
            why = "beside `random`" if self.random else "without `random`, or `file`"
            raise InvalidSpec(f"method {name!r}: {', '.join(sorted(unused))} would change nothing {why}; leave it out")

    def method(self, name: str) -> Method:
        """Return the method, called `name`; not for a random control. Reads its file.

        Raises:
            InvalidFile, InvalidSpec: a file cannot be read, or `Method` refuses its arguments.
        """
        from steercap.lab.studies.evaluation import Method
        from steercap.steering.spec import SteeringSpec

        given: dict[str, Any] = {"name": name, "doses": self.doses, "system": self.system}
        if not self.file:
            return Method(**given, layers=self.layers, tokens=self.tokens)
        content = loaded(Path(self.file), self.first_row, f"first_row of method {name!r}")
        if isinstance(content, dict):
            raise InvalidSpec(f"{self.file} holds several experiments; evaluate their specs in Python")
        if isinstance(content, SteeringSpec):
            return Method(**given, steering=content, layers=self.layers, tokens=self.tokens)
        vectors = only(directions_in(content, Path(self.file)), self.name)
        tokens = None if self.tokens is None else tokens_of(self.tokens, "tokens")
        return Method(**given, steering=vectors, layers=self.layers, tokens=tokens)


class EvaluationFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Evaluation in a YAML file; see `steercap.lab.studies.evaluation.Evaluation`. Flags override it.

    Args:
        methods: methods by name.
        questions: a file with a question per line, or a list; a question of several turns is a list itself.
        chat, samples, seed: as for `Evaluation`, with its defaults.
        max_tokens, temperature: sampling parameters.
        concurrency: maximum concurrent requests.
        measures: as for a sweep: names in `MEASURES`, "score:evil", "score:mine.yaml:keywords".
        expressions: regular expressions by name; each measures the share of answers that match.
        tasks: names in `steercap.lab.studies.evaluation.TASKS`.
        by: column whose value is equal for all methods that are compared; the first task if left out.
        at: that value; if left out, the one of the highest cost that all methods reach.
    """

    methods: dict[str, MethodFile]
    questions: str | tuple[str | tuple[str, ...], ...]
    chat: bool | None = None
    samples: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    concurrency: Annotated[int, msgspec.Meta(ge=1)] | None = None
    measures: tuple[str, ...] = ("perplexity", "repetition", "refusal")
    expressions: dict[str, str] = {}
    tasks: tuple[str, ...] = ("passages", "choices")
    by: str | None = None
    at: float | None = None

    def evaluation(self) -> Evaluation:
        """Create the evaluation, with all random controls; reads the files of methods and questions.

        Raises:
            InvalidFile, InvalidSpec: files cannot be read, a control names a method that does not exist, a key would
                    change nothing, or `Evaluation` or `Method` refuse their arguments.
        """
        from steercap.lab.studies.evaluation import Evaluation

        for name, one in self.methods.items():
            one.check(name)
        found = {name: one.method(name) for name, one in self.methods.items() if not one.random}
        methods = list(found.values())
        for name, one in self.methods.items():
            if one.random:
                if one.random not in found:
                    raise InvalidSpec(
                        f"{name!r} is a random control of the unknown method {one.random!r}; "
                        f"{choices(one.random, found)}"
                    )
                methods += found[one.random].random(**not_none(one, "count", "seed"))
        return Evaluation(
            methods=methods,
            questions=questions_of(self.questions),
            sampling_params=sampling_of(self),
            **not_none(self, "samples", "chat", "seed"),
        )

    def all_measures(self) -> list[str | Measure]:
        """Return the names or objects of all measures, with one for each of the regular expressions.

        Raises:
            UnknownName, InvalidFile, InvalidSpec: a measure does not exist, or does not fit.
        """
        from steercap.lab.measures.texts import Matches

        named = [measure_of(measure) for measure in self.measures]
        return [*named, *(Matches(name, pattern) for name, pattern in self.expressions.items())]

    def check_by(self, labels: Sequence[str]) -> None:
        """Check that `by` is one of `labels`, those of all measures and tasks, or is left out.

        Raises:
            InvalidSpec: it is another.
        """
        if self.by and self.by not in labels:
            raise InvalidSpec(f"by={self.by!r} is no measure or task of this evaluation; {choices(self.by, labels)}")


#: Keys of a file of rollouts whose values are paths.
PATHS: Final = ("trained", "averaged", "questions", "positive", "negative")


class RolloutFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rollouts in a YAML file; see `steercap.lab.studies.rollouts`. Flags override it.

    In paths, relative to the folder of the YAML file, and in the rubric, `{name}` is the name of the data set.

    Args:
        data_sets: names of the data sets.
        trained: trained vector: a folder with `steering_vector.pt`, or a file of vectors.
        averaged: difference of means: a file of vectors or of levels, such as `vectors/{name}.pt`; "" for none.
        level: level of the averaged vector in a `.pt` file.
        questions: a file with a question per line, or a list.
        positive, negative: files with a text per line, for the classifier.
        rubric: prompt of the judge, with {question} and {answer}.
        judge: arguments of `steercap.lab.measures.scores.judge.Judge`; no judge if left out.
        scales, layers: as for `rollout_methods`; `layers` are those of the trained vector if left out.
        tokens: tokens to steer, as for the option `--tokens`.
        chat, samples, seed, max_tokens, temperature, concurrency: as for an evaluation, the last of each data set.
    """

    data_sets: tuple[str, ...]
    trained: str
    questions: str | tuple[str | tuple[str, ...], ...]
    positive: str
    negative: str
    averaged: str = ""
    level: str = "pos_neg_50"
    rubric: str = ""
    judge: dict[str, Any] = {}
    scales: tuple[float, ...] | None = None
    layers: tuple[int, ...] | None = None
    tokens: str | None = None
    chat: bool | None = None
    samples: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    concurrency: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def make_judge(self) -> Judge | None:
        """Return the judge; None if `judge` has no arguments.

        Raises:
            InvalidSetting: an argument is unknown, missing or not valid.
        """
        from steercap.lab.measures.scores import make_scorer

        return cast("Judge", make_scorer("judge", self.judge)) if self.judge else None

    def sets(self) -> Iterator[RolloutSet]:
        """Yield the data sets in order; the files of each are read when it is taken.

        Raises:
            InvalidFile, InvalidSpec: a file cannot be read, or does not fit.
        """
        from steercap.lab.studies.evaluation import Evaluation
        from steercap.lab.studies.rollouts import RolloutSet, rollout_methods

        for name in self.data_sets:
            told = {key: value.replace("{name}", name) for key in PATHS if isinstance(value := getattr(self, key), str)}
            trained = vectors_at(Path(told["trained"]), self.level)
            averaged = vectors_at(Path(told["averaged"]), self.level) if self.averaged else None
            where = not_none(self, "scales", "layers")
            if self.tokens is not None:
                where["tokens"] = tokens_of(self.tokens)
            methods = rollout_methods(trained, averaged, **where)
            evaluation = Evaluation(
                methods=methods,
                questions=questions_of(told.get("questions") or self.questions),
                sampling_params=sampling_of(self),
                **not_none(self, "samples", "chat", "seed"),
            )
            kinds = {kind: questions_of(told[kind]) for kind in ("positive", "negative")}
            yield RolloutSet(name=name, evaluation=evaluation, rubric=self.rubric.replace("{name}", name), **kinds)


def vectors_at(path: Path, level: str) -> LayerVectors:
    """Read one direction from a folder with `steering_vector.pt`, a `.pt` file's level, or a file of vectors.

    Raises:
        InvalidFile, InvalidSpec: it cannot be read, has no such level, or several directions.
    """
    from steercap.steering.formats import load_levels, load_steering_vector

    if path.is_dir():
        return load_steering_vector(path)[0]
    if path.suffix != ".pt":
        return only(directions_in(load(path), path), None)
    levels = load_levels(path)
    if level not in levels:
        raise InvalidSpec(f"{path} has no level {level!r} that is not zero; {choices(level, levels)}")
    return levels[level]


def read_evaluation(path: Path, flags: Mapping[str, Any]) -> EvaluationFile:
    """Read an evaluation from a YAML file and from flags (option to value), which override it unless None.

    Raises:
        InvalidFile: the file is not YAML, or a key is unknown, missing or of the wrong type.
    """
    found = yaml_keys(path, "methods: and questions:", paths=("questions",))
    if isinstance(found.get("methods"), dict):
        found["methods"] = {name: _located(path.parent, one) for name, one in found["methods"].items()}
    hint = f"; of a method: {', '.join(MethodFile.__struct_fields__)}"
    return settings_of(EvaluationFile, found, flags, path, hint)


def read_rollouts(path: Path, flags: Mapping[str, Any]) -> RolloutFile:
    """Read rollouts from a YAML file and from flags (option to value), which override it unless None.

    Raises:
        InvalidFile: the file is not YAML, or a key is unknown, missing or of the wrong type.
    """
    found = yaml_keys(path, "data_sets:, trained: and others", paths=PATHS)
    return settings_of(RolloutFile, found, flags, path)


def _located(folder: Path, method: Any) -> Any:
    """Return a method's keys, with the path of its file joined to `folder`; {}, no steering, for None."""
    if isinstance(method, dict) and isinstance(method.get("file"), str):
        return {**method, "file": str(folder / method["file"])}
    return {} if method is None else method
