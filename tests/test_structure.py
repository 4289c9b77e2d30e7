"""The house: which room imports from which, how large modules are, where private JAX is used."""

import ast
import pathlib
import statistics

import pytest

ROOT = pathlib.Path(__file__).parent.parent / "meshpar"
MODULES = {p: ast.parse(p.read_text()) for p in sorted(ROOT.rglob("*.py"))}
FLOORS = [  # a room may import from those before it, and from its own
    {"_jax", "errors", "grid_html", "host_devices", "store", "tell_all", "xla_flags"},
    {"mesh"},
    {"placements"},
    {"rules"},
    {"compiler"},
    {"collectives", "schedules"},
    {"models"},
    {"training"},
    {"launch"},
    {"examples"},
]
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}


def room(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node, node.module
        elif isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)


def test_every_room_has_a_floor():
    assert {room(p) for p in MODULES} - {"__init__"} == set(FLOOR)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    if room(path) == "__init__":
        return
    for _, module in imported(MODULES[path]):
        parts = module.split(".")
        if parts[0] == "meshpar" and len(parts) > 1:
            assert FLOOR[parts[1]] <= FLOOR[room(path)], f"{path.name} imports {module}"
            if FLOOR[parts[1]] == FLOOR[room(path)]:
                assert parts[1] == room(path) or FLOOR[room(path)] == 0


def test_no_import_is_late():
    late = [
        f"{path.relative_to(ROOT)}:{inner.lineno}"
        for path, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for inner in ast.walk(node)
        if isinstance(inner, (ast.Import, ast.ImportFrom))
        and not any(name in ast.unparse(inner) for name in ("matplotlib", "libtpu"))
    ]
    assert not late


def test_private_jax_lives_in_one_module():
    for path, tree in MODULES.items():
        for _, module in imported(tree):
            assert not module.startswith("jax._src") or path.name == "_jax.py", path


def test_flax_and_optax_are_loaded_by_training_only():
    for path, tree in MODULES.items():
        for _, module in imported(tree):
            if module.split(".")[0] in ("flax", "optax", "orbax"):
                assert room(path) in ("training", "models", "examples"), path


def test_modules_and_functions_are_of_readable_size():
    lengths = {p: p.read_text().count("\n") for p in MODULES}
    assert statistics.median(lengths.values()) <= 150
    assert {p.name: n for p, n in lengths.items() if n > 500} == {}
    long = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and _code_lines(node) > 60
    ]
    assert long == []


def _code_lines(node):
    """The lines of a function without its docstring."""
    first = node.body[0]
    is_doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    doc = (
        (first.end_lineno - first.lineno + 1)
        if is_doc and isinstance(first.value.value, str)
        else 0
    )
    return node.end_lineno - node.lineno + 1 - doc


def test_no_state_is_global():
    for path, tree in MODULES.items():
        assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), path
