"""The public names are those listed in `public_api.txt`, so none appears or disappears by accident."""

import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import moment_jax as mj

LISTED = Path(__file__).parent / "public_api.txt"
PACKAGE = Path(mj.__file__).parent


def public_names() -> list[str]:
    """Every public name of the library and of its public rooms, as users write it."""
    names = [f"mj.{name}" for name in mj.__all__]
    rooms = [name for name in mj.__all__ if isinstance(getattr(mj, name), ModuleType)]
    for room in rooms:
        module = importlib.import_module(f"moment_jax.{room}")
        names += [f"mj.{room}.{name}" for name in module.__all__]
    return sorted(names)


def test_the_public_names_are_those_listed():
    listed = LISTED.read_text().split()
    found = public_names()
    assert found == listed, {
        "new: add to tests/public_api.txt and .github/CHANGELOG.md": {*found} - {*listed},
        "gone: remove from it, and say so in .github/CHANGELOG.md": {*listed} - {*found},
    }


def test_every_public_name_exists():
    for name in LISTED.read_text().split():
        found = mj
        for part in name.split(".")[1:]:
            found = getattr(found, part)


def test_the_documents_are_of_this_version():
    readme, changes = (PACKAGE.parent / name for name in ("README.md", ".github/CHANGELOG.md"))
    assert f"moment_jax, version {mj.__version__}," in readme.read_text()
    assert changes.read_text().startswith(f"# Changelog\n\n## {mj.__version__} (")


def test_networks_show_their_arguments():
    for kind in (mj.Bayesian, mj.nn.Mixture, mj.nn.Encoder, mj.nn.VisionTransformer):
        assert inspect.signature(kind).parameters.keys() ^ {"self"} == (
            inspect.signature(kind.__init__).parameters.keys()
        )


def test_dir_shows_the_public_names_and_no_others():
    """Of the library and of its rooms that are folders; their modules are there too."""
    rooms = [getattr(mj, name) for name in mj.__all__ if hasattr(getattr(mj, name), "__path__")]
    for module in [mj, *rooms]:
        names = {name for name in dir(module) if not name.startswith("_")}
        modules = {path.stem for path in Path(module.__file__).parent.iterdir()}
        assert names - modules == {n for n in module.__all__ if n != "__version__"} - modules


# Rooms where a function still has the name of its module, and so hides it from `import room.name`.
HIDING = {"layers", "expectations", "optim"}


@pytest.mark.parametrize("room", sorted({p.parent.name for p in PACKAGE.glob("*/__init__.py")}))
def test_no_public_name_hides_its_module(room: str):
    module = importlib.import_module(f"moment_jax.{room}")
    files = {path.stem for path in (PACKAGE / room).glob("[!_]*.py")}
    names = ((file, getattr(module, file, room)) for file in files)
    hidden = {file for file, found in names if not isinstance(found, str | ModuleType)}
    assert not hidden or room in HIDING, hidden
