"""Personas: from the description of a trait to its vector."""

from steercap.persona.trait import Trait, load_trait, traits

__all__ = ["Trait", "load_trait", "traits"]
