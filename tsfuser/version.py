"""The version of this package; the only place that states it."""

__version__ = "0.3.0"
