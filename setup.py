"""Builds the kernels of kvsim; everything else about the package is in pyproject.toml.

The environment variable ``KVSIM_BUILD`` picks a profile:

release (default)  -O3, every run-time check of Cython off
checked            bounds checks, overflow checks and the CHECK() invariants on
asan               checked, under the address and undefined-behaviour sanitizers
trace              release with line tracing, for profilers and coverage
"""

import os
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

PROFILE = os.environ.get("KVSIM_BUILD", "release")
# -ffp-contract=off: a fused multiply-add would change the last bit between machines.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-strict-aliasing", "-Wno-unused-function", "-Wno-unreachable-code"]
# Not nonecheck: it needs the GIL, which kernels do not hold.
CHECKED = {"boundscheck": True, "overflowcheck": False, "initializedcheck": True}
RELEASE = {"boundscheck": False, "overflowcheck": False, "initializedcheck": False}
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g"]
CHECK = ("KVSIM_CHECK", "1")
PROFILES = {  # directives, macros, compiler flags, linker flags
    "release": (RELEASE, [], FLAGS, []),
    "checked": (CHECKED, [CHECK], [*FLAGS, "-O1", "-g"], []),
    "asan": (CHECKED, [CHECK], [*FLAGS, "-O1", *SANITIZE], SANITIZE),
    "trace": (RELEASE | {"linetrace": True, "profile": True}, [("CYTHON_TRACE_NOGIL", "1")], FLAGS, []),
}
if PROFILE not in PROFILES:
    raise SystemExit(f"KVSIM_BUILD: must be one of {', '.join(PROFILES)}, got {PROFILE!r}")
directives, macros, compile_args, link_args = PROFILES[PROFILE]

# Objects of one profile must not be taken for those of another: all depend on a file that is written when it changes.
STAMP = Path("build/profile")
if not STAMP.exists() or STAMP.read_text() != PROFILE:
    STAMP.parent.mkdir(exist_ok=True)
    STAMP.write_text(PROFILE)

extensions = [
    Extension(
        f"kvsim._core.{path.stem}",
        [str(path)],
        include_dirs=[numpy.get_include(), "src/kvsim/_core"],
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION"), *macros],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
        depends=["setup.py", str(STAMP), *map(str, sorted(Path("src/kvsim/_core").glob("*.pxd")))],
    )
    for path in sorted(Path("src/kvsim/_core").glob("*.pyx"))
]

setup(
    ext_modules=cythonize(
        extensions,
        build_dir=f"build/cython-{PROFILE}",
        include_path=["src"],
        compiler_directives={
            "language_level": "3",
            "cdivision": True,
            "binding": True,
            **directives,
        },
    ),
    options={"build_ext": {"parallel": os.cpu_count()}},
)
