"""Write the type stubs of the extension, `deep_ep_py/_C/*.pyi`, from the bindings of the exact build, which has all.

python scripts/stubs.py [FOLDER]     writes to another folder than the package
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deep_ep_py" / "_C"
BUILD = os.environ.get("DEEP_EP_BUILD", "exact")
BUILT = f"deep_ep_py._C_{BUILD}"
HEADER = "# Written by `make stubs` from the bindings in csrc/python: change those.\n"


def write_stubs(folder: Path) -> list[Path]:
    """Generate the stubs in `folder` and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "DEEP_EP_BUILD": BUILD}
        command = [sys.executable, "-m", "pybind11_stubgen", BUILT, "-o", made, "--exit-code"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)
        written = []
        for path in sorted(Path(made).rglob("*.pyi")):
            # pybind11 accepts any object with __int__ or __index__; callers here pass integers.
            text = re.sub(r"typing\.Supports(Int|Float) \| typing\.SupportsIndex", r"\1", path.read_text())
            text = re.sub(r"\bInt\b", "int", re.sub(r"\bFloat\b", "float", text))
            text = re.sub(r"(STREAMING_THRESHOLD: int) = \d+", r"\1", text)  # the machine's
            target = folder / path.name
            target.write_text(HEADER + text.replace(BUILT, "deep_ep_py._C"))
            written.append(target)
    style = [sys.executable, "-m", "ruff", "format", "--quiet", "--isolated", "--line-length=120"]
    subprocess.run([*style, *written], check=True)
    return written


if __name__ == "__main__":
    for path in write_stubs(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER):
        print(path)
