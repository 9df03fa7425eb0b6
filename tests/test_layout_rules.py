"""Rules about the tree: which package may import which, what an import costs, and that it survives broken packages."""

import ast
import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRAINER = ("recipe", "recipe_yaml", "sections", "engines", "cli", "launch", "train", "checkpoint", "export")
# folder or file -> what its imports must not begin with
FORBIDDEN = {
    "ops": ("nnscaler", "transformers", "mtraining_nns.hf", "mtraining_nns.eval"),
    "mtraining_nns/hf.py": ("nnscaler", "mtraining_nns.eval"),
    "eval": ("nnscaler",),
}


def sources(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.suffix else sorted(path.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, `from a import b` as a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("place", FORBIDDEN)
def test_imports_go_one_way(place):
    forbidden = FORBIDDEN[place] + tuple(f"mtraining_nns.{name}" for name in TRAINER)
    if place == "ops":
        forbidden += ("mtraining_nns.data", "mtraining_nns.loss", "mtraining_nns.model")
    wrong = [(str(f), name) for f in sources(place) for name in imports(f) if any(within(name, p) for p in forbidden)]
    assert not wrong


def test_only_tests_use_the_reference():
    places = ("ops", "eval", "mtraining_nns")
    assert not [str(f) for p in places for f in sources(p) if "mtraining_nns.ops.reference" in imports(f)]


def test_ops_and_eval_are_imported_by_their_installed_names_only():
    places = ("ops", "eval", "mtraining_nns", "tests")
    wrong = [
        (str(f), n) for p in places for f in sources(p) for n in imports(f) if within(n, "ops") or within(n, "eval")
    ]
    assert not wrong


def test_every_package_is_declared():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    declared = set(config["options"]["packages"].split())
    folders = {
        str(f.parent.relative_to(ROOT)).replace("/", ".") for p in ("ops", "eval", "mtraining_nns") for f in sources(p)
    }
    assert declared == {f if f.startswith("mtraining_nns") else f"mtraining_nns.{f}" for f in folders}


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_the_recipe_and_the_command_line_load_no_torch():
    code = """
import sys
import mtraining_nns, mtraining_nns.recipe, mtraining_nns.launch, mtraining_nns.cli
try:
    mtraining_nns.cli.main(["--help"])
except SystemExit:
    pass
print("loaded:", [name for name in ("torch", "transformers", "nnscaler") if name in sys.modules])
"""
    assert "loaded: []" in python(code)


def test_a_broken_optional_package_is_reported_and_breaks_nothing(tmp_path, monkeypatch):
    """FA4 beside a wrong nvidia-cutlass-dsl raises AttributeError at import, not ImportError."""
    broken = tmp_path / "flash_attn"
    broken.mkdir()
    (broken / "__init__.py").write_text("")
    (broken / "cute.py").write_text("raise AttributeError('module cutlass has no attribute lost')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    code = """
import mtraining_nns.hf, mtraining_nns.ops.attention
from mtraining_nns.doctor import decisions, probe
print(probe("flash_attn.cute", "flash-attn-4", "kernels"))
print(dict(decisions())["attention.backend"])
"""
    printed = python(code)
    assert "not usable: AttributeError: module cutlass has no attribute lost" in printed
    assert "auto -> t" in printed  # torch or triton
