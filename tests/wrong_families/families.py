"""What is wrong with a family, or with the taps of a site."""

from dataclasses import replace

from steercap.architectures.families import FAMILIES
from steercap.architectures.families.base import one
from steercap.architectures.sites import SITES
from steercap.kernels import tap as taps

VALUES = {"None": None, "one": one, "1": 1}
_tap = taps.tap


def spoil(said: str) -> None:
    """Change the fields of a family, or take it away; "taps weak z" makes the taps of a site wrong."""
    name, *changes = said.split()
    if name == "taps":
        how, site = changes
        _attach_wrongly(SITES[site], WRONG_TAPS[how])
        return
    FAMILIES[name]  # they are found by now
    members = FAMILIES._members
    assert members is not None
    wrong = dict(change.split("=") for change in changes)
    if not wrong:
        del members[name]
    else:
        fields = {field: VALUES.get(value, value) for field, value in wrong.items()}
        members[name] = replace(members[name], **fields)


def _attach_wrongly(site, wrong) -> None:
    """Have a site's hooks call another function in place of the tap operator."""
    attach = site.attach

    def attached(layer, family, tap):
        taps.tap = wrong
        try:
            return attach(layer, family, tap)
        finally:
            taps.tap = _tap

    site.attach = attached


def _weak(hidden, residual, point, kind) -> None:
    """Pass on half of the edit."""
    before = hidden.clone() if residual is None else hidden + residual
    _tap(hidden, residual, point, kind)
    after = hidden if residual is None else hidden + residual
    hidden.sub_((after - before) / 2)


WRONG_TAPS = {"weak": _weak}
