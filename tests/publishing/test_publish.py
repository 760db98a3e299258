"""Publishing to a server on localhost: what arrives, what is sent again, what is refused, the card."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from kvfold.checkpoints.identity import hashes_of, identity
from kvfold.cli import main

from ..support.commands import run_main
from ..support.hub_server import Hub, Repository, serving
from ..support.tiny import make

GUARD = """
import os, sys
def guard(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple) and arguments[1][0] not in ("127.0.0.1", "::1"):
        open(os.environ["GUARD"], "a").write(repr(arguments[1]))
        raise PermissionError("beyond localhost")
sys.addaudithook(guard)
"""
# One process for many commands: importing costs more than they do.
DRIVER = """
import json, os, sys
from unittest.mock import patch
from click.testing import CliRunner
from kvfold.cli import main
for line in sys.stdin:
    results = []
    for words, environment in json.loads(line):
        with patch.dict(os.environ, environment):
            done = CliRunner().invoke(main, words)
        results.append([done.exit_code, done.stdout, done.stderr + ("" if done.exit_code in (0, 2, 3) else repr(done.exception))])
    print(json.dumps(results), flush=True)
"""
Results = list[tuple[int, str, str]]
Run = Callable[..., Results]


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted checkpoint of several shards; its source says its licence."""
    place = tmp_path_factory.mktemp("folded")
    source = make(place / "source")
    (source / "README.md").write_text(
        "---\nlicense: other\nlicense_name: tiny-licence\nlicense_link: LICENSE\n---\n# tiny\n"
    )
    words = ["--to", "mla", "--kv-budget", "50%", "--calibration", "none", "--shard-size", "20KB"]
    run_main("convert", source, *words, "--out", place / "out")
    assert len(list((place / "out").glob("*.safetensors"))) > 3
    return place / "out"


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serving(Hub()) as server:
        yield server


@pytest.fixture
def hub(server: Hub) -> Hub:
    """The server, with nothing on it."""
    vars(server).update(vars(Hub(endpoint=server.endpoint)))
    return server


@pytest.fixture(scope="module")
def run(server: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with driving(server, tmp_path_factory.mktemp("driver")) as run:
        yield run


def environment(hub: Hub, place: Path) -> dict[str, str]:
    """Of a process that knows no Hub but this one, and whose token and cache are of its own."""
    (place / "guard").mkdir(exist_ok=True)
    (place / "guard" / "sitecustomize.py").write_text(GUARD)
    ours = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(place / "hf"),
        "HF_TOKEN": "hf_owner",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "GUARD": str(place / "guard" / "seen"),
        "PYTHONPATH": os.pathsep.join([str(place / "guard"), os.environ.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        ),
    }
    return {**os.environ, **ours}


@contextmanager
def driving(hub: Hub, place: Path, **changed: str) -> Iterator[Run]:
    """Start a process for `kvfold publish`: from words and environment to exit code, stdout and stderr."""
    command = [sys.executable, "-c", DRIVER]
    pipe = subprocess.PIPE
    env = {**environment(hub, place), **changed}
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True) as process:
        asked, answers = process.stdin, process.stdout
        assert asked is not None

        def run(*commands: tuple[list[str], dict[str, str]]) -> Results:
            runs = [(["publish", *words, "--verify", "lint"], changes) for words, changes in commands]
            print(json.dumps(runs), file=asked, flush=True)
            results = json.loads(answers.readline())
            assert not (place / "guard" / "seen").exists(), "the network beyond localhost was asked for"
            return [(code, out, err) for code, out, err in results]

        yield run


def local(*words: str) -> tuple[int, str, str]:
    """Run the part that needs no server, in this process."""
    done = CliRunner().invoke(main, ["publish", *words, "--verify", "lint"])
    return done.exit_code, done.stdout, done.stderr


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_what_arrives_is_what_lies_there(folded: Path, hub: Hub, run: Run) -> None:
    before = contents(folded)
    words = [str(folded), "org/tiny", "--private", "--json"]
    (code, out, err), again = run((words, {}), (words, {}))
    assert code == 0, err
    repository = hub.repositories["org/tiny"]
    assert repository.private
    made = {"README.md", "kvfold.json"}  # the latter with names in place of paths
    arrived = {name: data for name, data in repository.files.items() if name not in {*made, ".gitattributes"}}
    assert arrived == {name: data for name, data in before.items() if name not in made}
    told = json.loads(out)
    assert told["commit"] == repository.commits[1]
    assert told["files"] == {
        name: len(data) for name, data in repository.files.items() if name != ".gitattributes"
    }
    assert told["card"].encode() == repository.files["README.md"]
    assert contents(folded) == before, "the directory was changed"
    # The same again sends nothing and makes no commit.
    assert again[0] == 0, again[2]
    assert json.loads(again[1])["commit"] == told["commit"]
    assert len(repository.commits) == 2
    assert len(hub.received) == len(set(hub.received)) == len(list(folded.glob("*.safetensors")))


