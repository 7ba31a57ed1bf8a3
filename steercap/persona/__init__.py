"""Personas: from the description of a trait to its vector."""

from steercap.persona.pipeline import PersonaResult, run
from steercap.persona.progress import Progress
from steercap.persona.settings import PersonaSettings
from steercap.persona.trait import Trait, load_trait, traits

__all__ = ["PersonaResult", "PersonaSettings", "Progress", "Trait", "load_trait", "run", "traits"]
