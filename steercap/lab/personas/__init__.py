"""Personas: from the description of a trait to its vector."""

from steercap.lab.measures.trait import Trait, load_trait, traits
from steercap.lab.personas.folder import Progress
from steercap.lab.personas.pipeline import PersonaResult, run
from steercap.lab.personas.settings import PersonaSettings

__all__ = ["PersonaResult", "PersonaSettings", "Progress", "Trait", "load_trait", "run", "traits"]
