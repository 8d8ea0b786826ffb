"""The examples run and do what they say."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_paged_training(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "paged_training.py"), str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
    )
    found = re.search(r"loss (\S+) -> (\S+); largest relative difference to plain PyTorch (\S+)", done.stdout)
    assert found is not None, done.stdout
    assert float(found[2]) < 0.7 * float(found[1])
    assert float(found[3]) < 1e-5
    assert list(tmp_path.iterdir()) == []


def test_one_page(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "one_page.py"), str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
    )
    found = re.search(r"AdamW: (\S+)\nread (\d+) MiB, wrote (\d+) MiB", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) < 5e-6, "a few units in the last place of weights up to 5"
    assert (int(found[2]), int(found[3])) == (40, 48)
    assert list(tmp_path.iterdir()) == []
