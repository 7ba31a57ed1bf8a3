"""Training of edits from examples, in one call and in a folder from which an interrupted call resumes."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch

from steercap.core.extras import extra
from steercap.core.prompts import repeating, warn_of_doubled
from steercap.core.protocols import ProgressCallback
from steercap.core.values import count_of, shown
from steercap.errors import InvalidFile, InvalidPrompt, InvalidSelection, InvalidSetting, InvalidSpec, TrainingDiverged
from steercap.files.fingerprint import model_name, weights_identity
from steercap.lab.training.batches import EncodedExamples, Picked, generator, loader
from steercap.lab.training.datasets import TextLoss
from steercap.lab.training.examples import (
    Example,
    ExampleTokens,
    Preference,
    Prompted,
    conversation,
    digest_of,
    split,
)
from steercap.lab.training.folder import (
    DIRECTIONS,
    FOLDER,
    STATE,
    Trained,
    TrainingDefinition,
    check_name,
    write_trained,
)
from steercap.lab.training.hooked import HookedModel
from steercap.lab.training.loop import Loop, TraitInTraining, rank, world
from steercap.lab.training.objectives import Likelihood, Objective, objective_of
from steercap.lab.training.settings import Penalties, TrainingSettings, described, settings_of
from steercap.lab.training.steered import SteeredTraits
from steercap.lab.training.trainable import Start, TrainableSpec
from steercap.steering.edits import Edit
from steercap.steering.edits.add import Add
from steercap.steering.edits.inputs import by_name
from steercap.steering.layers import LayerVectors
from steercap.steering.spec import Steering, SteeringSpec, spec_of

#: Training example; the objective determines which of the types.
AnyExample: TypeAlias = "Example | Preference | Prompted"
#: Initial edit of training: an edit, a spec of several, or a recipe for one per layer.
AnyEdit: TypeAlias = "Edit | SteeringSpec | LayerVectors | Start"


def train(
    model: str | Path | HookedModel,
    examples: Sequence[AnyExample],
    *,
    edit: AnyEdit,
    out: str | Path,
    objective: str | Objective = "likelihood",
    name: str | None = None,
    held_out: float | Sequence[AnyExample] = 0.2,
    progress: ProgressCallback | None = None,
    **settings: Any,
) -> Trained:
    """Train an edit by gradient on a frozen model. It needs no engine and no GPU.

    Args:
        model: a checkpoint, a name on the hub, or a `HookedModel`, which several calls can share.
        examples: `Example`s, `Preference`s or `Prompted`s, as required by the objective.
        edit: initial edit: an edit or a spec with its initial vectors, LayerVectors for an `Add` of each, or
            `TrainableAdd(layers=[14])`, `TrainableLowRank(layers=[14], rank=4)`.
        out: folder of the run. An interrupted run resumes, on a CPU to the same vector bit for bit; a finished one is
            read.
        objective: a name in `steercap.lab.training.OBJECTIVES`, or a member with settings of its own, such as
            `BiPO(beta=0.2)`.
        name: name of the edit and its file; by default that of the folder.
        held_out: share of the sources to hold out, or held-out examples.
        progress: function called with a `Progress` whenever the work advances.
        **settings: fields of `TrainingSettings`: steps, batch_size, optimizer, norm_penalty, seed, ...

    Under `torchrun` or `accelerate launch`, with `torch.distributed` initialised, processes share the examples of each
    step.

    Returns:
        The edit at the lowest held-out loss: `trained.spec`, in the file `trained.file`.

    Raises:
        InvalidSetting, InvalidSpec, InvalidPrompt: an argument is not valid; raised before any step.
        RunDiffers: the folder holds another training; the message names the difference.
        TrainingDiverged: losses are not finite.
        UnsupportedModel: the model's layers are not found.
    """
    known = Path(out).name if name is None else name
    held = held_out if isinstance(held_out, (int, float)) else {known: held_out}
    found = train_many(
        model,
        {known: examples},
        edit=edit,
        out=out,
        objective=objective,
        held_out=held,
        progress=progress,
        **settings,
    )
    return found[known]


def train_many(
    model: str | Path | HookedModel,
    examples: Mapping[str, Sequence[AnyExample]],
    *,
    edit: AnyEdit | Mapping[str, AnyEdit],
    out: str | Path,
    objective: str | Objective = "likelihood",
    held_out: float | Mapping[str, Sequence[AnyExample]] = 0.2,
    progress: ProgressCallback | None = None,
    **settings: Any,
) -> dict[str, Trained]:
    """Train several edits in the same passes of the model, each on its own examples, as `train` would separately.

    Args:
        model: model, as for `train`.
        examples: examples of each trait, by the trait's name.
        edit: initial edit for all traits, or by name; all must be the same edits at the same points and tokens.
        out, objective, progress: arguments as for `train`.
        held_out: share of each trait's sources to hold out, or held-out examples by name.
        **settings: fields of `TrainingSettings`.

    Returns:
        Result of each trait by name, equal to that of `train` up to rounding.

    Raises:
        The errors of `train`.
    """
    wanted = settings_of(settings)
    if not isinstance(examples, Mapping) or not examples:
        raise InvalidSetting(f"examples={shown(examples)}; give examples by the name of the trait")
    for name in examples:
        check_name(name)
        if name.endswith(DIRECTIONS) and name.removesuffix(DIRECTIONS) in examples:
            raise InvalidFile(f"{name!r} is the file of the directions of another trait; give it another name")
    edits, held = (by_name(given, examples, what) for given, what in ((edit, "edit"), (held_out, "held_out")))
    if wanted.batch_size < world():
        raise InvalidSetting(f"batch_size={wanted.batch_size} for {world()} processes; each needs one example at least")
    how = objective_of(objective)
    hooked = hooked_of(model, wanted)
    tokenizer = tokenizer_of(hooked)
    parts = {}
    for name, given in examples.items():
        encode = partial(encoded, how, tokenizer, vocabulary=hooked.vocabulary)
        parts[name] = _sides(given, held[name], encode, wanted.seed)
    wanted = wanted.resolved({name: len(sides.seen) for name, sides in parts.items()})
    starts = {name: start_of(one, hooked, wanted, name) for name, one in edits.items()}
    _check_form(starts)
    if not (Path(out) / STATE).exists():  # a run that was begun before this check may never draw such an example
        _check_tokens(starts, parts)
    if how.needs_direction:
        _check_directions(starts)
    definition = definition_of(hooked, how, wanted, starts, parts)
    folder = _opened(Path(out), definition)
    traits = [
        TraitInTraining(name, _trainable(starts[name], hooked, wanted), parts[name].seen, parts[name].unseen, wanted)
        for name in examples
    ]
    specs = [trait.spec for trait in traits]
    module = SteeredTraits(hooked, specs, how, wanted.penalties, wanted.gate_width, checkpointing=wanted.checkpointing)
    Loop(traits, module, wanted, folder, model_name(hooked.path), hooked.device, progress).run()
    return {trait.name: _result(trait, folder, definition, model_name(hooked.path)) for trait in traits}


def losses_of(
    model: str | Path | HookedModel,
    examples: Sequence[AnyExample],
    steering: Steering,
    *,
    objective: str | Objective = "likelihood",
    batch_size: int = 8,
) -> torch.Tensor:
    """Compute the loss of each example under an edit, trained or not, to compare edits.

    Where the objective draws a factor or a sign, the loss is the mean over all.

    Args:
        model, examples, objective: arguments as for `train`.
        steering: what to evaluate, as for `SteerModel.generate`, without a LogitBias.
        batch_size: number of examples in a pass.

    Returns:
        Loss of each example, in order, on the CPU: float [examples].

    Raises:
        The errors of `train`.
    """
    how = objective_of(objective)
    count_of(batch_size, "batch_size", wrong=InvalidSetting)
    hooked = hooked_of(model, TrainingSettings())
    tokens = encoded(how, tokenizer_of(hooked), examples, hooked.vocabulary)
    spec = _trainable(spec_of(steering), hooked, TrainingSettings())
    module = SteeredTraits(hooked, [spec], how, Penalties(), 1.0)
    places = [Picked(0, place, None) for place in range(len(tokens))]
    chunks = [places[at : at + batch_size] for at in range(0, len(places), batch_size)]
    batches = loader(EncodedExamples([tokens]), chunks, module.selections, hooked.device)
    return torch.cat([module.losses(batch).cpu() for batch in batches])


def perplexity_of(
    model: str | Path | HookedModel,
    examples: Sequence[Example | Prompted],
    steering: Steering | None = None,
    *,
    prompted: bool = False,
    batch_size: int = 8,
) -> TextLoss:
    """Compute the perplexity of responses under a model, steered or not, with their system prompts or without.

    Args:
        model: model, as for `train`.
        examples: responses with their prompts.
        steering: as for `losses_of`; None for none.
        prompted: True to include the system prompt of each `Prompted`; False to leave it out.
        batch_size: number of examples in a pass.

    Raises:
        InvalidSetting: with `prompted`, an example has no system prompt.
        TrainingDiverged: losses are not finite.
        The errors of `losses_of`.
    """
    hooked = hooked_of(model, TrainingSettings())
    if prompted and (lacking := [example for example in examples if not isinstance(example, Prompted)]):
        raise InvalidSetting(f"prompted=True, and {shown(lacking[0])} has no system prompt; give Prompted")
    read = [
        Example(conversation(example.prompt, example.system), example.response)
        if prompted and isinstance(example, Prompted)
        else example
        for example in examples
    ]
    how = steering or Add(torch.zeros(hooked.width), layer=min(hooked.layers))
    losses = losses_of(hooked, read, how, batch_size=batch_size).double()
    tokens = [one for (one,) in encoded(Likelihood(), tokenizer_of(hooked), read, hooked.vocabulary)]
    counts = torch.tensor([len(one.ids) - one.prompt_len for one in tokens], dtype=torch.float64)
    perplexity = float((losses * counts).sum().div(counts.sum()).exp())
    if not math.isfinite(perplexity):
        raise TrainingDiverged(f"losses are not finite under {shown(steering)}; use a smaller vector or a wider dtype")
    return TextLoss(float(losses.mean()), perplexity, int(counts.sum()))


def hooked_of(model: str | Path | HookedModel, settings: TrainingSettings) -> HookedModel:
    """Return the model; a checkpoint is loaded with the dtype and device of the settings."""
    if isinstance(model, HookedModel):
        return model
    if settings.device_map is not None:
        return HookedModel(model, settings.dtype, device_map=settings.device_map)
    device = settings.device or (f"cuda:{rank() % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu")
    return HookedModel(model, settings.dtype, device=device)


def tokenizer_of(model: HookedModel) -> Any:
    """Load the tokenizer of a model, from the same checkpoint, by transformers."""
    with extra("cuda", "cpu"):
        from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model.path)


@dataclass(frozen=True)
class Sides:
    """Tokenised examples of a trait: `seen` for training, `unseen` held out."""

    seen: list[tuple[ExampleTokens, ...]]
    unseen: list[tuple[ExampleTokens, ...]]


def _sides(
    examples: Sequence[AnyExample], held_out: Any, encode: Callable[[Any], list[tuple[ExampleTokens, ...]]], seed: int
) -> Sides:
    """Tokenize a trait's examples; hold out a share of their sources, or the examples given as `held_out`."""
    tokens = encode(examples)
    if not isinstance(held_out, (int, float)):
        return Sides(tokens, encode(held_out))
    seen, unseen = split([example.source for example in examples], held_out, seed)
    return Sides([tokens[place] for place in seen], [tokens[place] for place in unseen])


