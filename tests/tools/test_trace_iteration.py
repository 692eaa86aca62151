"""An iteration stays as short to follow as it is promised to be."""

import re
import subprocess
import sys

import pytest


@pytest.mark.more
def test_an_iteration_passes_through_few_files() -> None:
    said = subprocess.run([sys.executable, "-m", "tools.trace_iteration"], capture_output=True, text=True, check=True).stdout
    backward = re.search(r"backward: .* (\d+)% into another file", said)
    files = re.search(r"an iteration at stage 2: (\d+) files", said)
    assert backward is not None, said
    assert files is not None, said
    assert int(backward[1]) <= 45, said
    assert int(files[1]) <= 18, said
