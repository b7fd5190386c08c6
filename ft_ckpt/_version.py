"""The version, once."""

__version__ = "0.5.0.dev0"
