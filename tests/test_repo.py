# SPDX-License-Identifier: Apache-2.0
"""What holds for the repository as a whole: layering, names, data, file rules."""

import ast
import importlib.metadata
import importlib.resources
import inspect
import json
import pathlib
import re
import runpy
import subprocess
import sys
import tomllib

import pytest

import jax_ulysses
import jax_ulysses.models

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Source folder -> the installed package it becomes.
FOLDERS = {
    "jax_ulysses": "jax_ulysses",
    "ffi": "jax_ulysses.ffi",
    "pallas": "jax_ulysses.pallas",
    "models": "jax_ulysses.models",
}
# Installed package -> the packages of this project that it may import.
MAY_IMPORT = {
    "jax_ulysses.models": {"jax_ulysses"},
    "jax_ulysses": {"jax_ulysses.ffi", "jax_ulysses.pallas"},
    "jax_ulysses.ffi": set(),
    "jax_ulysses.pallas": set(),
}
# What the base install brings; everything else needs an extra.
BASE = {"jax", "jaxlib", "jaxtyping", "numpy"}
THIRD_PARTY = {
    "jax_ulysses": BASE,
    "jax_ulysses.ffi": BASE,
    "jax_ulysses.pallas": BASE,
    "jax_ulysses.models": BASE | {"flax", "matplotlib", "optax", "orbax", "rich"},
}


def package_of(module: str) -> str | None:
    """Returns which of the project's packages a module belongs to."""
    owners = [p for p in MAY_IMPORT if module == p or module.startswith(p + ".")]
    return max(owners, key=len, default=None)


def imported_modules(source: str, module: str, is_package: bool) -> set[str]:
    """Returns the absolute names of all modules that a source imports, anywhere."""
    base = module if is_package else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parent = base.split(".")[: len(base.split(".")) - node.level + 1]
                origin = ".".join([*parent, *filter(None, [origin])])
            found.add(origin)
            # `from jax_ulysses import ffi` imports a package, not a name.
            names = {f"{origin}.{alias.name}" for alias in node.names}
            found |= {name for name in names if name in MAY_IMPORT}
    return found


def forbidden_imports(source: str, module: str, is_package: bool) -> list[str]:
    """Returns a line for every import that breaks the layering."""
    own = package_of(module)
    problems = []
    for name in imported_modules(source, module, is_package):
        target = package_of(name)
        if target is None:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in THIRD_PARTY[own]:
                problems.append(f"{module} imports {name}, which {own} must not need")
        elif target != own and target not in MAY_IMPORT[own]:
            problems.append(f"{module} imports {name}: not from {own} to {target}")
    return problems


def sources():
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join([package, *(parts[:-1] if is_package else parts)])
            yield path, name, is_package


def test_dependencies_point_one_way():
    problems, count = [], 0
    for path, module, is_package in sources():
        problems += forbidden_imports(path.read_text(), module, is_package)
        count += 1
    assert not problems
    assert count > 20, "the folders were not found"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jax_ulysses.api", "from jax_ulysses import models"),
        ("jax_ulysses.api", "import jax_ulysses.models.attention"),
        ("jax_ulysses.api", "def f():\n  from .models import x"),
        ("jax_ulysses.api", "import flax"),
        ("jax_ulysses.ffi.targets", "from jax_ulysses.spec import TokenOrder"),
        ("jax_ulysses.ffi.targets", "from .. import spec"),
        ("jax_ulysses.ffi.targets", "import jax_ulysses.pallas"),
        ("jax_ulysses.models.data", "import jax_ulysses.ffi"),
        ("jax_ulysses.models.data", "import torch"),
    ],
)
def test_layering_check_sees_violations(module, source):
    assert forbidden_imports(source, module, is_package=False)


