"""The site: `python .github/site/build.py [FOLDER]`. READMEs as pages, the public interface by pdoc.

Every README with examples is a notebook too, beside its page.
A link to no file, a name `mj.x` that does not exist and any warning end it.
"""

import doctest
import importlib
import json
import os.path
import re
import shutil
import sys
import warnings
from pathlib import Path
from types import ModuleType

from pdoc import doc, render
from pdoc.render_helpers import to_html

import moment_jax as mj

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GUIDES = {
    "Start": "README.md",
    "Your trained model": "moment_jax/inference/README.md",
    "A table": "experiments/uci/README.md",
    "Training from scratch": "moment_jax/nn/README.md",
    "Noise that you know": "experiments/rounding/README.md",
    "Second order": "moment_jax/optim/README.md",
    "Which structure when": "moment_jax/covariance/README.md",
    "Your own layer": "moment_jax/layers/README.md",
    "Any JAX function": "moment_jax/propagation/README.md",
    "Many devices": "moment_jax/parallel/README.md",
    "The derivation, step by step": "moment_jax/reference/README.md",
    "Assumptions, formulas": "moment_jax/README.md",
    "All figures": "experiments/README.md",
    "Changes": ".github/CHANGELOG.md",
    "Contributing": ".github/CONTRIBUTING.md",
}
LINK = re.compile(r'(?<= )(href|src)="(?!https?:|#)([^"#]*)')
NAME = re.compile(r"<code>(mj(?:\.\w+)+)((?:\(.*?\))?)</code>(?!</a>)")
LOCAL = re.compile(r"!?\[([^\]]*)\]\((?!https?:)[^)]*\)")
FENCES = re.compile(r"\A\s*```\n|```python\n\Z")
OWN = re.compile(r'<a href="#([\w.]+)">(\w+)</a>')
PAGE = """{% extends "frame.html.jinja2" %}{% block title %}{{ title }} - moment_jax{% endblock %}
{% block nav %}<h2>This page</h2>{{ contents | safe }}
{% if notebook %}<p><a href="{{ notebook }}" download>As a notebook</a></p>{% endif %}{% endblock %}
{% block content %}<main class="pdoc"><section class="module-info"><div class="docstring">
{{ text | safe }}</div></section></main>{% endblock %}"""


def build(out: Path) -> None:
    """Write all pages below `out`, whose old content goes."""
    shutil.rmtree(out, ignore_errors=True)
    render.configure(docformat="google", template_directory=HERE)
    guides = [(title, place(ROOT / name)) for title, name in GUIDES.items()]
    guides.append(("Interface: mj", "moment_jax.html"))
    render.env.globals |= {"version": mj.__version__, "guides": guides}
    modules = interface()
    known = addresses(modules)
    for name, module in modules.items():
        page = f"{name.replace('.', '/')}.html"
        render.env.globals["top"] = "../" * page.count("/")
        html = render.html_module(module, modules)
        write(out / page, with_names(without_lost(html), page, known))
    write(out / "search.js", render.search_index(modules))
    waiting = [ROOT / "README.md", *(ROOT / ".github").glob("*.md")]
    waiting += [p for room in ("moment_jax", "experiments") for p in (ROOT / room).rglob("*.md")]
    done: set[Path] = set()
    while waiting:  # READMEs, and the files that they link to
        path = waiting.pop()
        if path not in done:
            done.add(path)
            waiting += file(path, out, known)


def file(path: Path, out: Path, known: dict[str, str]) -> list[Path]:
    """Write the page of a README or a module, or copy a picture; the files that it links to."""
    page = place(path)
    if path.suffix == ".png":
        (out / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, out / page)
        return []
    text = path.read_text()
    if path.suffix == ".py":
        text = f"# {path.name}\n\n```python\n{text}\n```"
    body = to_html(text)
    html, linked = with_links(str(body), path)
    html = with_names(html, page, known, gone=path.name == "CHANGELOG.md")
    render.env.globals["top"] = "../" * page.count("/")
    shown = {"title": text.partition("\n")[0].lstrip("# "), "contents": body.toc_html or ""}
    if path.suffix == ".md" and "\n>>> " in text:
        own = (out / page).with_suffix(".ipynb")
        write(own, notebook(text))
        shown["notebook"] = own.name
    write(out / page, render.env.from_string(PAGE).render(text=html, **shown))
    return linked


