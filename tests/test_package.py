"""The installed package: what it holds, and what importing it costs."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

import kvsim

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(kvsim.__file__).parent


def run(program: str) -> str:
    """Output of a program in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def installed() -> bool:
    try:
        return bool(metadata.version("kvsim"))
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not installed(), reason="runs from the source tree, not from an installed package")
def test_version_is_that_of_the_distribution() -> None:
    assert kvsim.__version__ == metadata.version("kvsim")


def test_types_data_and_stubs_are_installed() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert (PACKAGE / "data" / "example_trace.jsonl.gz").is_file()
    assert (PACKAGE / "data" / "example_trace.jsonl.gz").stat().st_size < 300_000
    compiled = {path.name.partition(".")[0] for path in (PACKAGE / "_core").glob("*.so")}
    assert compiled
    assert compiled == {path.stem for path in (PACKAGE / "_core").glob("*.pyi")}


@pytest.mark.skipif(PACKAGE.parent == ROOT / "src", reason="runs from the source tree, not from an installed package")
def test_no_sources_of_kernels_are_installed() -> None:
    assert not [path.name for path in PACKAGE.rglob("*") if path.suffix in (".pyx", ".pxd", ".c", ".h")]


def test_no_generated_file_is_in_the_repository() -> None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run([git, "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"git does not read this checkout: {listed.stderr.strip()}")
    assert not [name for name in listed.stdout.splitlines() if Path(name).suffix in (".c", ".so", ".pyc", ".html")]


def test_console_script_is_installed_and_knows_its_version() -> None:
    script = Path(sysconfig.get_path("scripts")) / "kvsim"
    if not script.exists():
        pytest.skip("installed without scripts")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"kvsim {kvsim.__version__}\n"


def test_every_public_name_is_there() -> None:
    assert sorted(kvsim.__all__) == sorted(set(kvsim.__all__))
    for name in kvsim.__all__:
        assert getattr(kvsim, name) is not None, name
    assert set(kvsim.__all__) <= set(dir(kvsim))


def test_type_checkers_see_the_same_public_names() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    shown = {
        (node.module, alias.name) for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert shown == {(f"kvsim.{module}", name) for module, names in kvsim._HOMES.items() for name in names.split()}
    assert {name for _, name in shown} | {"__version__", "replay"} == set(kvsim.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = kvsim.nonsense


@pytest.mark.parametrize(
    "first",
    [
        "import kvsim",
        "import kvsim.replay",
        "import kvsim.replay.run",
        "from kvsim.replay.run import Run",
        "import kvsim.compat.aisimulate",
        "import kvsim.cli",
    ],
)
def test_replay_is_the_function_whatever_is_imported_first(first: str) -> None:
    program = "import kvsim, inspect; assert inspect.isfunction(kvsim.replay); import kvsim.replay.run; "
    run(f"{first}; {program} assert inspect.isfunction(kvsim.replay)")


def test_import_loads_nothing_heavy() -> None:
    loaded = set(run("import sys, kvsim; print(*sys.modules)").split())
    assert not loaded & {"tqdm", "yaml", "msgspec", "numpy", "kvsim.config", "kvsim.rank", "kvsim.replay.run"}


def test_configuring_an_engine_needs_neither_yaml_nor_tqdm() -> None:
    loaded = set(run("import sys; from kvsim import EngineConfig; EngineConfig(); print(*sys.modules)").split())
    assert "msgspec" in loaded
    assert not loaded & {"tqdm", "yaml"}


def test_a_run_needs_no_progress_bar() -> None:
    program = "import sys, kvsim; kvsim.replay([{'input_tokens': 8}]); print(*sys.modules)"
    assert not set(run(program).split()) & {"tqdm", "yaml"}
