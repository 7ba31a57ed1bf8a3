"""`steercap models`: the verified architectures with their accuracy; or how one model would be served."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from steercap.cli.command import command
from steercap.cli.parsing import refuse
from steercap.cli.tables import facts
from steercap.cli.terminal import Terminal
from steercap.core.extras import extra
from steercap.errors import ModelNotLoaded, UnsupportedModel

if TYPE_CHECKING:
    from steercap.architectures.families.base import Family
    from steercap.architectures.families.proved import ProvedModel
    from steercap.engine.checkpoint import Checkpoint

#: Tables of vLLM's registry with models that generate text.
GENERATING: Final = frozenset({"text_generation", "multimodal", "transformers_supported"})
#: Tables of vLLM's registry with pooling models.
POOLING: Final = frozenset(
    {"embedding", "late_interaction", "reward", "sequence_classification", "token_classification"}
)
#: State and reason of architectures in the other tables of vLLM's registry, by table.
OTHERS: Final[Mapping[str, tuple[str, str]]] = {
    "speculative_decoding": (
        "refused",
        ("a draft model; open the model for which it drafts, and name this one in speculative_config"),
    ),
    "oot_supported": ("unknown", "vLLM has it only in a plug-in; with that installed, the checks at start decide"),
    "transformers_backend": (
        "unknown",
        ("vLLM's name for any model that runs with transformers' modules; give the model's own architecture"),
    ),
    "previously_supported": ("refused", "the installed vLLM no longer has it"),
}
#: State and reason of architectures in no table of vLLM's registry.
UNREGISTERED: Final = (
    "unknown",
    "the installed vLLM does not register it; it can run only with transformers' modules",
)
#: Architectures whose layers run several times in a forward pass.
LOOPED: Final = frozenset({"HrmTextForCausalLM", "IQuestLoopCoderForCausalLM"})

#: Beginning of the reason in records of models that steercap does not refuse: their rows differ from transformers', or
#: vLLM cannot run them on the device of the record.
NOT_REFUSED: Final = "not proved, not refused"
#: Sites in a record of derived sites if it covers more than the residual stream.
_BLOCKS: Final = frozenset({"attn_out", "mlp_out"})
#: Explanation of the state "derived".
DERIVES: Final = "the start derives its sites and serves those that pass its checks, or refuses the model"


class Standing(msgspec.Struct, frozen=True):
    """Support of an architecture by steercap, as far as it is known without starting an engine.

    Args:
        architecture: name in `config.json`.
        state: "proved", "known", "derived", "refused" or "unknown".
        reason: explanation of the state.
        family: name of the family of layers that covers the architecture, "" for none.
        pools: True for a pooling model, which generates no text.
    """

    architecture: str
    state: str
    reason: str
    family: str = ""
    pools: bool = False


class ModelFacts(msgspec.Struct, frozen=True):
    """Description of one model, from its configuration.

    Args:
        model: name or folder, as given.
        standing: support of the model's architecture.
        layers, width: number of decoder layers, and elements of a row of the stream; 0 if unknown.
        sites: layers that have each site, by site; `resid_pre` and `resid_post` alone where a start derives the rest;
            none of a model that is refused or unknown.
        weights: bytes of the weights in 16 bits, or as they are quantised; None if unknown.
        memory: bytes of steercap's own buffers with default settings, by setting.
        command: command that serves the model, or captures with a pooling one; "" if it is refused.
    """

    model: str
    standing: Standing
    layers: int
    width: int
    sites: Mapping[str, str]
    weights: int | None
    memory: Mapping[str, int]
    command: str


def standing_of(architecture: str, known: tuple[str, ...] = ()) -> Standing:
    """Return the support of an architecture, from families, records of comparisons and vLLM's registry.

    Args:
        architecture: name in `config.json`.
        known: further names whose layers it may have, as of the language model in a wrapper.
    """
    from steercap.adapters.releases import registered
    from steercap.architectures.families import FAMILIES, family_of, generating
    from steercap.architectures.families.proved import records

    names = (architecture, *known)
    try:
        found = family_of((*names, *map(generating, names)))
        family = next(name for name, record in FAMILIES.items() if record is found)
    except UnsupportedModel:
        family = ""
    tables = registered()
    own, base = ({*tables.get(name, ())} for name in (architecture, generating(architecture)))
    if own == {"previously_supported"} and by_transformers(architecture):
        own = set()
    pools = not own & GENERATING and bool(own & POOLING or (not own and base & GENERATING))
    runs = pools or bool(own & GENERATING) or by_transformers(architecture)
    proved = [record for record in records() if record.architecture in (names if runs else (architecture,))]
    state, reason = _state(architecture, family, proved, {*own, *(base if pools else ())})
    said = f"it is a pooling model, served only by `encode`: {reason}" if pools and state != "refused" else reason
    return Standing(architecture, state, said, family, pools)


def by_transformers(architecture: str) -> bool:
    """Return whether vLLM can run an architecture by transformers' modules, by vLLM's own condition."""
    with extra("cuda", "cpu"):
        import transformers
    try:
        kind = getattr(transformers, architecture)
        return bool(kind.is_backend_compatible() or kind._can_set_attn_implementation())  # noqa: SLF001 -- as vLLM
    except (AttributeError, ImportError, RuntimeError):  # there is none, or its own requirements are not met
        return False


def _state(architecture: str, family: str, proved: Sequence[ProvedModel], tables: set[str]) -> tuple[str, str]:
    """Return the state of an architecture, and the reason, as in `Standing`.

    Args:
        architecture: name in `config.json`.
        family: name of the family that covers the architecture, "" for none.
        proved: records of the architecture's comparisons with transformers.
        tables: names of the tables of vLLM's registry that list the architecture.
    """
    compared = [record for record in proved if record.against_transformers and not record.refused]
    tried = ", ".join(sorted({f"{record.vllm} on {record.device}" for record in compared}))
    blocks = any({*record.sites} >= _BLOCKS for record in compared)
    if tried and (family or blocks):
        return "proved", f"compared with transformers, vLLM {tried}" + ("" if family else "; a start derives its sites")
    reasons = [record.refused for record in proved if record.refused and not record.refused.startswith(NOT_REFUSED)]
    if reasons and not tried:
        return "refused", reasons[0]
    other = None
    if architecture in LOOPED:
        other = "refused", "its layers run several times in a pass, and a tap must fire once"
    elif not tables & (GENERATING | POOLING):
        other = next((OTHERS[table] for table in sorted(tables) if table in OTHERS), None if tried else UNREGISTERED)
    if other is not None:
        return other
    if family:
        return "known", "not compared with transformers on this version; the checks at start decide"
    stream = f"its residual stream was compared with transformers, on vLLM {tried}" if tried else "no family knows it"
    return "derived", f"{stream}: {DERIVES}"


def facts_of(name: str) -> ModelFacts:
    """Describe a model from its config.json, with nothing downloaded or started.

    Raises:
        ModelNotLoaded: the model is not on this machine, or its config.json cannot be read or names no architecture.
    """
    from steercap.config import Settings
    from steercap.engine.checkpoint import look_up, require_there

    require_there(name)
    checkpoint = look_up(name)
    if not checkpoint.folder:
        raise ModelNotLoaded(
            f"{name!r} is not on this machine: neither a folder nor in the hub's cache; fetch its configuration where "
            f"there is a connection: hf download {name} config.json"
        )
    if not checkpoint.architectures:
        raise ModelNotLoaded(f"{checkpoint.folder}/config.json names no architectures; give the folder of a model")
    config, within = _config_of(checkpoint)
    standing = standing_of(checkpoint.architectures[0], within)
    settings = Settings()
    buffers = ("capture_bytes", "vector_bytes", "reduce_bytes")
    return ModelFacts(
        name,
        standing,
        checkpoint.layers,
        checkpoint.width,
        _sites(standing, config, checkpoint.layers),
        _weights(checkpoint, config),
        {one: int(getattr(settings, one)) for one in buffers},
        _command(name, standing),
    )


def _command(name: str, standing: Standing) -> str:
    """Return a command line that runs the model, "" if it is refused."""
    if standing.pools and standing.state != "refused":
        return f"steercap capture TEXT --model {name} --engine-arg runner=pooling --out FOLDER"
    return "" if standing.state == "refused" else f"steercap serve {name} --sites all"


def _config_of(checkpoint: Checkpoint) -> tuple[Any, tuple[str, ...]]:
    """Return transformers' configuration, or None, and the architectures of the language model in a wrapper."""
    from steercap.architectures.families import architectures_within

    with extra("cuda", "cpu"):
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # of a type that this transformers has not
        return None, ()
    text = config.get_text_config()
    within = () if text is config else architectures_within(text, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return config, within


def _sites(standing: Standing, config: Any, layers: int) -> dict[str, str]:
    """Return the layers that have each site, as text by site, as far as the configuration tells."""
    from steercap.architectures.families import FAMILIES
    from steercap.architectures.families.derived import SITES as NEEDED_SITES
    from steercap.architectures.sites import SITES

    if standing.state in {"refused", "unknown"}:
        return {}
    every = _spans(range(layers)) if layers else "all"
    if not standing.family or config is None or not layers:
        return dict.fromkeys(NEEDED_SITES, every)
    family: Family = FAMILIES[standing.family]
    text, found = config.get_text_config(), {}
    for name, site in SITES.items():
        placed = [site.of_model % layers] if site.of_model is not None else range(layers)
        if there := [layer for layer in placed if site.exists(family, text, layer)]:
            found[name] = _spans(there) + (" where a layer has it" if family.varied and len(there) > 1 else "")
    return found


def _spans(layers: Iterable[int]) -> str:
    """Return ascending layers as text, such as "0-3, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _weights(checkpoint: Checkpoint, config: Any) -> int | None:
    """Return the bytes of a model's weights, from its files or else its configuration; None if unknown."""
    from steercap.engine.memory import DTYPE_BYTES, weights_in

    if checkpoint.bytes:
        try:
            return min(weights_in(checkpoint, one) for one in ("auto", "bfloat16"))
        except (OSError, ValueError):
            return None
    if config is None or checkpoint.quantization:
        return None
    with extra("cuda", "cpu"):
        import torch
        from transformers import AutoModelForCausalLM
    try:
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError):
        return None
    return sum(int(one.numel()) for one in made.parameters()) * DTYPE_BYTES["bfloat16"]


