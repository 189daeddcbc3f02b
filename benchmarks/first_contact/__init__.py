"""Figures that decide how a first run on a Gaudi would go, as far as they can be known without one.

    python -m benchmarks.first_contact                      # all parts, printed
    python -m benchmarks.first_contact heads padding --page benchmarks/results/hpu-first-contact.md

Each part is a module with a ``TITLE`` and a function ``report`` that yields the lines of its section. With
``--page`` the sections of the parts named are written into that page, and all others stay as they are.
"""
