"""Settings of a run from traits to vectors, and the digests of each stage's inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from steercap.architectures.sites import SITES
from steercap.core.spec import CaptureSpec
from steercap.core.values import choices, flag_of, index_of, number_of, parts_of, shown
from steercap.errors import InvalidSetting, InvalidSpec
from steercap.lab.directions import METHODS
from steercap.lab.measures.scores import Trait, make_scorer, shipped_traits

#: Names of the settings that each stage depends on, besides earlier stages; "filter" selects rows, not changing them.
DEPENDS: Final[Mapping[str, tuple[str, ...]]] = {
    "generate": (
        "traits.name",
        "traits.positive",
        "traits.negative",
        "traits.questions",
        "seed",
        "n_samples",
        "n_questions",
        "n_prompts",
        "max_tokens",
        "temperature",
        "top_p",
    ),
    "score": ("traits.description", "traits.examples", "traits.keywords", "traits.rubric", "scorer", "scorer_args"),
    "filter": ("threshold_high", "threshold_low", "paired", "min_kept"),
    "capture": ("layers", "site", "read_system"),
    "vectors": ("method", "held_out"),
}
_AFTER: Final[Mapping[str, tuple[str, ...]]] = {
    "generate": (),
    "score": ("generate",),
    "filter": ("score",),
    "capture": ("generate",),
    "vectors": ("filter", "capture"),
}
STORED: Final = {"samples": "n_samples", "concurrency": "max_in_flight"}  # fields that have another name in files
#: Stages whose results are of all traits together; results of the other stages are of one trait each.
JOINT: Final = ("filter", "vectors")
#: The stages, in their order.
STAGES: Final = tuple(DEPENDS)


class PersonaSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename=STORED):
    """Settings of a run over traits, see `run_persona`.

    The defaults are the sizes and thresholds of Chen et al., Persona Vectors. In the paper a large model judges,
    answers are longer and kept in pairs (`paired`), and only if judged coherent, which no scorer here does.

    Args:
        traits: names of shipped traits, or `Trait`s; one at least.
        seed: seed of all draws.
        samples: number of answers to each question under each system prompt; 1 at temperature 0.
        n_questions, n_prompts: number of a trait's questions and pairs of system prompts to use, from the first; None
            takes all.
        max_tokens: maximum tokens of an answer.
        temperature, top_p: sampling parameters.
        concurrency: maximum concurrent requests.
        scorer: name in `steercap.lab.measures.scores.SCORERS` of the scorer of answers.
        scorer_args: arguments of the scorer; no API keys, since they are written to the run folder.
        threshold_high, threshold_low: minimum score of kept answers under a positive prompt, and maximum under a
            negative one.
        paired: keep an answer only with its counterpart, which has the same question, sample and prompt index.
        min_kept: minimum number of kept answers of each kind; a trait with fewer is left out.
        layers, site: layers and site of the captured rows; layers are "all", an index or several.
        read_system: True to put the system prompt before an answer when it is read to capture rows, as in the paper.
            The rows may then show the prompt rather than the answer; False reads each answer after its question alone.
        method: name in `steercap.lab.directions.METHODS` of the method that computes directions from rows.
        held_out: share of the questions, between 0 and 1, whose answers test the vector instead of making it.

    Raises:
        InvalidSetting, UnknownName: a value is not valid, or fewer answers are requested of a trait than `min_kept`.
    """

    traits: tuple[str | Trait, ...]
    seed: int = 0
    samples: int = 10
    n_questions: int | None = None
    n_prompts: int | None = None
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    concurrency: int = 256
    scorer: str = "minilm"
    scorer_args: dict[str, Any] = {}
    threshold_high: float = 50.0
    threshold_low: float = 50.0
    paired: bool = False
    min_kept: int = 10
    layers: int | tuple[int, ...] | Literal["all"] = "all"
    site: str = "resid_post"
    read_system: bool = True
    method: str = "difference"
    held_out: float = 0.25

    def __post_init__(self) -> None:
        least = {"samples": 1, "n_questions": 2, "n_prompts": 1, "max_tokens": 1, "concurrency": 1, "min_kept": 2}
        numbers = ("temperature", "top_p", "threshold_high", "threshold_low", "held_out")
        check_fields(self, least, numbers, ("paired", "read_system"), ("scorer", "site", "method"))
        several = isinstance(self.traits, (list, tuple))
        wrong = [trait for trait in self.traits if not isinstance(trait, (str, Trait))] if several else [self.traits]
        if wrong:
            raise InvalidSetting(f"traits hold {shown(wrong[0])}; give names of traits, or Traits, in a tuple")
        if not 0 < self.held_out < 1:
            raise InvalidSetting(f"held_out={self.held_out}; give a share of the questions, between 0 and 1")
        _ = METHODS[self.method], make_scorer(self.scorer, self.scorer_args)
        names = [trait.name for trait in self.resolved()]
        if not names or len(set(names)) < len(names):
            raise InvalidSetting(f"traits={names}; give at least one, and each once")
        for trait in self.resolved():
            self._check_size(trait)

    def _check_size(self, trait: Trait) -> None:
        """Check that a trait has two questions, and `min_kept` requested answers of each sign; else InvalidSetting."""
        questions = len(trait.questions[: self.n_questions])
        if questions < 2:
            raise InvalidSetting(
                f"{trait.name} has {questions} question; give it at least two, since held_out={self.held_out} holds "
                "out whole questions"
            )
        prompts = min(len(trait.positive[: self.n_prompts]), len(trait.negative[: self.n_prompts]))
        if (asked := questions * prompts * self.samples) < self.min_kept:
            raise InvalidSetting(
                f"min_kept={self.min_kept}, but {trait.name} is asked for {asked} answers of a kind: {questions} "
                f"questions, {prompts} system prompts, {self.samples} samples; ask more or lower min_kept"
            )

    @classmethod
    def small(cls, *traits: str | Trait, **changes: Any) -> PersonaSettings:
        """Return settings for a small model on a CPU: a run of minutes, not hours.

        They are one answer to each of twelve questions under each prompt, forty tokens long; at temperature 0.7, since
        at 1 a model of some hundred million parameters rambles.

        Args:
            traits: names of shipped traits, or `Trait`s.
            changes: settings by name, in place of these or the defaults.
        """
        sizes = {"samples": 1, "n_questions": 12, "max_tokens": 40, "temperature": 0.7, "concurrency": 64}
        return cls(traits=traits, **{**sizes, **changes})

    def resolved(self) -> tuple[Trait, ...]:
        """Return the traits in order, with names replaced by the shipped traits.

        Raises:
            InvalidSetting: no shipped trait has a given name.
        """
        shipped = shipped_traits()
        if missing := [trait for trait in self.traits if isinstance(trait, str) and trait not in shipped]:
            raise InvalidSetting(f"unknown traits {missing}; {choices(missing[0], shipped)}; others are given as Trait")
        return tuple(shipped[trait] if isinstance(trait, str) else trait for trait in self.traits)


def check_fields(
    settings: Any,
    least: Mapping[str, int],
    numbers: Sequence[str],
    flags: Sequence[str],
    names: Sequence[str],
) -> None:
    """Check the fields that settings of traits and of roles share, and normalise `layers` in place.

    Args:
        settings: settings to check.
        least: minimum of each integer field, by name.
        numbers, flags, names: names of the fields that are a number, a boolean, and text.

    Raises:
        InvalidSetting, UnknownName: a value is not valid.
    """
    for name, bound in least.items():
        value = getattr(settings, name)
        if (index_of(value) or 0) < bound and not (value is None and name in {"n_questions", "n_prompts"}):
            raise InvalidSetting(f"{name}={shown(value)}; give {bound} or more, a whole number")
    readers: dict[str, tuple[Callable[[Any], Any], str]] = {
        "seed": (index_of, "a whole number"),
        **dict.fromkeys(numbers, (number_of, "a number")),
        **dict.fromkeys(flags, (flag_of, "True or False")),
        **dict.fromkeys(names, (lambda value: value if isinstance(value, str) else None, "a name")),
        "scorer_args": (lambda value: value if isinstance(value, Mapping) else None, "a dict"),
    }
    for name, (read, what) in readers.items():
        value = getattr(settings, name)
        found = read(value)
        if found is None or found != found:  # noqa: PLR0124 -- NaN
            raise InvalidSetting(f"{name}={shown(value)}; give {what}")
    if "api_key" in settings.scorer_args:
        raise InvalidSetting(
            "scorer_args hold an api_key, and would be written to the run folder; put it into an environment "
            "variable and give api_key_env"
        )
    _ = SITES[settings.site]
    msgspec.structs.force_setattr(settings, "layers", layers_of(settings.layers))
    try:
        CaptureSpec(layers=settings.layers, sites=settings.site)
    except InvalidSpec as error:
        raise InvalidSetting(f"layers={settings.layers!r}: {error}") from error


def check_samples(settings: Any) -> None:
    """Raise InvalidSetting if several answers to one question are asked for at temperature 0, which would be equal."""
    if settings.temperature == 0 and settings.samples > 1:
        raise InvalidSetting(
            f"samples={settings.samples} at temperature 0 would all be the same text, counted as several answers; "
            "give samples=1, or raise the temperature"
        )


def described(settings: PersonaSettings) -> dict[str, Any]:
    """Return the settings as JSON-compatible values, with traits as a mapping by name, all their fields included."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings))
    traits = {trait.name: trait for trait in settings.resolved()}
    return {**plain, "traits": msgspec.json.decode(msgspec.json.encode(traits))}


