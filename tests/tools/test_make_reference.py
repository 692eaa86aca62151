"""docs/reference.md is what the docstrings say."""

from tools import make_reference


def test_the_page_is_up_to_date():
    assert make_reference.main(["--check"]) == 0, "run python -m tools.make_reference"


def test_another_docstring_is_found(monkeypatch):
    monkeypatch.setattr(make_reference.shardcore.no_sync, "__doc__", "Do something else.")
    assert make_reference.main(["--check"]) == 1