def test_a_killed_upload_goes_on_where_it_was(folded: Path, hub: Hub, run: Run, tmp_path: Path) -> None:
    hub.stall = 2
    command = [sys.executable, "-m", "kvfold", "publish", str(folded), "org/tiny", "--verify", "lint"]
    process = subprocess.Popen(command, env=environment(hub, tmp_path), stderr=subprocess.PIPE)
    try:
        assert hub.stalled.wait(240)
        while len(hub.received) < 2:  # others may be on their way
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
        process.communicate()
    assert len(hub.received) >= 2
    assert set(hub.repositories["org/tiny"].files) == {".gitattributes"}, "half a checkpoint is visible"
    hub.stall = None
    ((code, _, err),) = run(([str(folded), "org/tiny"], {}))
    assert code == 0, err
    assert len(hub.received) == len(set(hub.received)) == len(list(folded.glob("*.safetensors")))
    changed = contents(folded).items() - hub.repositories["org/tiny"].files.items()
    assert {name for name, _ in changed} == {
        "README.md",
        "kvfold.json",
    }  # of the repository, and without paths


def test_a_failing_server_is_a_sentence_and_the_next_run_finishes(folded: Path, hub: Hub, run: Run) -> None:
    uploads, commits = iter([503]), iter([500])  # the library repeats an upload by itself, and no commit
    hub.fault = lambda method, path: next(
        uploads if method == "PUT" else commits if "/commit/" in path else iter(()), None
    )
    words = [str(folded), "org/tiny"]
    (code, _, err), (again, _, told) = run((words, {}), (words, {}))
    assert code == 2
    assert err.splitlines()[-1].startswith(
        "Error: the Hub answered 500 (as the test wants it); run the same command again"
    )
    assert again == 0, told
    assert len(hub.received) == len(set(hub.received)) == len(list(folded.glob("*.safetensors"))), (
        "files were sent again"
    )
    assert "kvfold.json" in hub.repositories["org/tiny"].files


def test_refusals_of_the_hub_are_sentences(folded: Path, hub: Hub, run: Run, tmp_path: Path) -> None:
    hub.repositories["org/public"] = Repository(private=False)
    hub.repositories["org/others"] = Repository(
        private=True, files={"config.json": b"{}", "model.safetensors": b""}
    )
    hub.repositories["other/model"] = Repository(private=True)
    refused = {
        ("org/tiny", "hf_nobody"): "does not know the token",
        ("other/tiny", "hf_owner"): "may not write to other/tiny; name a repository of your own",
        ("other/model", "hf_owner"): "may not write to other/model; name a repository of your own",
        ("org/public", "hf_owner"): "--private: org/public exists and is public",
        ("org/others", "hf_owner"): "org/others holds a model that kvfold did not publish",
        ("org/tiny", ""): "there is no token for the Hub; set HF_TOKEN",
    }
    copy = shutil.copytree(folded, tmp_path / "copy")
    (copy / "README.md").write_text("---\nlicense: nonsense\n---\nMine.\n")
    commands = [([str(folded), name, "--private"], {"HF_TOKEN": token}) for name, token in refused]
    results = run(*commands, ([str(copy), "org/tiny"], {"HF_TOKEN": "hf_owner"}))
    sentences = [*refused.values(), "the Hub refuses the upload: Invalid metadata in README.md"]
    for (code, out, err), sentence in zip(results, sentences, strict=True):
        assert (code, out) == (2, ""), err
        assert sentence in err.splitlines()[-1]
        assert "Traceback" not in err
        assert hub.endpoint not in err
    assert "config.json" not in hub.repositories.get("org/tiny", Repository(private=True)).files
    assert not hub.received


