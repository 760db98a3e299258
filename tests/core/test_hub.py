"""Hub ids: from the local cache when offline, and over HTTP from a server on localhost."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from kvfold import MLA, fold
from kvfold.core.errors import InvalidInput
from kvfold.core.hub import resolve

from ..support.tiny import make
from ..support.tokenizers import save_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MQA = ("--to", "mqa", "--calibration", "none", "--json")


def kvfold(
    *arguments: str, cwd: Path, command: str = "convert", **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own: huggingface_hub reads its environment when imported."""
    settings = {**os.environ, "HF_HOME": str(cwd / "hf"), "HF_HUB_DISABLE_XET": "1", **environment}
    words = [sys.executable, "-m", "kvfold", command, *arguments]
    return subprocess.run(words, cwd=cwd, env=settings, capture_output=True, text=True, check=False)


def test_a_cached_model_is_found_offline(tmp_path: Path) -> None:
    repository = tmp_path / "hf" / "hub" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "snapshots").mkdir()
    shutil.move(make(tmp_path / "tiny"), repository / "snapshots" / COMMIT)
    done = kvfold("org/tiny", *MQA, "--out", "out", cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    source = json.loads(done.stdout)["source"]
    assert (source["name"], source["revision"]) == ("org/tiny", COMMIT)
    both = kvfold("org/tiny@v1", *MQA, "--revision", "v2", cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert both.returncode == 2
    assert "org/tiny@v1 names another revision than --revision v2; give one of them" in both.stderr
    missing = kvfold("org/other", *MQA, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert missing.returncode == 2
    assert "org/other is not a directory here, not in the local Hub cache" in missing.stderr


class Hub(BaseHTTPRequestHandler):
    """Model info and files of one repository, `org/tiny`, at `main` and at its commit."""

    directory: Path

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        files = {file.name: file.read_bytes() for file in self.directory.iterdir()}
        info = json.dumps(
            {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        ).encode()
        revision, _, name = path.removeprefix("/org/tiny/resolve/").partition("/")
        if path in {f"/api/models/org/tiny/revision/{revision}" for revision in ("main", "v1", COMMIT)}:
            self.reply(200, info)
        elif path.startswith("/api/models/org/tiny/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                for name, data in files.items()
            ]
            self.reply(200, json.dumps(tree).encode())
        elif path.startswith("/api/models/org/tiny/revision/"):
            self.reply(404, b"", "RevisionNotFound")
        elif path.startswith("/org/tiny/resolve/") and revision in {"main", "v1", COMMIT} and name in files:
            self.reply(200, files[name])
        else:
            self.reply(404, b"", "RepoNotFound")

    def reply(self, status: int, body: bytes, error: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{_oid(body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Cut(Hub):
    """A server that closes the connection in the middle of a weight file."""

    def reply(self, status: int, body: bytes, error: str | None = None) -> None:
        if self.command == "GET" and self.path.endswith(".safetensors"):
            self.close_connection = True
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
        else:
            super().reply(status, body, error)


class Garbled(Hub):
    """A server that answers something else than the Hub's protocol."""

    def reply(self, status: int, body: bytes, error: str | None = None) -> None:
        super().reply(status, b"<html>" if self.path.startswith("/api/") else body, error)


def _oid(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@contextmanager
def serving(directory: Path, kind: type[Hub] = Hub) -> Iterator[str]:
    """Serve a directory as `org/tiny`, and yield the address."""
    handler = type("TinyHub", (kind,), {"directory": directory})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    with serving(make(tmp_path / "served", shard_size="20KB")) as address:
        yield address


def test_a_model_is_downloaded_by_its_id(tmp_path: Path, endpoint: str) -> None:
    online = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
    done = kvfold("org/tiny", "--revision", "v1", *MQA, "--out", "out", cwd=tmp_path, **online)
    assert done.returncode == 0, done.stderr
    source = json.loads(done.stdout)["source"]
    assert (source["name"], source["revision"]) == ("org/tiny", COMMIT)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    for arguments, sentence in (
        (("org/tiny@v9", *MQA), "org/tiny has no revision v9"),
        (("org/absent", *MQA), "org/absent is neither a directory nor a model on the Hub that you may read"),
    ):  # fmt: skip
        refused = kvfold(*arguments, cwd=tmp_path, **online)
        assert refused.returncode == 2, refused.stderr
        assert sentence in refused.stderr
        assert "Traceback" not in refused.stderr


def test_a_published_remote_output_is_used_by_its_id(tmp_path: Path) -> None:
    """Its code comes with it, so that kvfold knows it as its own; other Python files stay there."""
    source = make(tmp_path / "source", vocab_size=258)
    save_tokenizer(source)
    target = MLA(kv_budget="50%", rope="intact")
    served = fold(source, target, out=tmp_path / "served", calibration="none", verify="none").directory
    (served / "other.py").write_text("raise SystemError\n")
    words = ("org/tiny", "--text", "stdlib", "--window", "16", "--max-windows", "2", "--suite", "ppl")
    with serving(served) as endpoint:
        online = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
        done = kvfold(*words, "--device", "cpu", command="eval", cwd=tmp_path, **online)
    assert done.returncode == 0, done.stderr
    assert not [*tmp_path.rglob("snapshots/*/other.py")]


def test_an_unreachable_hub_is_one_sentence(tmp_path: Path) -> None:
    done = kvfold("org/tiny", *MQA, cwd=tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert done.returncode == 2
    assert "the Hub cannot be reached" in done.stderr


@pytest.mark.parametrize("kind", [Cut, Garbled])
def test_a_download_that_breaks_off_is_one_sentence(tmp_path: Path, kind: type[Hub]) -> None:
    with serving(make(tmp_path / "served"), kind) as endpoint:
        done = kvfold("org/tiny", *MQA, cwd=tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    sentence = done.stderr.splitlines()[-1]
    assert sentence.startswith("Error: org/tiny could not be downloaded (")
    assert endpoint not in sentence


@pytest.mark.parametrize(("error", "kind", "words"), [
    (ConnectionResetError(104, "reset"), InvalidInput, "could not be downloaded .* run the same command"),
    (socket.gaierror(-2, "no such name"), InvalidInput, "could not be downloaded .* run the same command"),
    (OSError(28, "No space left on device"), OSError, "No space left"),
    (TypeError("unexpected keyword argument"), TypeError, "unexpected keyword argument"),
    (AttributeError("no such name"), AttributeError, "no such name"),
])  # fmt: skip
def test_errors_of_the_machine_and_of_the_code_are_not_of_the_network(
    error: Exception, kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(kind, match=words):
        resolve("org/tiny")