def encoded(
    objective: Objective, tokenizer: Any, examples: Sequence[AnyExample], vocabulary: int
) -> list[tuple[ExampleTokens, ...]]:
    """Tokenize examples for an objective, in order; token ids must be below `vocabulary`.

    Raises:
        InvalidSetting: there are no examples, or the objective does not accept one's type.
        InvalidPrompt: an example is not valid, has no token to learn, or token ids that the model does not have.
    """
    if wrong := [example for example in examples if not isinstance(example, objective.example)]:
        raise InvalidSetting(
            f"{type(objective).__name__} learns from {' or '.join(f'{kind.__name__}s' for kind in objective.example)}, "
            f"and one example is {shown(wrong[0])}"
        )
    if not examples:
        raise InvalidSetting("no examples; give one at least")
    found = [objective.tokens(tokenizer, example) for example in examples]
    for example, sequences in zip(examples, found, strict=True):
        if (most := max(max(one.ids) for one in sequences)) >= vocabulary:
            raise InvalidPrompt(f"token id {most} in {shown(example)}; the model's ids are 0 to {vocabulary - 1}")
    read = ((one.prompt, tokens[0].ids) for one, tokens in zip(examples, found, strict=True))
    if suspects := repeating(read):
        warn_of_doubled(suspects, tokenizer.encode(""))
    return found


