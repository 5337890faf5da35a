"""SECURITY.md names a test for every threat: they must exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_threat_has_a_test_that_exists() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    table = page[page.index("## Threats") :]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 20
    files = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    for row in rows:
        named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", row)
        assert named, row
        for file, test in named:
            assert file in files, file
            assert not test or re.search(rf"^def {test}\(", files[file].read_text(), re.MULTILINE), f"{file}::{test}"
