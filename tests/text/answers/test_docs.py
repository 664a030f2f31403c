"""The page about tools says what the descriptions say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_is_current() -> None:
    script = ROOT / "scripts" / "tool_families.py"
    made = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert made.stdout == (ROOT / "docs" / "tools.md").read_text(), "run the script again"
