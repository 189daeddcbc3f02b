"""A stand-in of the vendor's package, for tests: what the public bridge documents, on CPU tensors.

As on the vendor's images, ``import torch`` imports it where it is on the path when Python starts: the folder
beside this one names the entry point.
"""


def autoload() -> None:
    """Entry point that torch calls at the end of its own import."""
    import habana_frameworks.torch  # noqa: F401