def start_of(edit: AnyEdit, model: HookedModel, settings: TrainingSettings, name: str) -> SteeringSpec:
    """Return the initial edits of the trait `name` as a spec, drawing them with the seed if `edit` is a `Start`."""
    if isinstance(edit, Start):
        return edit.spec(model.width, len(model.layers), generator(settings.seed, name, "start"))
    return spec_of(edit, "edit")


def _trainable(spec: SteeringSpec, model: HookedModel, settings: TrainingSettings) -> TrainableSpec:
    dtype = torch.promote_types(model.dtype, torch.float32)
    return TrainableSpec(spec, settings.fields, dtype).to(model.device)


def _check_form(starts: Mapping[str, SteeringSpec]) -> None:
    """Check that all traits start from the same edits, vectors apart, at the same points and tokens.

    Raises:
        InvalidSpec: a trait differs.
    """
    forms = {
        name: [
            (type(edit), edit.layer, str(edit.layers), edit.site, edit.selection, edit.part, keeper, _forms(edit))
            for edit, keeper in spec.segments()
            if isinstance(edit, Edit)
        ]
        for name, spec in starts.items()
    }
    first, *others = forms
    if odd := [name for name in others if forms[name] != forms[first]]:
        raise InvalidSpec(f"{odd[0]} has other edits than {first}: {starts[odd[0]].flat()}; train them in two calls")


