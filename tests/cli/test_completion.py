"""A real bash completes verbs and options."""

import shutil
import subprocess

import pytest

pytest.importorskip("shtab")

COMPLETE = """
source {script}
COMP_WORDS=({words})
COMP_CWORD={last}
{function} holdfast
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["holdfast", "st"], {"stats"}),
        (["holdfast", "inspect", "pl"], {"plans"}),
        (["holdfast", "serve", "--log-f"], {"--log-format"}),
    ],
)
def test_bash_completion_offers_the_expected_words(holdfast, tmp_path, words, expected):
    bash, script = shutil.which("bash"), tmp_path / "holdfast.bash"
    script.write_text(holdfast("completion", "bash").stdout)
    function = script.read_text().split(" -F ")[-1].split()[0]
    text = COMPLETE.format(
        script=script, words=" ".join(words), last=len(words) - 1, function=function
    )
    done = subprocess.run([bash, "-c", text], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == expected
