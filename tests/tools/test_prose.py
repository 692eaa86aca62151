"""Rates of stiff words: which texts count as a page's and as a message's, and what is refused."""

from pathlib import Path

import pytest

from tools import prose

PAGE = """# A page

Rank 0 sends its weights to all other ranks, which wait. Short.

```python
what = "that which lies in code"
```

| what | that |
|:--|---|
| Which of all ranks waits | Rank 1 waits. Rank 0 ``|, ` `` has no ranks |

- `what` is code, and [this](what.md#that) a link.
"""
SOURCE = '''
"""What a docstring says is no message."""
raise ValueError(f"shard: stage has {stage!r}; expected one of those, such as 0")
logger.warning("%s has no effect, where offload is None", name)
print("what is printed is no message of these")
'''


def test_a_page_is_its_sentences_with_its_cells_without_code_and_links() -> None:
    found = prose.split(prose.prose_of(PAGE))
    assert found == [
        "Rank 0 sends its weights to all other ranks, which wait.",
        "Which of all ranks waits",
        "Rank 0 X has no ranks",
        "- X is code, and [this] a link.",
    ]


def test_messages_are_raised_or_logged() -> None:
    assert list(prose.messages_of(SOURCE)) == [
        "shard: stage has X; expected one of those, such as 0",
        "X has no effect, where offload is None",
    ]


def test_words_are_counted_once_each() -> None:
    sentence = prose.Sentence("messages", "file.py", "X has what that thing, whatever it HAS")
    assert (sentence.stiff, sentence.words) == (5, 8)


def test_a_rate_and_a_sentence_above_their_limits_are_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "shardcore").mkdir()
    page = tmp_path / "README.md"
    page.write_text("Rank 0 sends its weights to all other ranks.")
    read = prose.sentences
    monkeypatch.setattr(prose, "sentences", lambda: read(tmp_path))
    assert prose.main(["--check"]) == 0
    page.write_text("Rank 0 sends that which it has.")
    assert prose.main(["--check"]) == 1
    assert "pages: 428.6 stiff words per 1,000; expected at most 20" in capsys.readouterr().err
    page.write_text("Rank 0 sends its weights to all other ranks " + "and " * 40 + "ends.")
    assert prose.main(["--check"]) == 1
    assert "README.md: a sentence has 50 words; expected at most 40" in capsys.readouterr().err
