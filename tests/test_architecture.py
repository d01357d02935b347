"""The plan of the house as tests: layers, limits, light imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "treadle"
FILES = sorted(PACKAGE.rglob("*.py"))
LAYERS: list[set[str]] = [
    {"types", "batch", "handles", "errors", "metrics"},
    {"config"},
    {"algorithms", "rewards", "environments", "data", "weights", "attention", "native"},
    {"controller", "engines", "rollout", "runs", "contract"},
    {"workers", "agents"},
    {"recipes"},
    {"runtime", "inspector"},
    {"cli"},
    {"__main__"},
]
LAYER = {unit: depth for depth, units in enumerate(LAYERS) for unit in units}
HEAVY = {"torch", "transformers", "ray", "vllm", "pyarrow", "matplotlib", "pandas", "math_verify", "reasoning_gym"}
HEAVY |= {"tensorboard", "wandb", "mlflow", "datasets"}


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Every module of ours that a file imports, wherever in the file it does so."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "treadle")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module is not None and node.module.split(".")[0] == "treadle":
                yield node.module


def unit(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_only_from_lower_layers(path: Path) -> None:
    own = unit(module_name(path))
    if own is None:  # treadle/__init__.py re-exports lazily, from anywhere
        return
    for imported in imports(path):
        other = unit(imported)
        assert other is not None, f"{path}: import from the unit that defines a name, not from `treadle`"
        allowed = own == other or LAYER[other] < LAYER[own] or LAYER[own] == 0 == LAYER[other]
        assert allowed, f"{module_name(path)} (layer {LAYER[own]}) may not import {imported} (layer {LAYER[other]})"


def test_every_unit_has_a_layer() -> None:
    assert {u for p in FILES if (u := unit(module_name(p)))} <= set(LAYER)


def test_no_import_cycles() -> None:
    graph = {module_name(p): {i for i in imports(p) if not type_checking_only(p, i)} for p in FILES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"import cycle: {' → '.join((*path[path.index(module) :], module))}"
        if module in done:
            return
        for imported in graph.get(module, ()):
            visit(imported, (*path, module))
        done.add(module)

    for module in graph:
        visit(module, ())


def type_checking_only(path: Path, imported: str) -> bool:
    """Whether every import of that module in the file stands under `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text())
    guarded = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    inside = sum(
        isinstance(n, ast.ImportFrom) and n.module == imported for g in guarded for b in g.body for n in ast.walk(b)
    )
    total = sum(isinstance(n, ast.ImportFrom) and n.module == imported for n in ast.walk(tree))
    return inside == total


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_files_and_functions_are_short(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= 600, f"{path} has more than 600 lines"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= 80, f"{path}:{node.lineno} {node.name} has {length} lines"


@pytest.mark.parametrize("path", [p for p in FILES if p.name == "__init__.py"], ids=module_name)
def test_init_files_only_reexport(path: Path) -> None:
    if path.parent == PACKAGE:
        return  # lazy re-exports: covered by the import test below
    for node in ast.parse(path.read_text()).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        exports = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        assert docstring or exports or isinstance(node, ast.ImportFrom), f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_environment_is_read_in_one_place(path: Path) -> None:
    if path == PACKAGE / "config" / "environment.py":
        return
    for reads in ("os.environ", "getenv"):
        assert reads not in path.read_text(), f"{path} reads the environment"


def config_modules() -> list[str]:
    """Modules that define a configuration model, and all that `import treadle` and the command line need."""
    names = ["treadle", "treadle.cli"]
    for path in FILES:
        classes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef)]
        if any(ast.unparse(base).endswith("Config") for c in classes for base in c.bases):
            names.append(module_name(path))
    return names


def test_configuration_imports_nothing_heavy() -> None:
    """`treadle --help` and a config error must answer at once."""
    program = (
        "import importlib, sys\n"
        f"for name in {config_modules()!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = {HEAVY!r} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_loops_and_engines_know_no_algorithm_by_name() -> None:
    """Outside its folder an algorithm is a name in a configuration's default, never in an expression."""
    names = {p.stem for p in (PACKAGE / "algorithms").glob("[a-z]*.py")} - {"base", "critic", "clip", "metrics", "gae"}
    names |= {"GRPO", "PPO", "ReMax", "Critic"}
    allowed = {("recipes.config", "grpo")}  # the default
    for path in FILES:
        inside = module_name(path).removeprefix("treadle.")
        if unit(module_name(path)) in {"recipes", "engines", "rollout", "workers", "controller", "runs", "runtime"}:
            for node in ast.walk(ast.parse(path.read_text())):
                found = (
                    node.value if isinstance(node, ast.Constant) else getattr(node, "id", getattr(node, "attr", None))
                )
                if found in names - {"aggregate", "advantages", "ratio", "kl", "correction", "importance", "clipping"}:
                    assert (inside, found) in allowed, f"{inside} knows {found!r}"
