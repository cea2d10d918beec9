"""Derivatives, one file a family; `table.RULES` has them all."""

from . import losses, pointwise, products, reductions, views
from .table import RULES, Rule

__all__ = ["RULES", "Rule", "losses", "pointwise", "products", "reductions", "views"]
