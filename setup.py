"""Build of the wheel; with HPU_DUO_PREBUILT=1 it includes compiled kernels for x86 CPUs.

It needs g++, and torch in the environment: ``pip wheel --no-build-isolation --no-deps .``. Without the
variable the wheel is pure.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


class BuildWithKernels(build_py):
    """Adds the prebuilt libraries to the package."""

    def run(self) -> None:
        """Copy sources, and build."""
        super().run()
        if self.editable_mode:
            return
        sys.path.insert(0, str(Path(__file__).parent))
        from kernels_ref import native, rowwise
        from kernels_ref.x86 import library

        folder = Path(self.build_lib) / "kernels_ref" / native.prebuilt_folder().name
        for module in (library, rowwise):
            replace(module.sources(), portable=module.portable_units()).prebuild(folder)


class PlatformDistribution(Distribution):
    """A distribution whose files are for a platform."""

    def has_ext_modules(self) -> bool:
        """Whether there is compiled code."""
        return True


class PlatformWheel(bdist_wheel):
    """A wheel for this platform, for any version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tag of the wheel."""
        return "py3", "none", super().get_tag()[2]


if os.environ.get("HPU_DUO_PREBUILT", "0") in ("", "0"):
    setup()
else:
    setup(
        distclass=PlatformDistribution, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}
    )