def _forms(edit: Edit) -> list[tuple[bool, ...]]:
    """Return, for each rank-one edit, what no number of it says: see `steercap.lab.training.formula.Part`."""
    return [(one.joined, one.read is None, one.response.relative) for one in edit.lower()]


def _check_tokens(starts: Mapping[str, SteeringSpec], parts: Mapping[str, Sides]) -> None:
    """Check that each edit selects tokens of every example.

    Raises:
        EmptySelection, InvalidSelection: it does not.
    """
    for name, spec in starts.items():
        selections = dict.fromkeys(edit.selection for edit in spec.of_rows())
        sequences = chain.from_iterable(parts[name].seen + parts[name].unseen)
        for one, selection in product(sequences, selections):
            try:
                selection.ranges(one.prompt_len, one.inputs)
            except InvalidSelection as error:
                size = f"{one.prompt_len} prompt and {len(one.ids) - one.prompt_len} response tokens"
                raise type(error)(f"{name}, an example of {size}: {error}; leave it out, or select others") from error


def _check_directions(starts: Mapping[str, SteeringSpec]) -> None:
    """Check that no initial edit of a trait has a write vector of zeros.

    Raises:
        InvalidSetting: an edit begins at zero.
    """
    for name, spec in starts.items():
        for edit in spec.of_rows():
            if not all(one.write.any() for one in edit.lower()):
                raise InvalidSetting(
                    f"{name}: {edit} adds nothing to rows, and this objective needs a direction to subtract; begin "
                    "with TrainableAdd(norm=0.1), or with a vector that is not zero"
                )


