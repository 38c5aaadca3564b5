"""README.md: its snippet runs, and its generated parts are what the code and the committed results say."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from scripts import readme

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()


def test_the_snippet_prints_numbers():
    [snippet] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 15
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(snippet, {"__name__": "snippet"})
    errors = [float(number) for number in re.findall(r"error (\d+\.\d+)", printed.getvalue())]
    claimed = [float(number) for number in re.findall(r"mass claimed (\d+\.\d+)", printed.getvalue())]
    # on random keys the block means stand for the rest better than nothing does, and never claim too much
    assert len(errors) == 2 and errors[1] < errors[0]
    assert len(claimed) == 2 and claimed[0] < claimed[1] <= 1.0


def test_generated_parts_are_up_to_date():
    assert readme.filled(TEXT) == TEXT, "run `make readme`"


def test_filling_replaces_what_is_stale():
    stale = re.sub(r"(<!-- grid: begin[^>]*-->\n).*?(<!-- grid: end -->)", r"\1old\n\2", TEXT, flags=re.DOTALL)
    assert stale != TEXT and readme.filled(stale) == TEXT
    with pytest.raises(ValueError, match="grid"):
        readme.filled(TEXT.replace("grid: begin", "gone"))


def test_links_lead_somewhere():
    targets = [target for target in re.findall(r"\]\(([^)#]+)", TEXT) if "://" not in target]
    assert targets and [target for target in targets if not (ROOT / target).exists()] == []


def test_first_lines_are_one_sentence_and_the_two_commands():
    lines = [line for line in TEXT.splitlines() if line.strip()]
    assert lines[1].count(".") == 1
    assert lines[2].strip().startswith("make compare") and lines[3].strip().startswith("make test")
