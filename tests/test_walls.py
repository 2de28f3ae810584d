"""Who may import whom (docs/architecture.md), and what may be done nowhere; held by walking the syntax trees of src."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "dora_rl"
PROJECT = "dora_rl"

EVERYTHING = ("",)
ALLOWED: dict[str, tuple[str, ...]] = {
    # A name allows itself and what lies under it. Every package may import itself.
    "config": (),
    "core": ("config",),
    "pace": ("config",),
    "sim": ("config", "core", "pace.law"),
    "models": ("config", "wire.files", "wire.slices", "wire.safetensors_file"),
    "runtime": ("config", "core", "wire", "rl", "pace", "models"),
    "train": ("config", "models", "wire", "core.types", "pace"),
    "wire": ("core.types",),
    "rl": ("core.types", "wire.rollouts"),
    "obs": ("core.types", "core.messages", "core.replay", "wire.rollouts"),
    "audit": ("config", "core.types", "models", "wire", "train.score"),
    "run": ("(the project's root)", "config", "core", "models", "obs", "pace", "rl", "runtime", "train", "wire"),
    "bench": EVERYTHING,
    "cli": EVERYTHING,
    "": (),  # dora_rl/__init__.py
}

# The core can be replayed only if it cannot ask what time it is, who is there, or what the dice say.
BARRED_FROM_CORE = {"asyncio", "time", "os", "logging", "threading", "datetime", "torch", "numpy", "ray", "vllm"}

# Reading a file must never run what is in it.
BARRED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BARRED_BUILTINS = {"eval", "exec", "compile", "__import__"}


@dataclass(frozen=True)
class Module:
    """One file: its dotted name inside the project ("core.types"; "core" for core/__init__.py), and its tree."""

    name: str
    is_package: bool
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


@cache
def modules() -> list[Module]:
    found = []
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found.append(Module(name, is_package, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return found


def module(name: str, source: str) -> Module:
    return Module(name, is_package=False, tree=ast.parse(source))


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported, wherever in the file; `from a import b` counts as a.b."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = [PROJECT, *module.name.split(".")] if module.name else [PROJECT]
                up = node.level - module.is_package
                base = ".".join([*here[: len(here) - up], *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def under(name: str, roots: tuple[str, ...]) -> bool:
    return any(root == "" or name == root or name.startswith(root + ".") for root in roots)


def wall_breaches(module: Module) -> list[str]:
    """Imports of the project that the table does not allow."""
    if module.package not in ALLOWED:
        return [f"{module.name}: the package {module.package} has no row in the table of imports; give it one"]
    allowed = (*ALLOWED[module.package], module.package) if module.package else ALLOWED[""]
    names = known_names()
    return [
        f"{module.name}:{line} imports {name}, but {module.package or PROJECT} may import only {allowed}"
        for line, name in imports(module)
        if under(name, (PROJECT,)) and not under(inside(name, names), allowed)
    ]


def inside(name: str, names: set[str]) -> str:
    """dora_rl.core.types.Version -> core.types: the module, not the thing in it."""
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in names:
        parts.pop()
    return ".".join(parts) or "(the project's root)"


def known_names() -> set[str]:
    return {found.name for found in modules() if found.name}


def impurities(module: Module) -> list[str]:
    """What `core` may not know, and random's global generator, which belongs to everybody."""
    if module.package != "core":
        return []
    faults = []
    for line, name in imports(module):
        if name.partition(".")[0] in BARRED_FROM_CORE:
            faults.append(f"{module.name}:{line} imports {name}; in core, time and chance come in from outside")
        if name.startswith("random.") and name != "random.Random":
            faults.append(f"{module.name}:{line} imports {name}; core has its own seeded random.Random")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and dotted(node.value) == "random" and node.attr != "Random":
            faults.append(f"{module.name}:{node.lineno} uses random.{node.attr}; core has its own seeded random.Random")
    return faults


def executions(module: Module) -> list[str]:
    """Ways to run code that was read from somewhere."""
    faults = [
        f"{module.name}:{line} imports {name}; nothing that is read may execute code"
        for line, name in imports(module)
        if name.partition(".")[0] in BARRED_MODULES
    ]
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func)
        if called in BARRED_BUILTINS:
            faults.append(f"{module.name}:{node.lineno} calls {called}; nothing that is read may execute code")
        safe = any(k.arg == "weights_only" and getattr(k.value, "value", None) is True for k in node.keywords)
        if called == "torch.load" and not safe:
            faults.append(f"{module.name}:{node.lineno} calls torch.load without weights_only=True; use safetensors")
        if any(k.arg == "allow_pickle" and getattr(k.value, "value", True) is not False for k in node.keywords):
            faults.append(f"{module.name}:{node.lineno} passes allow_pickle; nothing that is read may execute code")
    return faults


def dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{dotted(value)}.{attr}"
    return ""


def test_packages_import_only_what_the_table_allows():
    assert [fault for module in modules() for fault in wall_breaches(module)] == []


def test_core_knows_no_clock_no_threads_and_no_chance_but_its_own():
    assert [fault for module in modules() for fault in impurities(module)] == []


def test_nothing_that_is_read_can_execute_code():
    assert [fault for module in modules() for fault in executions(module)] == []


def test_the_walk_sees_the_files_it_judges():
    assert {"config", "core", "core.types", "wire.rollouts"} <= known_names()


def test_sim_runtime_and_train_never_import_one_another():
    three = ("sim", "runtime", "train")
    assert not [(a, b) for a in three for b in three if a != b and under(b, ALLOWED[a])]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("sim.world", "import dora_rl.runtime"),
        ("train.loss", "from dora_rl.core import messages"),
        ("wire.weights", "from dora_rl import config"),
        ("core.policy", "def f():\n    from dora_rl.wire.rollouts import Prompt"),
        ("rl.rewards", "from ..core.messages import Event"),
        ("obs.metrics", "from dora_rl import *"),
        ("brandnew.thing", "x = 1"),
    ],
)
def test_a_planted_import_across_a_wall_is_found(name, source):
    (fault,) = wall_breaches(module(name, source))
    assert name in fault


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("train.loss", "from dora_rl.core.types import Version\nfrom ..wire import rollouts\nimport torch"),
        ("rl.rewards", "from dora_rl.wire.rollouts import Prompt"),
        ("cli", "from dora_rl.runtime import driver\nfrom dora_rl.train import trainer"),
        ("core.state", "from .types import Version\nfrom random import Random"),
    ],
)
def test_an_allowed_import_is_left_alone(name, source):
    assert wall_breaches(module(name, source)) == impurities(module(name, source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from datetime import datetime",
        "import os.path",
        "import random\nx = random.random()",
        "from random import shuffle",
        "def f():\n    import asyncio",
    ],
)
def test_planted_time_or_chance_in_core_is_found_and_allowed_elsewhere(source):
    assert len(impurities(module("core.policy", source))) == 1
    assert impurities(module("runtime.driver", source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "eval('1')",
        "exec(text)",
        "numpy.load('x', allow_pickle=True)",
    ],
)
def test_planted_execution_of_what_was_read_is_found(source):
    assert len(executions(module("train.checkpoint", source))) == 1
