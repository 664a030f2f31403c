"""Make a virtual environment with pip in it, also where Python comes without ``ensurepip``.

Debian's python3 does, until python3-venv is installed. Then the pip wheel named below is fetched, verified, and
installs itself. Usage: ``python3 scripts/make_venv.py FOLDER``; needs nothing but the standard library.
"""

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import urllib.request
import venv
from pathlib import Path

PIP = "https://files.pythonhosted.org/packages/07/25/ee8c38ae72d66b844ce8eb9711ba905dba21ca1a8a0c960057c41cd23337"
WHEEL = "pip-26.3-py3-none-any.whl"
SHA256 = "f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13"


def main(folder: Path) -> None:
    bundled = importlib.util.find_spec("ensurepip") is not None
    venv.create(folder, symlinks=True, with_pip=bundled)
    if not bundled:
        with urllib.request.urlopen(f"{PIP}/{WHEEL}", timeout=60) as response:
            data = response.read()
        if hashlib.sha256(data).hexdigest() != SHA256:
            raise SystemExit(f"{WHEEL} is not the file that was expected")
        with tempfile.TemporaryDirectory() as scratch:
            wheel = Path(scratch, WHEEL)
            wheel.write_bytes(data)
            # A wheel of pip can be run as it is, and install itself.
            command: list[str | Path] = [
                folder / "bin" / "python",
                wheel / "pip",
                "install",
                "--quiet",
                "--no-index",
                wheel,
            ]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
