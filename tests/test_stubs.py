"""Each compiled module against the stub beside it."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

import pytest

import kvsim._core

COMPILED = sorted(found.name for found in pkgutil.iter_modules(kvsim._core.__path__))


def load(name: str) -> tuple[ModuleType, ast.Module]:
    """A compiled module, and the syntax of its stub."""
    module = importlib.import_module(f"kvsim._core.{name}")
    assert isinstance(module.__loader__, ExtensionFileLoader), f"{name} is not compiled"
    return module, ast.parse((Path(str(module.__file__)).parent / f"{name}.pyi").read_text(encoding="utf-8"))


def is_public(name: str) -> bool:
    return not name.startswith("_")


def stubbed(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Public names that a stub declares; what it imports is not declared."""
    names: dict[str, ast.stmt] = {}
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            names[statement.name] = statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names[statement.target.id] = statement
    return {name: statement for name, statement in names.items() if is_public(name)}


def compiled(module: ModuleType) -> set[str]:
    """Public names that a compiled module defines itself."""
    return {
        name
        for name, value in vars(module).items()
        if is_public(name) and getattr(value, "__module__", None) == module.__name__
    }


def test_all_kernels_are_found() -> None:
    assert {"content", "drive", "paged_pass", "state"} <= set(COMPILED)


@pytest.mark.parametrize("name", COMPILED)
def test_every_public_name_has_a_stub_and_every_stub_a_name(name: str) -> None:
    module, stub = load(name)
    assert compiled(module) == set(stubbed(stub.body))


@pytest.mark.parametrize("name", COMPILED)
def test_every_public_member_has_a_stub_and_every_stub_a_member(name: str) -> None:
    module, stub = load(name)
    for class_name, statement in stubbed(stub.body).items():
        if isinstance(statement, ast.ClassDef):
            members = {member for member in vars(getattr(module, class_name)) if is_public(member)}
            assert members == set(stubbed(statement.body)), class_name


@pytest.mark.parametrize("name", COMPILED)
def test_stubs_name_the_parameters_of_what_they_describe(name: str) -> None:
    module, stub = load(name)
    checked = 0
    scopes: list[tuple[object, list[ast.stmt]]] = [(module, stub.body)]
    scopes += [
        (getattr(module, node.name), node.body)
        for node in stubbed(stub.body).values()
        if isinstance(node, ast.ClassDef)
    ]
    for owner, body in scopes:
        for member, statement in stubbed(body).items():
            if not isinstance(statement, ast.FunctionDef) or not callable(getattr(owner, member)):
                continue
            arguments = statement.args
            declared = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            assert list(inspect.signature(getattr(owner, member)).parameters) == declared, member
            checked += 1
    assert checked > 0 or not stubbed(stub.body)
