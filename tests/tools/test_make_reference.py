"""docs/reference.md is what the docstrings say."""

from tools import make_reference


def test_the_page_is_up_to_date():
    assert make_reference.main(["--check"]) == 0, "run python -m tools.make_reference"


def test_another_docstring_is_found(monkeypatch):
    monkeypatch.setattr(make_reference.shardcore.no_sync, "__doc__", "Do something else.")
    assert make_reference.main(["--check"]) == 1


def test_an_example_and_a_list_inside_an_argument_become_markdown():
    def function(value):
        """Return the value.

        Example:
            if value:
                function(value)

        Args:
            value: One of these:
                - 1: the first number
                  of all.
                - 2: the second.
            other: Ignored.

        Afterwards:

        - nothing
        - changes
        """

    assert make_reference._text(function) == (
        "Return the value.\n\n"
        "**Example:**\n\n```python\nif value:\n    function(value)\n```\n\n"
        "**Args:**\n\n"
        "- `value`: One of these:\n    - 1: the first number\n      of all.\n    - 2: the second.\n"
        "- `other`: Ignored.\n\n"
        "Afterwards:\n\n- nothing\n- changes\n"
    )
