"""The site: built by its one command, every link leads somewhere, notebooks run, and it opens."""

import json
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
IMPORTING = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
GUIDES = [f"experiments/{room}/README" for room in ("uci", "rounding")]
BROWSERS = "chromium", "chromium-browser", "google-chrome"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("pdoc", reason="the site needs pip install 'moment_jax[docs]'")
    out = tmp_path_factory.mktemp("site").resolve()
    command = [sys.executable, ROOT / ".github" / "site" / "build.py", out]
    told = subprocess.run(command, capture_output=True, text=True, env=IMPORTING)
    assert (told.returncode, told.stderr) == (0, "")
    return out


class Page(HTMLParser):
    """The links of a page, and the names that links may lead to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links, self.names = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.names.add(found.get("id"))
        self.links += [found[key] for key in ("href", "src") if found.get(key)]


def test_every_link_leads_to_a_page_and_a_place_in_it(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    lost = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "data"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            if not target.is_file() or (place and place not in pages[target].names):
                lost.append((path.relative_to(site).as_posix(), link))
    assert not lost
    assert site / "moment_jax" / "nn.html" in pages


def test_notebooks_are_the_guides_examples_in_order(site):
    found = {path.relative_to(site).as_posix(): path for path in site.rglob("*.ipynb")}
    assert found.keys() > {f"{name}.ipynb" for name in ("index", *GUIDES)}
    for name, path in found.items():
        cells = json.loads(path.read_text())["cells"]
        assert not any("```python" in c["source"] or ">>> " in c["source"] for c in cells), name
        code = [c["source"] for c in cells if c["cell_type"] == "code"]
        compile("\n".join(code), name, "exec")
        if name.startswith("moment_jax/brownian"):  # the quickest; as doctests all of them are run
            command = [sys.executable, "-c", "\n".join(code)]
            said = subprocess.run(command, capture_output=True, text=True, env=IMPORTING)
            assert said.stdout.startswith("1.0 6.0"), said.stderr


def test_a_browser_shows_the_first_page(site, tmp_path):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser is installed: {', '.join(BROWSERS)}")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    picture = tmp_path / "first.png"
    page = (site / "index.html").as_uri()
    subprocess.run([browser, *options, f"--screenshot={picture}", page], check=True, timeout=120)
    assert picture.stat().st_size > 20_000  # an empty page has a tenth of that
