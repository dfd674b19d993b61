"""Architecture: rooms import only rooms below them, few know Flax, and experiments use public names."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BASE = {"xla", "linalg", "covariance"}
MOMENTS = {"covariance", "posterior", "propagation", "objectives"}
MAY_IMPORT = {
    "xla": set(),
    "progress": set(),
    "linalg": {"xla"},
    "covariance": {"xla", "linalg"},
    "expectations": BASE,
    "posterior": BASE,
    "brownian": BASE,
    "layers": {"xla", "covariance", "expectations", "posterior"},
    "propagation": BASE | {"expectations", "posterior", "layers"},
    "objectives": BASE | {"expectations", "posterior"},
    "reference": BASE | {"posterior", "layers", "propagation", "objectives"},
    "discrete": {"covariance"},
    "decoding": {"covariance", "objectives", "discrete"},
    "nn": MOMENTS | {"xla", "expectations", "layers", "progress"},
    # optim takes a Bayesian of nn at its means, so it stands above nn.
    "optim": {"xla", "linalg", "posterior", "layers", "nn"},
    "parallel": {"covariance"},
    "inference": MOMENTS | {"nn", "optim", "progress"},
}
KNOW_FLAX = {"nn", "optim", "parallel", "inference"}


def imported(path: Path) -> set[str]:
    """Names of all modules that a file imports, inside functions and for type checkers too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (path, "a relative import")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names.add(ast.unparse(node.args[0]).lstrip("f").strip("'\""))
    return names


def files_of(room: str) -> list[Path]:
    """A room is a folder or one file."""
    folder = ROOT / "moment_jax" / room
    return [path for path in (folder.with_suffix(".py"), *folder.rglob("*.py")) if path.exists()]


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_only_what_lies_below(room: str):
    assert files_of(room)
    for path in files_of(room):
        names = imported(path)
        assert not {"moment_jax"} & names, (path, "a circle through the top")
        rooms = {name.split(".")[1] for name in names if name.startswith("moment_jax.")}
        assert rooms - {room} <= MAY_IMPORT[room], path
        assert room in KNOW_FLAX or not any(name.split(".")[0] == "flax" for name in names), path


def test_rooms_form_no_circle():
    order = graphlib.TopologicalSorter(MAY_IMPORT)
    assert set(order.static_order()) == set(MAY_IMPORT)


def test_files_form_no_circle():
    """Inside a room either, nor by an import inside a function."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "moment_jax").rglob("*.py")
    }
    graph = {
        name: {n if n in modules else n.rpartition(".")[0] for n in imported(path)} & modules.keys()
        for name, path in modules.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_every_room_is_listed():
    folder = ROOT / "moment_jax"
    rooms = {path.parent.name for path in folder.glob("*/__init__.py")}
    rooms |= {path.stem for path in folder.glob("*.py") if path.stem != "__init__"}
    assert rooms == set(MAY_IMPORT)


def test_experiments_use_the_public_interface():
    for path in (ROOT / "experiments").rglob("*.py"):
        deep = [name for name in imported(path) if name.startswith("moment_jax.")]
        assert not deep, (path, deep)
