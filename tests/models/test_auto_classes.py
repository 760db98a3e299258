"""Remote outputs in Auto classes after `import kvfold.register`, which holds for a whole process."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvfold.core.version import __version__

from ..support.folds import fold_latent
from ..support.tiny import make
from ..support.tokenizers import save_tokenizer
from ..support.warm_python import warm_python

LOADING = """
import os, sys
import torch, kvfold.register
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

directory, place = sys.argv[1:]
ours = AutoModelForCausalLM.from_pretrained(directory)
assert type(ours).__module__.startswith("kvfold.models.shipped"), type(ours)
ids = torch.arange(3, 9)[None]
wanted = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
assert torch.equal(ours(ids).logits, wanted(ids).logits)
assert torch.equal(AutoModel.from_pretrained(directory)(ids)[0], ours.base_model(ids)[0])
assert AutoTokenizer.from_pretrained(directory)("a b").input_ids
ours.save_pretrained(place)
"""


def load(directory: Path, place: Path) -> subprocess.CompletedProcess[str]:
    """Load a checkpoint in a process that registers kvfold's classes, and save it again."""
    command = [warm_python(), "-c", LOADING, str(directory), str(place)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A remote output with a tokenizer."""
    source = make(tmp_path_factory.mktemp("made") / "source", vocab_size=300)
    save_tokenizer(source)
    return fold_latent(source, "--kv-budget", "50%", "--container", "remote")


def test_the_installed_code_runs_and_is_saved_again(remote: Path, tmp_path: Path) -> None:
    done = load(remote, tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "saved" / "modeling_kvfold.py").read_bytes() == (
        remote / "modeling_kvfold.py"
    ).read_bytes()


def test_an_output_of_a_newer_kvfold_is_refused_in_one_sentence(remote: Path, tmp_path: Path) -> None:
    newer = Path(shutil.copytree(remote, tmp_path / "newer"))
    record = json.loads((newer / "kvfold.json").read_text())
    (newer / "kvfold.json").write_text(json.dumps({**record, "kvfold": "10.0.0"}))
    refused = load(newer, tmp_path / "saved")
    said = refused.stderr.strip().splitlines()[-1]
    assert said == (
        f"kvfold.core.errors.InvalidInput: kvfold 10.0.0 wrote {newer}, and the installed kvfold {__version__} is "
        "older; run pip install --upgrade kvfold"
    )
    (newer / "kvfold.json").unlink()  # as a copy that another tool saved has none
    assert load(newer, tmp_path / "saved").returncode == 0
