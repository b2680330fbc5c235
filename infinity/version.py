"""The version of this package, for itself: what is stored on disk holds for one of them."""

__version__ = "0.1.0"
"""The version of the package, as in its wheel's name."""
