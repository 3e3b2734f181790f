"""Builds the one thing that `pyproject.toml` cannot describe: an optional C extension.

`kernels._native` holds the kernels for CPUs. `optional=True` lets an install go on without a compiler;
kvferry then uses its torch kernels and says so at start. A syntax error in the source is passed over in the
same way, so a test fails where a compiler is there and the extension did not load.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

NATIVE = Path("kernels/native")
SOURCES = sorted(str(source) for source in NATIVE.glob("*.c"))

native = Extension(
    "kernels._native",
    sources=SOURCES,
    depends=[str(header) for header in NATIVE.glob("*.h")],
    # -ffp-contract=off: the compiler may not choose where to fuse, or two builds would differ in their bits.
    extra_compile_args=["-O3", "-std=gnu11", "-fno-math-errno", "-ffp-contract=off"],
    optional=True,
)


class BuildBesideEachOther(build_ext):  # type: ignore[misc]  # setuptools has no types
    """A compiler for each core: one after the other, the sources take half a minute. What it raises is passed over as
    it is where setuptools compiles."""

    force: bool

    def build_extension(self, ext: Extension) -> None:
        sources = list(ext.sources)
        if self.force or newer_group([*sources, *ext.depends], self.get_ext_fullpath(ext.name), "newer"):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                ext.extra_objects = list(pool.map(lambda source: self._object_of(source, ext), sources))
            ext.sources, self.force = [], True  # linked whatever the headers' age
        super().build_extension(ext)

    def _object_of(self, source: str, ext: Extension) -> str:
        (found,) = self.compiler.compile(
            [source],
            output_dir=self.build_temp,
            extra_postargs=ext.extra_compile_args,
            depends=ext.depends,
        )
        return str(found)


setup(ext_modules=[native] if SOURCES else [], cmdclass={"build_ext": BuildBesideEachOther})
