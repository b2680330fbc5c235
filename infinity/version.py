"""The one place of this package's version: pyproject.toml reads it here, and files on disk are stamped with it."""

__version__ = "0.1.0"
"""The version of the package, as in its wheel's name. A literal: the build reads it without an import."""