def identity_of(model: HookedModel) -> dict[str, str]:
    """Return a model's "name", "weights" (hash of the files, or the hub's commit), "tensors" and "dtype"."""
    files = weights_identity(model.path, model.config)
    return {"name": model_name(model.path), **files, "dtype": described(model.dtype)}


def definition_of(
    model: HookedModel,
    objective: Objective,
    settings: TrainingSettings,
    starts: Mapping[str, SteeringSpec],
    sides: Mapping[str, Sides],
) -> TrainingDefinition:
    """Return everything that determines the result of a training run, for its folder."""
    return TrainingDefinition(
        model=identity_of(model),
        objective=repr(objective),
        settings=settings.described(),
        edits={name: _digest(spec) for name, spec in starts.items()},
        examples={name: digest_of(one.seen) for name, one in sides.items()},
        held_out={name: digest_of(one.unseen) for name, one in sides.items()},
        world=world(),
    )


def _digest(spec: SteeringSpec) -> str:
    """Return the SHA-256 of the edits and vectors of a spec, in hexadecimal."""
    found = hashlib.sha256(repr((spec.flat(), spec.preserve_norm)).encode())
    if spec.keeps_norm and not spec.preserve_norm:
        found.update(repr([keeper for _, keeper in spec.segments()]).encode())
    for edit in spec.of_rows():
        vector = getattr(edit, "vector", None)
        if vector is not None and not torch.equal(vector[None], edit.lower()[0].write):
            found.update(vector.numpy().tobytes())  # it is lowered to its direction; a step depends on its norm too
        for one in edit.lower():
            for vector in (one.write, one.read):
                found.update(b"" if vector is None else vector.contiguous().numpy().tobytes())
            said = ", ".join(f"{name}={value!r}" for name, value in msgspec.structs.asdict(one.response).items())
            found.update(f"Response({said})".encode())  # what it is called in folders, whatever its class is called
    return found.hexdigest()


def _opened(out: Path, definition: TrainingDefinition) -> Path:
    """Open the folder of a run and return it; process 0 writes the definition or compares it with that there."""
    if rank() == 0 and FOLDER.open(out, definition) is None:
        FOLDER.write(out, definition)
    if world() > 1:
        torch.distributed.barrier()
    return out


def _result(trait: TraitInTraining, folder: Path, definition: TrainingDefinition, model: str) -> Trained:
    """Return the result of a trait, and warn if no step lowered its held-out loss; process 0 writes the files."""
    spec = trait.spec.spec(trait.best)
    best = min(one.validation_loss for one in trait.history)
    provenance = {
        "method": "training",
        "objective": definition.objective,
        "model": definition.model,
        "dtype": definition.model["dtype"],
        "settings": definition.settings,
        "seed": trait.settings.seed,
        "examples": len(trait.examples),
        "held_out": len(trait.held_out),
        "examples_sha256": definition.examples[trait.name],
        "held_out_sha256": definition.held_out[trait.name],
        "steps": trait.history[-1].step,
        "best_step": trait.best_step,
        "validation_loss_before": trait.history[0].validation_loss,
        "validation_loss": best,
    }
    if not trait.best_step:
        warnings.warn(
            f"{trait.name}: no step lowered the validation loss, {best:.4g}, so the edit is the one that training "
            "began with; give more examples, or another learning rate",
            stacklevel=2,
        )
    file = folder / f"{trait.name}.safetensors"
    found = Trained(trait.name, spec, tuple(trait.history), trait.best_step, file, model, provenance)
    if rank() == 0:
        write_trained(found)
    return found
