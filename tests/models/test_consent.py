"""Code in a checkpoint that is not kvfold's: a canary that no command runs, and what each command says."""

import hashlib
import json
import os
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from kvfold.cli import main
from kvfold.convert.formats.remote import AUTO_MAP, FILES, HERE
from kvfold.core.errors import InvalidInput
from kvfold.distill.recipe.recipe import Recipe
from kvfold.distill.run.job import distill
from kvfold.engines.verify import verify
from kvfold.models.causal_lm import load, load_model, load_tokenizer
from kvfold.models.code_files import clean_copy, foreign_code
from kvfold.models.load_options import LoadOptions
from kvfold.models.remote_code import EARLIER, carries_own_code

from ..support.commands import run_main
from ..support.folds import WEIGHTS, convert
from ..support.tiny import make
from ..support.tokenizers import save_tokenizer

FIRST = "361df92"  # the last commit of 0.1.0
SIZES = {"num_key_value_heads": 4, "vocab_size": 258}
ROOT = Path(__file__).parents[2]
TEXT = "A cache of keys and values grows with every token. " * 40
PASSED_ON = "from .modeling_kvfold import *\n"
# name -> foreign code by the file that it stands in, the JSON file that names it, and how
TRICKS: dict[str, tuple[dict[str, str], str, dict[str, object]]] = {
    "mapped": (
        {"evil.py": "from .configuration_kvfold import *\n" + PASSED_ON}, "config.json",
        {"auto_map": {role: f"evil.{name.rpartition('.')[2]}" for role, name in AUTO_MAP.items()}},
    ),
    "mapped in part": ({"evil.py": PASSED_ON}, "config.json",
                       {"auto_map": {**AUTO_MAP, "AutoModelForCausalLM": "evil.KvfoldForCausalLM"}}),
    "mapped besides": ({"evil.py": PASSED_ON}, "config.json",
                       {"auto_map": {**AUTO_MAP, "AutoTokenizer": ["evil.Slow", "evil.Fast"]}}),
    "mapped as a list": ({"evil.py": PASSED_ON}, "config.json", {"auto_map": ["evil.KvfoldForCausalLM"]}),
    "mapped elsewhere": ({}, "config.json",
                         {"auto_map": {role: f"someone/evil--{name}" for role, name in AUTO_MAP.items()}}),
    "nested": ({"evil.py": PASSED_ON}, "config.json",
               {"inner_config": {"auto_map": {"AutoConfig": "evil.KvfoldConfig"}}}),
    "pipelines": ({"evil.py": PASSED_ON}, "config.json",
                  {"custom_pipelines": {"text-generation": {"impl": "evil.Pipeline"}}}),
    "tokenizer": (
        {"evil.py": "from transformers import PreTrainedTokenizerFast as Evil\n"}, "tokenizer_config.json",
        {"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}, "tokenizer_class": "Evil"},
    ),
    "processor": ({"evil.py": PASSED_ON}, "processor_config.json",
                  {"auto_map": {"AutoProcessor": "evil.Evil"}}),
    "generate": ({"custom_generate/generate.py": "def generate(model, **_):\n    pass\n"}, "config.json", {}),
    "adjacent": ({"evil.py": PASSED_ON}, "config.json", {}),
    "package": ({"__init__.py": PASSED_ON}, "config.json", {}),
    "altered": ({"configuration_kvfold.py": (HERE / "configuration_kvfold.py").read_text()}, "config.json", {}),
    "linked": ({"modeling_kvfold.py": (HERE / "modeling_kvfold.py").read_text()}, "config.json", {}),
}  # fmt: skip
CHANGED = ("altered", "linked")  # of kvfold's own files


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source with a tokenizer, and an output of each kind."""
    place = tmp_path_factory.mktemp("made")
    save_tokenizer(make(place / "source", "llama", **SIZES))
    for name in ("remote", "stock"):
        options = ("--to", "mla", "--container", name, "--kv-budget", "50%", *WEIGHTS)
        convert(place / "source", *options, out=place / name, code=0)
    return place


@pytest.fixture
def sung(tmp_path: Path) -> Path:
    """The file that foreign code writes when it runs."""
    return tmp_path / "sung"


def canary(sung: Path) -> str:
    return f"open({str(sung)!r}, 'w').close()\n"


def edit(directory: Path, name: str, **changes: object) -> None:
    path = directory / name
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | changes))


def play(trick: str, directory: Path, sung: Path) -> None:
    codes, file, changes = TRICKS[trick]
    for name, code in codes.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(canary(sung) + code)
        if trick == "linked":
            elsewhere = (directory / name).rename(directory.parent / "elsewhere.py")
            (directory / name).symlink_to(elsewhere)
    if changes:
        edit(directory, file, **changes)


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("kind", ["remote", "stock"])
def test_verify_and_publish_refuse_it(kind: str, trick: str, made: Path, tmp_path: Path, sung: Path) -> None:
    if kind == "stock" and trick in CHANGED:
        pytest.skip("it has no code to change")
    directory = Path(shutil.copytree(made / kind, tmp_path / "out"))
    play(trick, directory, sung)
    for words in (["verify", "{}"], ["verify", "{}", "--lint"], ["publish", "{}", "org/tiny", "--dry-run"],
                  ["publish", "{}", "org/tiny", "--dry-run", "--verify", "lint"]):  # fmt: skip
        assert "this kvfold" in run_main(*([word.format(directory) for word in words]), code=3).output
        assert not sung.exists()


@pytest.mark.parametrize("trick", TRICKS)
def test_an_evaluation_runs_none_of_it(trick: str, made: Path, tmp_path: Path, sung: Path) -> None:
    """As the model that is measured and as the teacher; kvfold's own classes stand for kvfold's files."""
    directory, text = Path(shutil.copytree(made / "remote", tmp_path / "out")), tmp_path / "text.txt"
    play(trick, directory, sung)
    text.write_text(TEXT)
    for pair in ((directory, made / "source"), (made / "source", directory)):
        words = ["eval", str(pair[0]), "--teacher", str(pair[1]), "--text", str(text)]
        few = ["--window", "32", "--max-windows", "2", "--device", "cpu"]
        done = CliRunner().invoke(main, [*words, *few])
        allowed = {2} if trick in CHANGED else {0, 2} if trick == "tokenizer" else {0}
        assert done.exit_code in allowed, done.output
        assert not sung.exists()


@pytest.mark.parametrize("trick", ["mapped", "nested", "tokenizer", "generate", "altered"])
@pytest.mark.parametrize("role", ["student", "teacher"])
def test_distillation_runs_none_of_it(role: str, trick: str, made: Path, tmp_path: Path, sung: Path) -> None:
    """Nor does its output name it."""
    directory, text = Path(shutil.copytree(made / "remote", tmp_path / "in")), tmp_path / "text.txt"
    play(trick, directory, sung)
    text.write_text(TEXT)
    roles = {"student": made / "remote", "teacher": made / "source", role: directory}
    content = {
        "schema": 1, "student": str(roles["student"]), "teacher": str(roles["teacher"]),
        "output": str(tmp_path / "out"),
        "data": {"source": str(text), "seq_len": 32}, "precision": "fp32", "device": "cpu",
        "stages": [{"name": "kl", "tokens": 128, "lr": 1e-3, "batch_tokens": 64, "micro_batch": 2}],
    }  # fmt: skip
    with pytest.raises(InvalidInput) if trick in ("altered", "tokenizer") else nullcontext():
        distill(Recipe.model_validate(content))
        assert foreign_code(tmp_path / "out") == ""
    assert not sung.exists()


def test_a_source_runs_none_of_its_own(made: Path, tmp_path: Path, sung: Path) -> None:
    """Neither by its configuration nor by its tokenizer; an output without code names none."""
    source = Path(shutil.copytree(made / "source", tmp_path / "source"))
    classes = "from transformers import LlamaForCausalLM as Evil, LlamaConfig, PreTrainedTokenizerFast\n"
    (source / "evil.py").write_text(canary(sung) + classes)
    edit(
        source,
        "config.json",
        auto_map={"AutoConfig": "evil.LlamaConfig", "AutoModelForCausalLM": "evil.Evil"},
    )
    edit(source, "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.PreTrainedTokenizerFast"]})
    for name, options in (
        ("gqa", ("--to", "gqa", "--kv-heads", "2", "--ignore-code")),
        ("mla", ("--to", "mla", "--kv-budget", "50%", "--ignore-code")),
    ):
        out = tmp_path / name
        taken = ("--calibration", "self", "--sequences", "2", "--length", "16", "--refine", "0")
        convert(source, *options, *taken, out=out, code=0)
        assert foreign_code(out) == ""
        assert verify(out).failures == []
        AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    load_model(source)
    load_tokenizer(source)
    assert not sung.exists()


def test_a_clean_copy_holds_nothing_else(made: Path, tmp_path: Path, sung: Path) -> None:
    directory = Path(shutil.copytree(made / "remote", tmp_path / "out"))
    for trick in TRICKS:
        play(trick, directory, sung)
    with clean_copy(directory) as place:
        assert {path.name for path in place.iterdir()} == {"config.json", "model.safetensors", *FILES}
        assert all((place / name).read_bytes() == (HERE / name).read_bytes() for name in FILES)
        config = json.loads((place / "config.json").read_text())
        assert config["auto_map"] == AUTO_MAP
        assert "evil" not in json.dumps(config)
        assert (place / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
    assert not place.exists()


def test_weights_are_copied_where_links_are_impossible(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "symlink", refuse)
    with clean_copy(made / "remote") as place:
        assert not (place / "model.safetensors").is_symlink()
        assert (place / "model.safetensors").read_bytes() == (
            made / "remote" / "model.safetensors"
        ).read_bytes()


@pytest.mark.usefixtures("warm_probe")
def test_what_kvfold_wrote_is_its_own(made: Path, tmp_path: Path) -> None:
    """Caches and hidden directories that others leave are no code of the checkpoint's."""
    for kind in ("remote", "stock"):
        directory = Path(shutil.copytree(made / kind, tmp_path / kind))
        for name in ("__pycache__", ".cache"):
            (directory / name).mkdir()
            (directory / name / "left.pyc").write_bytes(b"")
        assert foreign_code(directory) == ""
        assert verify(directory).failures == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no history of the files here")
def test_every_form_since_the_first_release_is_known() -> None:
    """A change of a shipped file adds the digest of the form before to EARLIER."""
    folder = "kvfold/models/shipped"

    def git(*words: str) -> bytes:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=True).stdout

    for name in FILES:
        digests = set()
        for commit in (
            git("log", "--diff-filter=AM", "--format=%H", f"{FIRST}..", "--", f"{folder}/{name}")
            .decode()
            .split()
        ):
            digests.add(hashlib.sha256(git("show", f"{commit}:{folder}/{name}")).hexdigest())
        now = hashlib.sha256((ROOT / folder / name).read_bytes()).hexdigest()
        assert digests <= {*EARLIER.get(name, ()), now}, name


def test_an_output_of_an_earlier_version_runs_this_versions_classes(
    made: Path, tmp_path: Path, sung: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are known from an earlier version are not executed: kvfold's own stand for them."""
    output = tmp_path / "earlier"
    shutil.copytree(made / "remote", output)
    file = output / "layers_kvfold.py"
    file.write_text(canary(sung) + file.read_text())
    assert not carries_own_code(output)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setitem(EARLIER, file.name, (digest,))
    assert carries_own_code(output)
    assert foreign_code(output) == ""
    assert type(load(output, LoadOptions(device="cpu")).model).__name__ == "KvfoldForCausalLM"
    assert not sung.exists()
