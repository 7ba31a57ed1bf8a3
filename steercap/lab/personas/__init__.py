"""Personas: vectors of traits from descriptions, and from existing answers read by a model."""

from steercap.lab.measures.scores import Trait, load_trait, shipped_traits
from steercap.lab.personas.answers import AnswersRead, read_answers, read_answers_by_dtype
from steercap.lab.personas.pipeline import PersonaResult, WrittenLevels, run_persona, write_levels
from steercap.lab.personas.settings import PersonaSettings

__all__ = [
    "AnswersRead",
    "PersonaResult",
    "PersonaSettings",
    "Trait",
    "WrittenLevels",
    "load_trait",
    "read_answers",
    "read_answers_by_dtype",
    "run_persona",
    "shipped_traits",
    "write_levels",
]
