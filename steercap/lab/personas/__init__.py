"""Personas: from the description of a trait to its vector."""

from steercap.lab.measures.trait import Trait, load_trait, traits
from steercap.lab.personas.folder import Progress
from steercap.lab.personas.pipeline import PersonaResult, WrittenLevels, run, write_levels
from steercap.lab.personas.settings import PersonaSettings

__all__ = [
    "PersonaResult",
    "PersonaSettings",
    "Progress",
    "Trait",
    "WrittenLevels",
    "load_trait",
    "run",
    "traits",
    "write_levels",
]
