"""Marks of tests that need what not every CPU has."""

from __future__ import annotations

import pytest

from kernels_ref.x86 import library

needs_x86_kernels = pytest.mark.skipif(not library.lanes(), reason="needs a CPU with AVX2, FMA and F16C")