def resumed(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a call, in the form for the digests of a folder.

    Those that equal the stored ones are in their form (1.0, though 1 was given), as are the arguments of a scorer that
    would give the same scores.

    Args:
        stored, wanted: settings of the folder and of the call, as `described` gives them.
    """
    same = {name: value for name, value in stored.items() if name in wanted and value == wanted[name]}
    if (key := _scorer_key(wanted)) is not None and key == _scorer_key(stored):
        same["scorer_args"] = stored.get("scorer_args", {})
    return {**wanted, **same}


def _scorer_key(plain: Mapping[str, Any]) -> str | None:
    """Return a text that is equal for scorers of equal scores; None for no scorer, or one of another version."""
    try:
        return make_scorer(plain["scorer"], plain["scorer_args"]).key if plain["scorer"] else None
    except (KeyError, InvalidSetting):
        return None


def stage_hashes(plain: Mapping[str, Any], model: Mapping[str, str]) -> dict[str, str]:
    """Return the SHA-256 of each stage's inputs over all traits, by stage; arguments as for `trait_hashes`."""
    return {stage: digest_of(list(found.items())) for stage, found in trait_hashes(plain, model).items()}


def trait_hashes(plain: Mapping[str, Any], model: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the SHA-256, in hexadecimal, of each stage's inputs, earlier stages' included, by stage and trait.

    Args:
        plain: settings as `described` returns them.
        model: facts that identify the model.
    """
    found: dict[str, dict[str, str]] = {}
    for stage in DEPENDS:
        common, own = stage_settings(plain, stage)
        found[stage] = {
            name: digest_of([dict(model), [found[before][name] for before in _AFTER[stage]], common, trait])
            for name, trait in own.items()
        }
    return found


def stage_settings(plain: Mapping[str, Any], stage: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the settings that a stage itself depends on, earlier stages left out.

    Returns:
        Settings for all traits, by field; and settings of each trait, by trait and field.
    """
    fields = [name.removeprefix("traits.") for name in DEPENDS[stage] if name.startswith("traits.")]
    common = {name: plain[name] for name in DEPENDS[stage] if not name.startswith("traits.")}
    return common, {name: {field: trait[field] for field in fields} for name, trait in plain["traits"].items()}


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a JSON-compatible value, in hexadecimal; the order of keys does not matter."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()


def layers_of(layers: Any) -> str | int | tuple[int, ...]:
    """Return a layer selection as "all", an int, or a tuple of ints; raise InvalidSetting if it is none of these."""
    if isinstance(layers, str) and layers == "all":
        return layers
    if (index := index_of(layers)) is not None:
        return index
    indices = [index_of(layer) for layer in parts_of(layers, "layers", InvalidSetting) or []]
    found = tuple(index for index in indices if index is not None)
    if len(found) < len(indices):
        found = ()
    if not found:
        raise InvalidSetting(
            f"layers={shown(layers)}; give 'all', an index, or several in a list, tuple or range: for a slice, "
            "range(start, stop, step)"
        )
    return found