def notebook(text: str) -> str:
    """A README's text and examples as a Jupyter notebook; a cell ends where something is shown."""
    cells: list[dict[str, object]] = []
    shown = True
    for piece in doctest.DocTestParser().parse(text):
        if isinstance(piece, doctest.Example):
            if shown:
                code = {"cell_type": "code", "execution_count": None, "outputs": [], "metadata": {}}
                cells.append(code | {"source": ""})
            cells[-1]["source"] = f"{cells[-1]['source']}\n{piece.source}".strip()
            shown = bool(piece.want)
        elif prose := FENCES.sub("", LOCAL.sub(r"\1", piece)).strip():  # without the site's links
            cells.append({"cell_type": "markdown", "metadata": {}, "source": prose})
            shown = True
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    content = {"metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(content | {"cells": cells}, indent=1)


def place(path: Path) -> str:
    """Where a file of the repository stands in the site, whose publisher drops `.github`."""
    name = path.relative_to(ROOT).as_posix().replace(".github/", "about/")
    return "index.html" if name == "README.md" else re.sub(r"\.(md|py)$", ".html", name)


def interface() -> dict[str, doc.Module]:
    """The modules that have public names."""
    rooms = [name for name in mj.__all__ if isinstance(getattr(mj, name), ModuleType)]
    names = ["moment_jax", *(f"moment_jax.{room}" for room in rooms)]
    return {name: doc.Module(importlib.import_module(name)) for name in names}


def addresses(modules: dict[str, doc.Module]) -> dict[str, str]:
    """The address of every public name as users write it: `mj.nn.Encoder`, `mj.Bayesian.check`."""
    found = {}
    for module in modules.values():
        page, name = (
            f"{module.fullname.replace('.', '/')}.html",
            module.fullname[len("moment_jax") :],
        )
        found[f"mj{name}"] = page
        for member in module.members.values():
            own = member.members.values() if isinstance(member, doc.Class) else ()
            for each in (member, *own):
                found[f"mj{name}.{each.qualname}"] = f"{page}#{each.qualname}"
    return found


def without_lost(html: str) -> str:
    """Without pdoc's links to methods of private base classes, which have no place in the page."""
    return OWN.sub(lambda link: link.group(0 if f'id="{link[1]}"' in html else 2), html)


def with_names(html: str, page: str, known: dict[str, str], gone: bool = False) -> str:
    """Links for the names `mj.x` in a page."""

    def linked(match: re.Match[str]) -> str:
        name, call = match.groups()
        if name not in known:
            if gone:
                return match.group()
            raise ValueError(f"{page} names {name}, which does not exist.")
        target = relative(known[name], page)
        return f'<a href="{target}"><code>{name}{call}</code></a>'

    return NAME.sub(linked, html)


def with_links(html: str, source: Path) -> tuple[str, list[Path]]:
    """A README's relative links as those of the site, and the files that they lead to."""
    found = []

    def moved(match: re.Match[str]) -> str:
        target = (source.parent / match.group(2)).resolve()
        if not target.is_file():
            raise ValueError(
                f"{source.relative_to(ROOT)} links to {match.group(2)}, which is no file."
            )
        found.append(target)
        return f'{match.group(1)}="{relative(place(target), place(source))}'

    return LINK.sub(moved, html), found


def relative(target: str, page: str) -> str:
    """The link from one page to another, both from the top."""
    return os.path.relpath(target, os.path.dirname(page) or ".")


def write(path: Path, text: str) -> None:
    """Write a file below folders that may not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    warnings.simplefilter("error")
    # pdoc cannot resolve the fields of a NamedTuple in a module whose annotations are strings.
    warnings.filterwarnings("ignore", "Error parsing type annotation ForwardRef")
    build(Path(sys.argv[1] if len(sys.argv) > 1 else "build/site").resolve())
