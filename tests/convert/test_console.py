"""What every command shares."""

import gc
import subprocess
import sys

import torch

from kvfold.convert.console import loading


def test_loading_leaves_others_alone() -> None:
    """In a process that has torch already, whose garbage may be models, nothing is kept from the collector."""
    assert torch.__name__ in sys.modules
    before = gc.get_freeze_count()
    with loading():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


def test_loading_in_a_command() -> None:
    """In a fresh process what is imported is set aside, and the collector runs again, also after an import that fails."""
    code = (
        "import gc\n"
        "from kvfold.convert.console import loading\n"
        "try:\n"
        "    with loading():\n"
        "        assert not gc.isenabled()\n"
        "        import kvfold.nothing\n"
        "except ImportError:\n"
        "    print(gc.isenabled(), gc.get_freeze_count() > 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
