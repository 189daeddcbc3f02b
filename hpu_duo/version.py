"""The version of the package, which also names what wrote a file."""

__version__ = "0.2.0"
