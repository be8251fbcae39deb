"""The page about binding an engine shows what its example prints."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-to" / "engine.md"


def test_the_example_prints_what_the_page_shows(tmp_path):
    text = PAGE.read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [shown] = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    argv = [sys.executable, "-c", code]
    ran = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == shown
