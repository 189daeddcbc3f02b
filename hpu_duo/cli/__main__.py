"""``python -m hpu_duo.cli``: the same as ``hpu-duo``."""

from hpu_duo.cli.app import main

if __name__ == "__main__":
    main()
