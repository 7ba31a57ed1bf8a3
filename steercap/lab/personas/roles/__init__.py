"""Roles: vectors of many characters, the assistant axis, and capping along it."""

from steercap.lab.personas.roles.axis import AssistantAxis, assistant_axis
from steercap.lab.personas.roles.axis_capping import (
    Capping,
    CapRecord,
    calibrated_capping,
    calibration_texts,
    capping,
    projections_by_text,
    token_projections,
)
from steercap.lab.personas.roles.effects import Change, changes, compare_steering
from steercap.lab.personas.roles.pipeline import RoleRun, load_roles_run, run_roles, run_roles_share
from steercap.lab.personas.roles.plots import plot_changes, plot_positions, plot_roles, plot_stability
from steercap.lab.personas.roles.reading import load_roles, shipped_roles
from steercap.lab.personas.roles.role import ASSISTANT, Role, RoleSet, drift_prompts
from steercap.lab.personas.roles.rows import RoleRows
from steercap.lab.personas.roles.settings import Case, RoleSettings, cases_of, drift_cases
from steercap.lab.personas.roles.split_half import Stability, stability

__all__ = [
    "ASSISTANT",
    "AssistantAxis",
    "CapRecord",
    "Capping",
    "Case",
    "Change",
    "Role",
    "RoleRows",
    "RoleRun",
    "RoleSet",
    "RoleSettings",
    "Stability",
    "assistant_axis",
    "calibrated_capping",
    "calibration_texts",
    "capping",
    "cases_of",
    "changes",
    "compare_steering",
    "drift_cases",
    "drift_prompts",
    "load_roles",
    "load_roles_run",
    "plot_changes",
    "plot_positions",
    "plot_roles",
    "plot_stability",
    "projections_by_text",
    "run_roles",
    "run_roles_share",
    "shipped_roles",
    "stability",
    "token_projections",
]
