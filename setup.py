"""Builds the one thing that `pyproject.toml` cannot describe: an optional C extension.

`kernels._native` holds the kernels for CPUs. `optional=True` lets an install go on without a compiler;
kvferry then uses its torch kernels and says so at start. A syntax error in the source is passed over in the
same way, so a test fails where a compiler is there and the extension did not load.
"""

from pathlib import Path

from setuptools import Extension, setup

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

setup(ext_modules=[native] if SOURCES else [])
