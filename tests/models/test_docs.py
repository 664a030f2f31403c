"""The page about models says what the registry says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "scripts" / "models_page.py"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert made.stdout == (ROOT / "docs" / "models.md").read_text(), "run the script again"


def test_the_table_of_adapters_is_what_was_measured() -> None:
    made = subprocess.run([sys.executable, ROOT / "scripts" / "adapters_table.py"], capture_output=True, text=True)
    assert made.returncode == 0 and made.stdout in (ROOT / "docs" / "adapters.md").read_text(), "put the table in again"