def test_no_network_is_told(folded: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with driving(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9") as run:
        ((code, _, err),) = run(([str(folded), "org/tiny"], {}))
    assert (code, "cannot be reached" in err.splitlines()[-1]) == (2, True), err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", "hf_owner")
    code, _, err = local(str(folded), "org/tiny")
    assert (code, "HF_HUB_OFFLINE is set" in err.splitlines()[-1]) == (2, True), err


def test_a_refusal_of_the_library_for_chunks_is_a_sentence(folded: Path, hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("hf_xet")
    with driving(hub, tmp_path, HF_HUB_DISABLE_XET="0") as run:
        ((code, _, err),) = run(([str(folded), "org/tiny"], {}))
    assert code == 2, err
    assert "may not write to org/tiny" in err.splitlines()[-1]
    assert hub.endpoint not in err


def test_what_is_there_already(folded: Path, hub: Hub, run: Run, tmp_path: Path) -> None:
    """Weights sent earlier go with the new ones; a card that was written there is not replaced by ours."""
    kept = {
        "model-00001-of-00009.safetensors": b"old",
        "lora/adapter_model.safetensors": b"theirs",
        "figure.png": b"theirs",
    }
    files = {"kvfold.json": b"{}", "config.json": b"{}", "README.md": b"---\nlicense: mit\n---\n", **kept}
    hub.repositories["org/tiny"] = Repository(private=False, files=files)
    written = {**files, "README.md": b"---\nlicense: mit\n---\nWritten there.\n"}
    hub.repositories["org/written"] = Repository(private=False, files=dict(written))
    copy = shutil.copytree(folded, tmp_path / "copy")
    (copy / "README.md").write_bytes(written["README.md"])
    commands = [[str(folded), "org/tiny"], [str(folded), "org/written"], [str(copy), "org/written"]]
    (code, out, err), refused, merged = run(*((words, {}) for words in commands))
    assert code == 0, err
    assert refused[0] == 2
    assert "README.md of org/written was written on the Hub; copy it into" in refused[2]
    assert merged[0] == 0, merged[2]
    assert hub.repositories["org/written"].files["README.md"].endswith(b"---\nWritten there.\n")
    assert "model-00001-of-00009.safetensors removed" in out
    files = hub.repositories["org/tiny"].files
    assert "model-00001-of-00009.safetensors" not in files
    assert files["figure.png"] == files["lora/adapter_model.safetensors"] == b"theirs"


def test_a_dry_run_shows_all_and_touches_nothing(folded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    before = contents(folded)
    code, out, err = local(str(folded), "org/tiny", "--dry-run")
    assert code == 0, err
    assert "model-00001-of-" in out
    assert "(dry run)" in out
    assert 'from_pretrained("org/tiny", dtype="auto")' in out
    assert "the card has no perplexity" in err
    code, out, _ = local(str(folded), "org/tiny", "--dry-run", "--json")
    told: dict[str, Any] = json.loads(out)
    assert told["commit"] is None
    assert told["verify"]["passed"]
    assert told["files"].keys() == before.keys()
    assert contents(folded) == before


@pytest.mark.parametrize(
    "name", ["tiny", "a/b/c", "/x", "org/", "org/ti ny", "org/x--y", "https://host/org/x", "org/x.git"]
)
def test_a_name_that_is_none(folded: Path, name: str) -> None:
    code, _, err = local(str(folded), name, "--dry-run")
    assert code == 2
    assert "is not a repository; write owner/name" in err


@pytest.mark.parametrize(("name", "data", "sentence"), [
    ("kvfold.json", None, "has no kvfold.json"),
    ("model-00001-of-*", None, "lacks the shard"),
    ("eval.json.partial", b"{}", "is half-written"),
    ("eval.json", b"{", "is not valid JSON"),
    ("eval.json", b'{"schema": 9}', "its schema is 9"),
    ("README.md", b"---\na: [\n---\n", "cannot be read as a model card"),
    ("README.md", b"---\n- a\n---\n", "cannot be read as a model card"),
])  # fmt: skip
def test_what_is_not_published(
    folded: Path, tmp_path: Path, name: str, data: bytes | None, sentence: str
) -> None:
    copy = shutil.copytree(folded, tmp_path / "copy")
    for path in list(copy.glob(name)) if data is None else [copy / name]:
        path.parent.mkdir(exist_ok=True)
        path.unlink() if data is None else path.write_bytes(data)
    code, _, err = local(str(copy), "org/tiny", "--dry-run")
    assert code == 2, err
    assert sentence in err
    assert "Traceback" not in err


def test_a_copy_that_another_tool_trained(folded: Path, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    shutil.copytree(folded, tuned, ignore=shutil.ignore_patterns("kvfold.json"))
    code, _, err = local(str(tuned), "org/tuned", "--dry-run")
    assert (code, "trained further with another tool, copy kvfold.json" in err) == (2, True), err
    shutil.copy(folded / "kvfold.json", tuned)
    shard = min(tuned.glob("*.safetensors"))
    tensors = {name: tensor + 1 for name, tensor in load_file(shard).items()}
    save_file(tensors, shard, {"format": "pt"})
    code, out, err = local(str(tuned), "org/tuned", "--dry-run")
    assert code == 0, err
    assert f"weights of {tuned} are not those that its kvfold.json describes ({shard.name} differs)" in err
    assert "converted. Its weight files are not those that kvfold wrote: another tool saved them later" in out
    assert "without training" not in out
    assert "Predicted on calibration text" not in out
    assert "converted, without training" in local(str(folded), "org/tiny", "--dry-run")[1]


def test_measurements_of_a_changed_copy(folded: Path, tmp_path: Path) -> None:
    """They are on the card where they were made on the weights that are there."""
    tuned = Path(shutil.copytree(folded, tmp_path / "a copy"))
    shard = min(tuned.glob("*.safetensors"))
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard, {"format": "pt"})
    reports = Path(__file__).parents[1] / "checkpoints" / "reports"
    report = json.loads((reports / "schema-2.json").read_text())
    (tuned / "eval.json").write_text(json.dumps(report))
    code, _, err = local(str(tuned), "org/tuned", "--dry-run")
    command = f"kvfold eval '{tuned}' --text FILE --out '{tuned / 'eval.json'}'"
    flaw = f"was measured on other weights than {tuned} has now"
    assert f"{flaw}; remove it, and measure again: {command}" in err
    assert code == 2
    report["checkpoint"]["identity"] = identity(hashes_of(tuned))
    (tuned / "eval.json").write_text(json.dumps(report))
    code, out, err = local(str(tuned), "org/tuned", "--dry-run")
    assert code == 0, err
    recovered = report["suites"]["ppl"]["recovered_share"]["value"]
    assert f"Training recovered {recovered:.1%} of what the conversion had lost." in out


def test_files_in_directories_of_somebodys_own_are_left_out(folded: Path, tmp_path: Path) -> None:
    """A `*` in the names of files that travel with weights stands for no directory."""
    copy = shutil.copytree(folded, tmp_path / "copy")
    mine = copy / "eval-runs" / "secret.json"
    mine.parent.mkdir()
    mine.write_text("{}")
    code, out, err = local(str(copy), "org/tiny", "--dry-run", "--json")
    assert code == 0, err
    assert "secret" not in json.dumps(json.loads(out)["files"])


def test_what_verify_refuses_is_not_published(folded: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folded, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "n_routed_experts": None}))
    code, out, err = local(str(copy), "org/tiny", "--dry-run")
    assert (code, out) == (3, "")
    assert "does not pass kvfold verify, so nothing was uploaded" in err


@pytest.mark.usefixtures("warm_probe")
def test_it_is_run_next_to_its_source_where_that_is_at_hand(folded: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folded, tmp_path / "copy")
    record = json.loads((copy / "kvfold.json").read_text())
    record["source"]["path"] = str(tmp_path / "gone")
    (copy / "kvfold.json").write_text(json.dumps(record))
    for directory, ran in ((folded, True), (copy, False)):
        done = run_main("publish", directory, "org/tiny", "--dry-run", "--json")
        told = json.loads(done.stdout)
        assert ("source" in {check["name"] for check in told["verify"]["checks"]}) == ran
        assert "license_name: tiny-licence" in told["card"], "the licence outlives the source"
    done = run_main("publish", copy, "org/tiny", "--dry-run", "--verify", "full", code=2)
    assert "does not exist any more; name it with" in done.stderr
