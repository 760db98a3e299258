"""Runs of probe.py in processes that begin with torch and transformers imported.

`verify` starts a fresh interpreter for each run, which takes seconds to import them. Tests about what `verify`
says, and not about how its process starts, ask for the fixture `warm_probe` (tests/conftest.py): a server that
has imported them forks one process for each run. Nothing here imports kvfold, as in the process of `verify`.
The environment is that of the first run.
"""

import io
import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from .warm_server import WarmServer

_SERVER = WarmServer(
    ["torch", "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto"]
)


def run_warm(script: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Do what `fresh_process.run_apart` does, in a forked process."""
    with tempfile.TemporaryDirectory() as place:
        code = _SERVER.run(_run, script, json.dumps(asked), place)
        said = Path(place, "said").read_text(encoding="utf-8")
    lines = said.strip().splitlines()
    if code:
        return {"failed": f"the run ended with {lines[-1][:300] if lines else code}"}
    return dict(json.loads(lines[-1]))


def _run(script: str, asked: str, place: str) -> None:
    """Run a script as `python script` would, with its standard streams in memory and in a file."""
    from transformers import dynamic_module_utils
    from transformers.utils import hub

    assert "kvfold" not in sys.modules
    hub.HF_MODULES_CACHE = dynamic_module_utils.HF_MODULES_CACHE = os.environ["HF_MODULES_CACHE"] = place
    # A forked process gets its parent's path, with the modules that tests before this one loaded from outputs.
    sys.path[:] = [entry for entry in sys.path if not Path(entry, "transformers_modules").exists()]
    os.chdir(place)
    sys.stdin, sys.stderr = io.StringIO(asked), io.StringIO()
    with Path(place, "said").open("w", encoding="utf-8") as sys.stdout:
        try:
            runpy.run_path(script, run_name="__main__")
        except BaseException:
            sys.stdout.write("\n" + traceback.format_exc())
            sys.exit(1)
