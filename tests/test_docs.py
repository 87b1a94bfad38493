"""Every example of README and docs runs, and shows what it says."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import kvsim
from kvsim import Directive, EngineConfig, FailReason, RankIdentity, SchedulerRank, SglangConfig, layout
from kvsim.placement import KvRouterConfig
from kvsim.placement.kv_router import INEFFECTIVE
from kvsim.rulesets import RULESETS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Examples run in a folder of their own, where a relative search path would lead nowhere.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(kvsim.__file__).parents[1])}

# Runs the blocks of one page in one namespace and reports what each printed.
RUNNER = """
import contextlib, io, json, sys
printed, names = [], {"__name__": "__main__"}
for line, source in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile("\\n" * line + source, sys.argv[1], "exec"), names)
    printed.append(out.getvalue())
json.dump(printed, sys.stdout)
"""


class Block(NamedTuple):
    language: str
    line: int  # lines of the page before its first
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(found[1], text.count("\n", 0, found.start(2)), found[2]) for found in FENCE.finditer(text)]


def commands(page: Path) -> list[str]:
    return [line for block in blocks(page) if block.language == "sh" for line in block.text.splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_run_and_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    found = blocks(page)
    programs = [block for block in found if block.language == "python"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUNNER, page.name],
        input=json.dumps([(block.line, block.text) for block in programs]),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = dict(zip(programs, json.loads(done.stdout), strict=True))
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.language == "python" and printed[block]:
            assert after is not None, f"{page.name}:{block.line}: what the example prints is not shown"
            assert after.language == "text", f"{page.name}:{block.line}: what the example prints is not shown"
            assert printed[block] == after.text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_the_command_line_run(page: Path, tmp_path: Path) -> None:
    for command in commands(page):
        if not command.startswith("kvsim "):
            continue
        program = "import sys; from kvsim.cli import main; sys.exit(main(sys.argv[1:]))"
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program, *shlex.split(command)[1:]],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=ENVIRONMENT,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert done.stdout


def test_there_are_examples_to_test() -> None:
    languages = [block.language for page in PAGES for block in blocks(page)]
    assert languages.count("python") >= 5


def test_readme_has_exactly_two_set_up_commands() -> None:
    assert commands(ROOT / "README.md") == [
        "pip install . && kvsim replay --example",
        "pip install '.[test]' && pytest",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_sizes_of_structs_are_those_of_the_layout() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    stated = re.findall(r"^\|[^|]*\| `([A-Z_]+)` \| (\d+) \|", text, re.MULTILINE)
    assert len(stated) >= 10
    for name, size in stated:
        assert getattr(layout, name).itemsize == int(size), name


def test_every_section_of_the_arena_is_in_the_table() -> None:
    sections = SchedulerRank(RankIdentity(), EngineConfig(num_gpu_blocks=4)).snapshot().sizes
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z_]+)` \| (?:`[A-Z_]+`|int32|uint64) \| \d+ \|", text, re.MULTILINE) == list(sections)


def test_every_option_of_replay_is_in_its_table() -> None:
    text = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")
    stated = {
        name for cell in re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    }
    assert set(inspect.signature(kvsim.replay).parameters) - {"workload"} <= stated


def test_every_option_of_sglang_is_in_its_table_with_its_default() -> None:
    text = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")
    stated = dict(re.findall(r"^\| `sglang\.(\w+)` \| `?([\w.]+)`? \|", text, re.MULTILINE))
    defaults = SglangConfig()
    assert stated == {name: str(getattr(defaults, name)) for name in SglangConfig.__struct_fields__}


def test_every_option_of_the_router_is_in_its_table_with_its_default_or_said_to_be_without_effect() -> None:
    text = (ROOT / "docs" / "placement.md").read_text(encoding="utf-8")
    stated = dict(re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", text, re.MULTILINE))
    ignored = re.findall(r"`(\w+)`", text.partition("**Without effect")[2].partition("\n\n")[0])
    defaults = KvRouterConfig()
    effective = [name for name in KvRouterConfig.__struct_fields__ if name not in INEFFECTIVE]
    assert stated == {name: str(getattr(defaults, name)) for name in effective}
    assert sorted(ignored) == sorted(INEFFECTIVE)


def test_every_reason_of_an_end_is_listed() -> None:
    text = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")
    stated = set(re.findall(r"^\| (?:rejected|failed) \| `(\w+)` \|", text, re.MULTILINE))
    assert stated == {reason.name.lower() for reason in FailReason if reason}


@pytest.mark.parametrize("page", ["design.md", "replay.md"])
def test_every_ruleset_is_in_the_table(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert re.findall(r"^\| `(dynamo[\w.-]*)`", text, re.MULTILINE) == list(RULESETS)


def test_every_switch_of_a_directive_is_said_to_be_read_by_an_engine() -> None:
    text = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `directive`: what is read \|.*$", text, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) - {"directive"} == {field.name for field in dataclasses.fields(Directive)}


def test_every_decision_takes_less_than_ten_lines() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    decisions = text.partition("## Decisions")[2].strip().split("\n\n")
    assert len(decisions) >= 15
    for decision in decisions:
        assert decision.startswith("**"), decision
        assert len(decision.splitlines()) < 10, decision