def test_base_import_needs_no_extra():
    """`import jax_ulysses` must work where only the base install is."""
    extras = sorted(THIRD_PARTY["jax_ulysses.models"] - BASE)
    code = f"import sys\nfor name in {extras}: sys.modules[name] = None\n"
    code += "import jax_ulysses, jax_ulysses.ffi, jax_ulysses.__main__"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_file_rules():
    result = subprocess.run(
        [sys.executable, ROOT / "tools" / "check_files.py"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_file_rules_see_violations():
    tool = runpy.run_path(str(ROOT / "tools" / "check_files.py"))
    problems_of, path = tool["problems_of"], pathlib.Path("jax_ulysses/new.py")
    header = "# SPDX-License-Identifier: Apache-2.0\n"
    assert problems_of(path, header + "x = 1\n") == []
    assert problems_of(path, "x = 1\n")
    assert problems_of(path, header + "x = 1\n" * 250)
    assert problems_of(path, header + "x = 1\n" * 400)
    assert problems_of(path, header + 'x = "/' + 'root/x"\n')
    assert problems_of(pathlib.Path("a.md"), "see /" + "work/notes.txt")


def public_names(package) -> list[str]:
    """Returns what a package exports: __all__, or its `import x as x` names."""
    if hasattr(package, "__all__"):
        return list(package.__all__)
    tree = ast.parse(inspect.getsource(package))
    return [
        alias.asname
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    ]


@pytest.mark.parametrize(
    ("package", "page"),
    [(jax_ulysses, "operators.md"), (jax_ulysses.models, "models.md")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_public_names_are_documented(package, page):
    names = public_names(package)
    assert len(names) >= 7
    text = (ROOT / "docs" / page).read_text()
    documented = re.findall(r"^\.\. auto(?:function|class|data):: (\S+)", text, re.M)
    assert [n for n in names if n not in documented] == []
    for name in names:
        value = getattr(package, name)
        if callable(value):
            assert inspect.getdoc(value), name


def test_version_is_the_same_everywhere():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    version = config["project"]["version"]
    assert importlib.metadata.version("jax-ulysses") == version
    assert jax_ulysses.__version__ == version


def test_requirements_tool_reads_every_extra():
    tool = runpy.run_path(str(ROOT / "tools" / "requirements.py"))
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = config["project"]["optional-dependencies"]
    everything = tool["expand"](list(extras), config)
    assert not any("jax-ulysses" in requirement for requirement in everything)
    assert "pytest" in {
        tool["distribution"](r) for r in tool["expand"](["dev"], config)
    }
    with pytest.raises(SystemExit, match="no extra named 'nothing'"):
        tool["expand"](["nothing"], config)


def test_ci_and_readme_use_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    assert {"demo", "test", "lint", "docs", "test-latest"} <= targets
    for name in (".ci/run", "README.md", "CONTRIBUTING.md", "docs/quickstart.md"):
        text = (ROOT / name).read_text()
        used = set(
            re.findall(r"^\s*(?:timeout \d+ )?make ([a-z-]+)", text, re.MULTILINE)
        )
        used |= set(re.findall(r"`make ([a-z-]+)", text))
        assert used
        assert used <= targets, name


def test_shapes():
    """The geometries are whole: benchmarks, presets and the doctor read them."""
    file = importlib.resources.files("jax_ulysses") / "data" / "shapes.json"
    shapes = json.loads(file.read_text())
    installed, source = json.dumps(shapes), ROOT / "jax_ulysses/data/shapes.json"
    assert installed == json.dumps(json.loads(source.read_text()))
    assert len(shapes["geometries"]) >= 8
    for name, geometry in shapes["geometries"].items():
        assert re.fullmatch(r"[a-z0-9_]+", name)
        assert set(geometry) == {"heads", "kv_heads", "head_dim", "d_model"}, name
        assert all(isinstance(v, int) and v > 0 for v in geometry.values()), name
        assert geometry["heads"] % geometry["kv_heads"] == 0, name
        assert geometry["head_dim"] in {64, 80, 96, 128, 192, 256}, name
    assert shapes["sequences"] == sorted(shapes["sequences"])
    for length in shapes["sequences"]:
        assert all(length % (2 * ranks) == 0 for ranks in shapes["cp_sizes"])
