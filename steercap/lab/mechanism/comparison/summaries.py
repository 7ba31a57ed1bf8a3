"""Summaries of the comparison of two checkpoints, computed from its tables of each layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import numpy as np

from steercap.core.extras import extra
from steercap.core.values import choices, count_of, shown
from steercap.errors import InvalidSpec, UnknownName
from steercap.lab.measures.statistics import benjamini_hochberg, holm
from steercap.lab.mechanism.analysis.tables import table_of

if TYPE_CHECKING:
    import pyarrow as pa

#: Correction of p for multiple tests: Holm's, that of Benjamini and Hochberg, or none.
Correction: TypeAlias = Literal["holm", "bh", "none"]
#: Name of the components' group in every table.
COMPONENTS: Final = "components"
#: Measures of a feed-forward block, and the number of most altered vectors of each group that are listed by each.
MEASURES: Final[Mapping[str, int]] = {"absolute": 15, "angular": 10}

#: Share of a group's greatest magnitude within which its numbers are equal.
ROUNDING: Final = 8 * float(np.finfo(np.float64).eps)


def group_tests(
    table: pa.Table,
    value: str,
    *,
    by: Sequence[str] = ("layer",),
    groups: Sequence[str] | None = None,
    correction: Correction = "holm",
) -> pa.Table:
    """Test whether groups of vectors differ in a number: Welch's t-test of every two groups, for each value of `by`.

    Vectors of a group are assumed to be independent; if they come from overlapping texts, p is too small.

    Args:
        table: table with the columns `group`, `value` and those of `by`.
        value: column of numbers to test.
        by: columns; each combination of their values is tested by itself, such as ("layer", "matrix") for the table
            of `susceptibility`.
        groups: groups to test; by default all of the table.
        correction: "holm" bounds the probability of any false discovery in the whole result, "bh" the share of false
            discoveries; "none" leaves p as it is.

    Returns:
        The columns of `by`, and `value`, `first`, `second` (groups), `first_mean`, `second_mean`, `first_count`,
        `second_count`, `t`, `p` (two-sided), `adjusted`; `t`, `p` and `adjusted` are null if neither group varies by
        more than rounding.

    Raises:
        UnknownName: there is no such column, group or correction.
        InvalidSpec: there are fewer than two groups, or one is given twice, a group has fewer than two vectors or a
            number that is not finite, or a vector has several rows for one combination of `by`.
    """
    with extra("analysis"):
        from scipy.stats import ttest_ind

    for name in ("group", value, *by):
        if name not in table.column_names:
            raise UnknownName(f"no column {shown(name)}; {choices(name, table.column_names)}")
    check_correction(correction)
    wanted = _groups(table, groups)
    others = [name for name in table.column_names if name not in {"group", "name", value, *by}]
    if "name" in table.column_names and table.group_by([*by, "group", "name"]).aggregate([]).num_rows < len(table):
        raise InvalidSpec(f"by={list(by)}: a vector has several rows where these are equal; add one of {others}")
    rows: list[dict[str, Any]] = []
    for place, values in _values(table, value, by).items():
        for first, second in combinations(wanted, 2):
            ours, theirs = (np.array(values.get(group, ()), dtype=float) for group in (first, second))
            if min(len(ours), len(theirs)) < 2:
                at = ", ".join(f"{name} {own}" for name, own in zip(by, place, strict=True))
                raise InvalidSpec(
                    f"{len(ours)} vectors of {first} and {len(theirs)} of {second} at {at}; a t-test takes two of each"
                )
            if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
                raise InvalidSpec(
                    f"{value} of {first} or {second} has a number that is not finite, or none; filter these"
                )
            varied = any(np.ptp(one) > ROUNDING * np.abs(one).max() for one in (ours, theirs))
            t, p = ttest_ind(ours, theirs, equal_var=False) if varied else (math.nan, math.nan)
            rows.append(
                {**dict(zip(by, place, strict=True)), "value": value, "first": first, "second": second,
                 "first_mean": ours.mean(), "second_mean": theirs.mean(), "first_count": len(ours),
                 "second_count": len(theirs), "t": float(t), "p": float(p)}
            )  # fmt: skip
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    adjust: Mapping[str, Callable[[list[float]], Any]] = {"holm": holm, "bh": benjamini_hochberg, "none": np.asarray}
    columns["adjusted"] = adjust[correction](columns["p"])
    for name in ("t", "p", "adjusted"):
        columns[name] = [None if math.isnan(one) else float(one) for one in columns[name]]
    return table_of(columns, correction=correction)


def focus_layers(table: pa.Table) -> dict[str, int]:
    """Return, by measure ("absolute", "angular"), the layer with the greatest mean over the group of components.

    Args:
        table: table `feed_forward` of `compare`.

    Raises:
        UnknownName: the table lacks the group `COMPONENTS`.
    """
    _check_group(COMPONENTS, table["group"].to_pylist())
    found = {}
    for measure in MEASURES:
        means = {place[0]: np.mean(values[COMPONENTS]) for place, values in _values(table, measure, ("layer",)).items()}
        found[measure] = int(max(means, key=lambda layer: (means[layer], -layer)))
    return found


def altered_by_layer(table: pa.Table) -> pa.Table:
    """Summarise the table `feed_forward` of `compare` by group, layer and measure.

    Columns are `group`, `layer`, `measure`, `mean`, `std` (of a sample, null for one vector), `max`, `count`.
    """
    rows = [
        {"group": group, "layer": place[0], "measure": measure, "mean": np.mean(own),
         "std": np.std(own, ddof=1) if len(own) > 1 else None, "max": max(own), "count": len(own)}
        for measure in MEASURES
        for place, values in _values(table, measure, ("layer",)).items()
        for group, own in values.items()
    ]  # fmt: skip
    return table_of({name: [row[name] for row in rows] for name in rows[0]})


def most_altered(table: pa.Table, focus: Mapping[str, int]) -> pa.Table:
    """List the most altered vectors of each group at each focus layer, as many as in `MEASURES`.

    Args:
        table: table `feed_forward` of `compare`.
        focus: layer by measure, as from `focus_layers`.

    Returns:
        Columns `measure`, `layer`, `group`, `place` (from 0, the greatest), `name`, `value`.
    """
    rows = []
    for measure, layer in focus.items():
        own = [row for row in table.to_pylist() if row["layer"] == layer]
        for group in dict.fromkeys(row["group"] for row in own):
            ranked = sorted((row for row in own if row["group"] == group), key=lambda row: -row[measure])
            rows += [
                {"measure": measure, "layer": layer, "group": group, "place": place, "name": row["name"],
                 "value": row[measure]}
                for place, row in enumerate(ranked[: MEASURES[measure]])
            ]  # fmt: skip
    return table_of({name: [row[name] for row in rows] for name in rows[0]})


def partners(table: pa.Table, top: int = 5) -> pa.Table:
    """List the vectors whose attention numbers with each component differ most between the checkpoints, over layers.

    Args:
        table: table `attention` of `compare`.
        top: number of partners of each component, circuit and side.

    Returns:
        Columns `circuit`, `side` ("target" if the partner is the target, "source" otherwise), `name` (of the
        component), `place`, `partner_group`, `partner`, `moved` (mean |delta| over layers), `delta` (mean).

    Raises:
        InvalidSpec: `top` is below 1.
    """
    count_of(top, "top")
    found: list[dict[str, Any]] = []
    for side, other in (("target", "source"), ("source", "target")):
        keys = ["circuit", other, f"{side}_group", side]
        kept = [
            relation == "given" and group == COMPONENTS
            for relation, group in zip(table["relation"].to_pylist(), table[f"{other}_group"].to_pylist(), strict=True)
        ]
        means = _means(table.filter(kept), keys)
        for circuit, name in dict.fromkeys((row["circuit"], row[other]) for row in means):
            own = [row for row in means if (row["circuit"], row[other]) == (circuit, name)]
            found += [
                {"circuit": circuit, "side": side, "name": name, "place": place, "partner_group": row[f"{side}_group"],
                 "partner": row[side], "moved": row["moved"], "delta": row["delta"]}
                for place, row in enumerate(sorted(own, key=lambda row: -row["moved"])[:top])
            ]  # fmt: skip
    return table_of({name: [row[name] for row in found] for name in found[0]})


def component_deltas(table: pa.Table, explained: Mapping[str, float | None]) -> pa.Table:
    """Return the mean |delta| of each component's numbers with itself, and the variance that it explains.

    Args:
        table: table `attention` of `compare`.
        explained: share of the vectors' variance along each component, by name; None if they do not vary.

    Returns:
        Columns `component`, `explained`, `qk` and `vo` (mean over layers of |delta| of the component with itself).
    """
    kept = [
        relation == "same" and group == COMPONENTS
        for relation, group in zip(table["relation"].to_pylist(), table["source_group"].to_pylist(), strict=True)
    ]
    moved = {(row["circuit"], row["source"]): row["moved"] for row in _means(table.filter(kept), ["circuit", "source"])}
    columns: dict[str, list[Any]] = {
        "component": list(explained),
        "explained": list(explained.values()),
        **{circuit: [moved[circuit, name] for name in explained] for circuit in ("qk", "vo")},
    }
    return table_of(columns)


def summed(
    parts: Mapping[str, Sequence[pa.Table]],
    groups: Sequence[str],
    explained: Mapping[str, float | None],
    correction: Correction,
) -> dict[str, pa.Table]:
    """Join the tables of all layers, and return these and their summaries by name; see `CheckpointComparison`.

    Args:
        parts: tables of each layer, by name of the table.
        groups: groups to test against each other; empty for no test.
        explained: as for `component_deltas`.
        correction: as for `group_tests`; p is corrected over all layers and groups of one measure.
    """
    with extra("analysis"):
        import pyarrow as pa

    tables = {name: pa.concat_tables(own) for name, own in parts.items()}
    tables["partners"] = partners(tables["attention"])
    tables["components"] = component_deltas(tables["attention"], explained)
    neurons = tables["feed_forward"]
    focus = focus_layers(neurons)
    tables["by_layer"], tables["altered"] = altered_by_layer(neurons), most_altered(neurons, focus)
    kept = [layer in focus.values() for layer in tables["decomposition"]["layer"].to_pylist()]
    tables["decomposition"] = tables["decomposition"].filter(kept)
    if groups:
        tested = [group_tests(neurons, measure, groups=groups, correction=correction) for measure in MEASURES]
        tables["tests"] = pa.concat_tables(tested)
    return tables


def _groups(table: pa.Table, groups: Sequence[str] | None) -> list[str]:
    """Return `groups`, checked, or for None all groups of a table.

    Raises:
        UnknownName: the table lacks a group.
        InvalidSpec: there are fewer than two groups, or one is given twice.
    """
    known = list(dict.fromkeys(table["group"].to_pylist()))
    for group in groups or ():
        _check_group(group, known)
    wanted = known if groups is None else list(groups)
    if len(wanted) < 2 or len(set(wanted)) < len(wanted):
        raise InvalidSpec(
            f"groups={shown(wanted)}; groups are tested against each other, so give two at least, each once"
        )
    return wanted


def check_correction(correction: str) -> None:
    """Check the name of a correction, one of `Correction`.

    Raises:
        UnknownName: there is no correction of this name.
    """
    if correction not in get_args(Correction):
        raise UnknownName(f"correction={shown(correction)}; {choices(correction, get_args(Correction))}")


def _check_group(group: str, known: Sequence[str]) -> None:
    if group not in known:
        raise UnknownName(f"no group {shown(group)}; {choices(group, dict.fromkeys(known))}")


def _values(table: pa.Table, value: str, by: Sequence[str]) -> dict[tuple[Any, ...], dict[str, list[float]]]:
    """Return the column `value` as lists, by the values of the columns `by`, in their order, then by column "group"."""
    found: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    columns = [table[name].to_pylist() for name in (*by, "group", value)]
    for *place, group, number in zip(*columns, strict=True):
        found.setdefault(tuple(place), {}).setdefault(group, []).append(number)
    return found


def _means(table: pa.Table, keys: list[str]) -> list[dict[str, Any]]:
    """Return records with the means of |delta| (`moved`) and of `delta` for each combination of the columns `keys`."""
    with extra("analysis"):
        import pyarrow.compute as pc

    some = table.append_column("moved", pc.abs(table["delta"]))
    grouped = some.group_by(keys, use_threads=False).aggregate([("moved", "mean"), ("delta", "mean")])
    names = {"moved_mean": "moved", "delta_mean": "delta"}
    rows: list[dict[str, Any]] = grouped.rename_columns(
        [names.get(one, one) for one in grouped.column_names]
    ).to_pylist()
    return rows
