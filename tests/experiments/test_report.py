"""The page of all runs."""

import json

import pytest

pytest.importorskip("tqdm")

from experiments.__main__ import main


def test_a_page_has_all_runs_with_tables_and_figures(tmp_path, capsys):
    run = tmp_path / "digits" / "first"
    run.mkdir(parents=True)
    (run / "shifts.png").write_bytes(b"")
    metrics = {
        "settings": {"seed": 0, "structure": "Separable"},
        "methods": {
            "plain": {"nll": {"mean": 0.25, "error": 0.01}, "all": list(range(100))},
            "Bayesian": {"nll": {"mean": 0.125, "error": None}, "seconds": 2.0},
        },
    }
    (run / "metrics.json").write_text(json.dumps(metrics))
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.md").read_text()
    for line in (
        "## digits/first",
        "![shifts](digits/first/shifts.png)",
        "- structure: Separable",
        "| | nll | seconds |",
        "| plain | 0.25 ± 0.01 |  |",
        "| Bayesian | 0.125 | 2 |",
    ):
        assert line in page.splitlines()


def test_bad_folders_and_files_are_told(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    (tmp_path / "metrics.json").write_text("{")
    assert main(["report", str(tmp_path)]) == 2
    (tmp_path / "metrics.json").write_text("[]")
    assert main(["report", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [word in line for word, line in zip(("no metrics", "read", "list"), lines, strict=True)]
    assert not (tmp_path / "report.md").exists()
