"""Which tensor is quantized, and how: words, rules, recipes, and their TOML."""

from __future__ import annotations

from qtool.recipe.choice import Choice
from qtool.recipe.effective import effective
from qtool.recipe.patterns import Patterns, escaped, unmatched
from qtool.recipe.recipe import SOURCE_FLOATS, Recipe
from qtool.recipe.rule import Rule
from qtool.recipe.words import WORDS, Words, over

__all__ = [
    "SOURCE_FLOATS",
    "WORDS",
    "Choice",
    "Patterns",
    "Recipe",
    "Rule",
    "Words",
    "effective",
    "escaped",
    "over",
    "unmatched",
]
