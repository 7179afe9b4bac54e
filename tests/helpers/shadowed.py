# SPDX-License-Identifier: Apache-2.0
"""The doctor in the root of a clone, as after an install without -e."""

import json
import pathlib
import subprocess
import sys
from typing import Any

# An editable install puts its finder before the folders of sys.path.
_PROGRAM = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
from jax_ulysses.__main__ import main
sys.exit(main(["doctor", "--no-self-test", "--json"]))
"""


def report(root: pathlib.Path) -> dict[str, Any]:
    """What the doctor reports there."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
