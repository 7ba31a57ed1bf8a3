"""Parts of terminal tables and JSON documents that several commands share, on directions and tried layers."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.table import Table
from rich.text import Text

from steercap.core.values import shown

if TYPE_CHECKING:
    from steercap.lab.studies.rollout_tables import RolloutSummary, VariantScore
    from steercap.lab.studies.trying import TriedLayers
    from steercap.steering.directions import DirectionSet

#: Bar segments of 0 to 8 eighths of a character cell.
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
#: Text of a slice in `TokenSelection`, such as "slice(1, None, 1)".
_SLICE: Final = re.compile(r"slice\((None|-?\d+), (None|-?\d+), (None|-?\d+)\)")
#: Width of a bar in character cells.
BAR: Final = 20


def bar(share: float) -> Text:
    """Return a bar of up to `BAR` characters for a share from 0 to 1; shares beyond are clipped."""
    eighths = round(min(max(share, 0.0), 1.0) * BAR * 8)
    return Text("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip(), style="cyan")


def titled(title: str, columns: Iterable[str], *, words: Collection[str] = (), caption: str | None = None) -> Table:
    """Return an empty table with a title; the columns named in `words` are of text, the others of numbers."""
    table = Table(title=Text(title), title_justify="left", title_style="bold", caption=caption, caption_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in words else "right")
    return table


def facts(title: str, rows: Mapping[str, Any]) -> Table:
    """Return a table of names and values, without header; values that are None or empty are left out."""
    table = Table(
        title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2, 0, 0)
    )
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        if value is not None and str(value):
            table.add_row(name, Text(str(value)))
    return table


def by_layer(directions: DirectionSet, name: str) -> Table:
    """Return a table of one direction by layer: its norm, also as a share of the rows' norm, and its AUC with a bar."""
    from steercap.lab.directions.methods import suggested_layer

    vectors, known = directions[name], directions.provenance
    suggestion = suggested_layer(directions, name)
    low, high = suggestion.chance if suggestion else (0.0, 0.0)
    auc, rows = known.auc.get(name, {}), known.row_norms.get(name, {})
    table = titled(
        f"{name}, {vectors.site}",
        ("layer", "norm", *(("of a row",) if rows else ()), *(("AUC held out",) if auc else ())),
    )
    if auc:
        table.add_column("0.5 is chance", width=BAR)
    for layer, norm in vectors.norms().items():
        cells: list[str | Text] = [str(layer), f"{norm:.4g}"]
        if rows:
            share = norm / rows[layer] if rows.get(layer) else None
            cells.append("" if share is None else f"{share:.1%}")
        if auc:
            said = auc.get(layer)
            style = "dim" if said is None or low <= said <= high else ""
            cells += ["", ""] if said is None else [Text(f"{said:.3f}", style), bar(2 * said - 1)]
        table.add_row(*cells)
    return table


def advice(directions: DirectionSet, name: str) -> dict[str, str]:
    """Return remarks on a direction's AUC by label: chance, ties, suggested layer; {} without held-out texts."""
    from steercap.lab.directions.methods import runs_of, suggested_layer

    found = suggested_layer(directions, name)
    if found is None:
        return {}
    held = "{} and {}".format(*directions.provenance.held_out[name])
    low, high = found.chance
    return {
        "chance": f"AUC {low:.2f} to {high:.2f} at the best of {found.layer_count} layers in 95 % of directions "
        f"without meaning, with {held} texts held out",
        "layers tie": f"{len(found.tied)} of {found.layer_count} at AUC {found.auc:.3f}: {runs_of(found.tied)}"
        if len(found.tied) > 1
        else "",
        "suggested": f"layer {found.layer}: {found.reason}",
    }


def replies_of(tried: TriedLayers) -> list[Table]:
    """Return a table per prompt of the replies without steering and at each tried layer, with scales of both signs."""
    found = []
    for number, prompt in enumerate(tried.prompts):
        table = titled(shown(prompt), ("layer", "scale", "reply", "effect", "perplexity"), words=("reply",))
        for one in tried.replies:
            if one.prompt == number:
                layer, scale = ("", "none") if one.layer is None else (str(one.layer), f"{one.scale:+g}")
                numbers = (_number(one.effect, "+.2f"), _number(one.perplexity, ".3g"))
                table.add_row(layer, scale, Text(" ".join(one.text.split())), *numbers)
        found.append(table)
    return found


def tried_layers(tried: TriedLayers) -> Table:
    """Return a table of the layers at which a direction was tried: mean effects of both signs, and perplexity."""
    from steercap.lab.studies.trying import REPEATS

    table = titled(
        "layers tried, means over the prompts",
        ("layer", f"+{tried.scale:g}", f"-{tried.scale:g}", "apart", "perplexity", "note"),
        words=("note",),
        caption="effect: distance of the reply from the unsteered one along the direction, in lengths of it, "
        f"read at layer {tried.read_at} without steering; perplexity: without steering",
    )
    for one in tried.effects():
        numbers = (_number(value, "+.2f") for value in (one.up, one.down, one.apart))
        broken = "perplexity unknown" if math.isnan(one.perplexity) else "high perplexity"
        broken = "repeats itself" if one.repeated >= REPEATS else broken
        note = "best" if one.layer == tried.best else broken if one.broken else ""
        counted = f"{one.prompts} of {len(tried.prompts)} prompts" if one.prompts < len(tried.prompts) else ""
        said = ", ".join(filter(None, (note, counted)))
        table.add_row(str(one.layer), *numbers, _number(one.perplexity, ".3g"), said)
    return table


