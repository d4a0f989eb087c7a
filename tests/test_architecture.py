"""Who may import whom, which framework has which door, how long a file may be."""

import ast
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "ssgrpo_lightning"
FILES = sorted(PACKAGE.rglob("*.py"))
# A module may import modules of lower layers, and within its own package.
LAYERS = [
    {"problems", "records", "functional", "sandbox", "extraction", "sharding"},
    {
        "layout",
        "lora",
        "schedules",
        "policy_settings",
        "saved_weights",
        "checkpoints",
        "metrics_file",
    },
    {
        "tasks",
        "verifiers",
        "segmenters",
        "policy",
        "losses",
        "metrics",
        "interventions",
        "leaks",
        "advantages",
        "shaping",
        "curriculum",
        "temperature",
    },
    {"engines", "objectives", "references", "model_card", "judge", "outcome_rewards"},
    {"credit", "rollouts"},
    {"estimators", "controls", "stored", "policy_module", "gating"},
    {"data", "export"},
    {"baselines", "monte_carlo", "process_rewards", "critic"},
    {"estimator_module"},
    {"parallel"},
    {"reporting", "probing", "evaluation", "settings", "collection", "run_state", "faults"},
    {"alternation", "tiny_policy", "tiny_prm"},
    {"report", "plan"},
    {"callbacks", "trainer"},
    {"cli"},
    {"bench"},
]
DOORS = {
    "transformers": {
        "layout",
        "policy",
        "engines",
        "process_rewards",
        "outcome_rewards",
        "tiny_policy",
        "tiny_prm",
        "plan",
    },
    "peft": {"lora"},
    "tokenizers": {"tiny_policy"},
    "lightning": {
        "data",
        "policy_module",
        "schedules",
        "checkpoints",
        "metrics_file",
        "estimator_module",
        "alternation",
        "evaluation",
        "parallel",
        "reporting",
        "collection",
        "callbacks",
        "plan",
        "trainer",
        "cli",
        "bench",
    },
    "wandb": {"callbacks"},
    "wandb_workspaces": {"callbacks"},
    "datasets": {"tasks", "bench"},
    "trl": {"bench"},
    "torchmetrics": {"metrics", "tiny_prm"},
    "vllm": {"engines"},
}


def name_of(path) -> str:
    """First part of a module's name below the package: what the layers are made of."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path) -> set[str]:
    found, tree = set(), ast.parse(path.read_text())
    for node in list(ast.walk(tree)):  # names that only a type checker needs are no dependency
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    own = name_of(path)
    if own == "__init__":
        assert not imports(path)
        return
    layer = next(i for i, names in enumerate(LAYERS) if own in names)
    allowed = (
        set().union(*LAYERS[:layer])
        | {own}
        | (LAYERS[layer] if own in ("functional", "records", "parallel") else set())
    )
    for imported in imports(path):
        parts = imported.split(".")
        if parts[0] == "ssgrpo_lightning":
            assert len(parts) > 1 and parts[1] in allowed, f"{own} must not import {imported}"
        elif parts[0] in DOORS:
            assert own in DOORS[parts[0]], f"{own} is no door to {parts[0]}"
        assert parts[0] not in ("tests", "train")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_stay_short_and_well_named(path):
    text = path.read_text()
    assert text.count("\n") <= 350
    assert path.stem not in {"utils", "common", "base", "core", "helpers", "misc"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 80, f"{node.name} is long"


def test_the_maths_loads_neither_lightning_nor_transformers():
    code = (
        "import sys, ssgrpo_lightning.functional\n"
        "print([m for m in ('lightning', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_the_top_level_is_exactly_what_was_agreed():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split()
    top = {name.split("/")[0] for name in tracked}
    assert {t for t in top if not t.startswith(".")} == {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "ssgrpo_lightning",
        "configs",
        "tests",
        "train.py",
    }


def test_the_file_map_of_the_readme_is_the_tree():
    readme = (REPOSITORY / "README.md").read_text()
    block = readme.split("<!-- file map -->")[1].split("```")[1]
    mapped = {line.split()[0].rstrip("/") for line in block.splitlines()[2:] if line.strip()}
    present = {p.relative_to(PACKAGE).as_posix() for p in FILES if p.name != "__init__.py"}
    present = {p.removesuffix("/__main__.py") for p in present}
    assert mapped == present, mapped ^ present


def test_public_names_have_docstrings():
    for path in FILES:
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path}: {node.name}"
