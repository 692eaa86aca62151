"""docs/reproducibility.md: the commands that it shows print what it shows."""

import re
from pathlib import Path

import pytest

from tests.support.scripts import ROOT, run_forked

PAGE = ROOT / "docs" / "reproducibility.md"
# Run by the script, between the blocks of the page.
PRELUDE = r'''
import io, re
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from shardcore.cli import main

def check(transcript):
    for part in transcript.split("$ shardcore ")[1:]:
        command, *expected = masked(part).splitlines()
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), suppress(SystemExit):
            main(command.split())
        printed, said = (masked(text.getvalue()).splitlines() for text in (out, err))
        assert {*printed} <= {*expected} <= {*printed, *said}, (part, printed, said)

def masked(text):
    """Without values and checksums, which other kernels of torch change."""
    return re.sub(r"-?\d\.\d{6,}|crc32c is \w+; expected \w+", "...", text)
'''


@pytest.mark.more
def test_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    section = PAGE.read_text().partition("## Where two runs part")[2].partition("\n## ")[0]
    script, commands = PRELUDE, 0
    for mark, language, block in re.findall(
        r"(<!-- [^\n]+ -->\n)?^```(\w*)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE
    ):
        if "this is train.py" in mark:
            script += f"Path('train.py').write_text({block!r})\n"
        elif language == "python":
            script += block
        elif block.startswith("$ shardcore "):
            script += f"check({block!r})\n"
            commands += block.count("$ ")
    assert commands == 10
    (tmp_path / "page.py").write_text(script)
    run_forked(tmp_path / "page.py", ranks=0, folder=tmp_path)