def best_tried(tried: TriedLayers) -> str:
    """Return a sentence on the layer that steered best, with the distance between its replies of both signs."""
    best = next((one for one in tried.effects() if one.layer == tried.best), None)
    if best is None:
        return "none: at no layer did the replies move along the direction with their text intact"
    return f"layer {best.layer}: its replies are {best.apart:.2f} apart"


def tried_document(tried: TriedLayers) -> dict[str, Any]:
    """Return replies and effects as a document for JSON, with NaN as null, and infinity as "inf"."""

    def plain(row: NamedTuple) -> dict[str, Any]:
        return {name: _plain(value) for name, value in row._asdict().items()}

    return {
        "scale": tried.scale,
        "read_at": tried.read_at,
        "best": tried.best,
        "prompts": tried.prompts,
        "layers": list(map(plain, tried.effects())),
        "replies": list(map(plain, tried.replies)),
    }


def _plain(value: Any) -> Any:
    finite = not isinstance(value, float) or math.isfinite(value)
    return value if finite else None if math.isnan(value) else str(value)


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else f"{value:{form}}"


def told_of(directions: DirectionSet, name: str) -> list[Table]:
    """Return tables of one direction: its layers, and, with held-out texts, the significance of its AUC."""
    said = advice(directions, name)
    return [by_layer(directions, name), *([facts("", said)] if said else [])]


def suggestion_of(directions: DirectionSet, name: str) -> dict[str, Any] | None:
    """Return the suggested layer of a direction as a document for JSON; None without held-out texts."""
    from steercap.lab.directions.methods import suggested_layer

    found = suggested_layer(directions, name)
    if found is None:
        return None
    return {
        "layer": found.layer,
        "auc": found.auc,
        "chance_band": found.chance,
        "is_chance": found.is_chance,
        "tied": found.tied,
        "reason": found.reason,
    }


def origin(directions: DirectionSet) -> dict[str, Any]:
    """Return the provenance of directions as labels and values to show."""
    known = directions.provenance
    counts = {name: f"{shown} texts that show it, {other} that do not" for name, (shown, other) in known.rows.items()}
    held = {name: f"{shown} and {other}" for name, (shown, other) in known.held_out.items() if shown or other}
    return {
        "model": directions.model,
        "revision": known.revision,
        "dtype": known.dtype,
        "method": known.method,
        "tokens": _SLICE.sub(_as_flag, known.tokens),
        "reduce": known.reduce,
        "seed": known.seed if known.method else "",
        "made from": "; ".join(f"{name}: {said}" if len(counts) > 1 else said for name, said in counts.items()),
        "held out": "; ".join(f"{name}: {said}" if len(held) > 1 else said for name, said in held.items()),
        "prompts": "; ".join(f"SHA-256 {digest[:16]}…" for digest in known.prompts.values()),
    }


def _as_flag(found: re.Match[str]) -> str:
    """Return a matched slice in the form of `--tokens`: "1:" for "slice(1, None, 1)"."""
    start, stop, step = ("" if part == "None" else part for part in found.groups())
    return f"{start}:{stop}" + (f":{step}" if step not in {"", "1"} else "")


def document_of(directions: DirectionSet) -> dict[str, Any]:
    """Return the properties and provenance of directions, without vectors, as a document for JSON."""
    known = directions.provenance
    return {
        "model": directions.model,
        "site": directions.site,
        "width": directions.width,
        "layers": directions.layers,
        "directions": {
            name: {
                "norms": vectors.norms(),
                "auc": known.auc.get(name, {}),
                "rows": known.rows.get(name),
                "held_out": known.held_out.get(name),
                "row_norms": known.row_norms.get(name, {}),
                "suggestion": suggestion_of(directions, name),
            }
            for name, vectors in directions.items()
        },
        "provenance": {
            field: getattr(known, field)
            for field in ("revision", "dtype", "tokens", "reduce", "method", "seed", "prompts")
        },
    }


def cosines(directions: DirectionSet, layer: int) -> Table:
    """Return a table of the cosines between all directions at a layer, a row and a column for each."""
    table = titled(f"cosines at layer {layer}", ("", *directions), words=("",))
    for name, row in zip(directions, directions.cosines(layer).tolist(), strict=True):
        table.add_row(Text(name, style="cyan"), *(Text(f"{value:+.3f}", style=_strength(value)) for value in row))
    return table


def _strength(cosine: float) -> str:
    return "bold" if abs(cosine) >= 0.5 else "" if abs(cosine) >= 0.2 else "dim"


def rollouts_table(rollouts: Sequence[RolloutSummary]) -> Table:
    """Return a table with a row per variant: by scorer, its mean over data sets with a score, and its refusals."""
    scorers = ["minilm", *(["judge"] if any(one.judge for one in rollouts) else [])]
    heads = [f"{scorer}{what}" for scorer in scorers for what in ("", " refusals")]
    table = titled(
        f"mean over the data sets with a score, of {len(rollouts):,}", ["variant", *heads], words=["variant"]
    )
    for variant in dict.fromkeys(name for one in rollouts for name in one.minilm):
        cells = list[str]()
        for scorer in scorers:
            means: list[dict[str, VariantScore]] = [getattr(one, scorer) for one in rollouts]
            scores = [own[variant] for own in means if variant in own]
            known = [one.mean for one in scores if one.mean is not None]
            cells.append(f"{sum(known) / len(known):.3g}" if known else "")
            cells.append(f"{sum(one.refusals for one in scores):,}")
        table.add_row(variant, *cells)
    return table