def _is_model(part: str) -> bool:
    """Return whether an argument is a model's folder or hub name, rather than part of an architecture's name."""
    return "/" in part or part.startswith(".") or (bool(part) and Path(part, "config.json").is_file())


def _answered(model: ModelFacts) -> Table:
    size = None if model.weights is None else f"{model.weights / 1e9:.3g} GB in 16 bits, or as quantised"
    return facts(
        model.model,
        {
            "architecture": model.standing.architecture,
            "support": f"{model.standing.state}: {model.standing.reason}",
            "family": model.standing.family,
            "layers": f"{model.layers} × {model.width}" if model.layers else "",
            "weights": size or "unknown",
            "buffers": ", ".join(f"{name} {size / (1 << 30):g} GiB" for name, size in model.memory.items()),
            **{site: f"layer{'s' * (not layers.isdigit())} {layers}" for site, layers in model.sites.items()},
            ("capture" if model.standing.pools else "serve"): model.command,
        },
    )


def register(app: typer.Typer) -> None:
    """Add the command `models` to `app`."""

    @command(app, "models", examples=["steercap models", "steercap models ./model", "steercap models qwen3 --json"])
    async def models(
        terminal: Terminal,
        part: Annotated[
            str,
            typer.Argument(
                metavar="[MODEL|PART]",
                help="Folder or hub name of a model, to describe it; or a part of an architecture's or layer's name.",
            ),
        ] = "",
        *,
        refused: Annotated[
            bool, typer.Option("--refused", help="List architectures that are refused, and why.")
        ] = False,
    ) -> None:
        """List the proved architectures: a tiny model of each was compared with transformers at every site and for
        every operation; the worst row's error is shown. Others are served too, if they pass the checks at start. Given
        a model's folder or hub name, show how it would be served, without starting it: sites, layers, memory, command.
        """
        from steercap.architectures.families.proved import TITLES, cells_of, records

        if _is_model(part):
            refuse(f"{part} is a model, which is described", {"--refused": refused or None})
            answer = facts_of(part)
            terminal.show(answer, _answered(answer))
            return
        found = [
            record
            for record in records()
            if bool(record.refused) == refused
            and part.lower() in " ".join((record.name, record.architecture, *record.code)).lower()
        ]
        table = Table(box=None, padding=(0, 2, 0, 0))
        for title in ("architecture", "configuration", "why") if refused else TITLES:
            table.add_column(title, overflow="fold")
        for record in found:
            cells = (record.architecture, record.name, record.refused) if refused else cells_of(record)
            table.add_row(*map(Text, cells))
        terminal.show(found, table)
