"""Everything is in pyproject.toml but this: the native core, which cffi compiles."""

from __future__ import annotations

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, ExecError, PlatformError

COMPILER_ERRORS = (BaseError, CCompilerError, ExecError, PlatformError)


class BuildCore(build_ext):
    """Says in one sentence what is missing when the core can't be compiled."""

    def build_extensions(self) -> None:
        try:
            super().build_extensions()
        except COMPILER_ERRORS as error:
            raise SystemExit(
                f"neuron-pushkv: the native core can't be compiled ({error}); install a C compiler and the headers of "
                "Python (Debian: apt-get install gcc libc6-dev python3-dev), or set CC to a compiler that works"
            ) from error


setup(cffi_modules=["neuron_pushkv/fabric/build.py:builder"], cmdclass={"build_ext": BuildCore})
