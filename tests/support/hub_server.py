"""A server on localhost that speaks the publishing part of the Hub's protocol, and keeps what it is sent."""

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

TOKENS = {"hf_owner": "org", "hf_other": "other"}  # token -> the user whom it belongs to


@dataclass
class Repository:
    """A repository: what its newest commit shows."""

    private: bool
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    commits: list[str] = field(default_factory=lambda: ["0" * 40])


@dataclass
class Hub:
    """The content of the server, and the requests it received."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)  # large files by SHA-256, also of no commit
    received: list[str] = field(
        default_factory=list
    )  # SHA-256 of each large file that arrived whole, in order
    requests: list[str] = field(default_factory=list)
    # Asked for every request (method, path); a status to answer instead, or None.
    fault: Callable[[str, str], int | None] = lambda method, path: None
    stall: int | None = None  # the number of the upload that is read by half and never answered
    uploads: Iterator[int] = field(default_factory=count)
    stalled: threading.Event = field(default_factory=threading.Event)  # set when an upload waits there
    endpoint: str = ""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve a hub on a free port of localhost; its address is `hub.endpoint`."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        yield hub
        server.shutdown()


class Refused(Exception):
    """A status with what the Hub says to it."""

    def __init__(self, status: int, message: str, code: str = "", **more: str) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.more = status, message, code, more


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        self.hub.requests.append(f"{self.command} {path}")
        if path.startswith("lfs/") and self.hub.stall == next(self.hub.uploads):
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
            self.hub.stalled.set()
            threading.Event().wait(60)  # the client is killed meanwhile
            return
        body = self._body()
        status = self.hub.fault(self.command, path)
        try:
            if status is not None:
                raise Refused(status, "as the test wants it")
            if self.command == "GET" and "/resolve/main/" in path:
                self._file(*path.split("/resolve/main/"))
            else:
                self._reply(200, self._route(path, body))
        except Refused as refusal:
            self._reply(refusal.status, {"error": refusal.message, **refusal.more}, refusal.code)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _file(self, name: str, file: str) -> None:
        data = self._visible(name).files[file]
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _reply(self, status: int, value: Any, code: str = "") -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(data)

    def _route(self, path: str, body: bytes) -> Any:
        parts = path.split("/")
        if path == "api/whoami-v2":
            return {"type": "user", "name": self._user(), "orgs": []}
        if path == "api/validate-yaml":
            return self._validate(json.loads(body)["content"])
        if path == "api/repos/create":
            return self._create(json.loads(body))
        if parts[0] == "lfs":
            return self._keep(parts[1], body)
        if path.endswith(".git/info/lfs/objects/batch"):
            self._writable(path.removesuffix(".git/info/lfs/objects/batch"))
            return {"objects": [self._object(wanted) for wanted in json.loads(body)["objects"]]}
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            name, action = "/".join(parts[2:4]), parts[4] if len(parts) > 4 else "info"
            if action == "preupload":
                return {
                    "files": [self._mode(self._writable(name), file) for file in json.loads(body)["files"]]
                }
            if action == "commit":
                oid = self._commit(self._writable(name), body)
                return {"commitUrl": f"{self.hub.endpoint}/{name}/commit/{oid}", "commitOid": oid}
            if action == "xet-write-token":
                raise Refused(403, "You don't have write access to this repository")
            if action == "tree":
                files = self._visible(name).files.items()
                return [{"type": "file", "path": file, "size": len(data), "oid": ""} for file, data in files]
            if action in {"info", "revision"}:
                return self._info(name)
        raise Refused(404, f"no such page: {path}")

    def _user(self) -> str:
        user = TOKENS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if user is None:
            raise Refused(401, "Invalid credentials in Authorization header")
        return user

    def _visible(self, name: str) -> Repository:
        found = self.hub.repositories.get(name)
        if found is None or (found.private and name.partition("/")[0] != self._user()):
            raise Refused(404, "Repository not found", "RepoNotFound")
        return found

    def _writable(self, name: str) -> Repository:
        found = self._visible(name)
        if name.partition("/")[0] != self._user():
            raise Refused(403, "You don't have write access to this repository")
        return found

    def _validate(self, content: str) -> Any:
        if "license: nonsense" in content:
            raise Refused(400, "license must be one of the known")
        return {"warnings": [], "errors": []}

    def _create(self, wanted: dict[str, Any]) -> Any:
        owner, name = wanted.get("organization") or self._user(), wanted["name"]
        if owner != self._user():
            raise Refused(403, "You don't have the rights to create a model under this namespace")
        url = f"{self.hub.endpoint}/{owner}/{name}"
        if f"{owner}/{name}" in self.hub.repositories:
            raise Refused(409, "You already created this model repo", url=url)
        # As versions of the library say it.
        private = wanted.get("private") or wanted.get("visibility") == "private"
        self.hub.repositories[f"{owner}/{name}"] = Repository(bool(private))
        return {"url": url}

    def _info(self, name: str) -> Any:
        found = self._visible(name)
        siblings = [{"rfilename": file} for file in found.files]
        return {
            "id": name, "sha": found.commits[-1], "private": found.private, "siblings": siblings,
            "tags": [],
        }  # fmt: skip

    def _mode(self, found: Repository, file: dict[str, Any]) -> Any:
        large, there = file["path"].endswith(".safetensors"), found.files.get(file["path"])
        oid = None if there is None else _sha256(there) if large else _git_oid(there)
        return {
            "path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False,
            "oid": oid,
        }  # fmt: skip

    def _object(self, wanted: dict[str, Any]) -> Any:
        if wanted["oid"] in self.hub.objects:
            return wanted
        return {**wanted, "actions": {"upload": {"href": f"{self.hub.endpoint}/lfs/{wanted['oid']}"}}}

    def _keep(self, oid: str, body: bytes) -> Any:
        if _sha256(body) != oid:
            raise Refused(400, "the content is not what its SHA-256 says")
        self.hub.objects[oid] = body
        self.hub.received.append(oid)
        return {}

    def _commit(self, found: Repository, body: bytes) -> str:
        files = dict(found.files)
        for line in body.splitlines():
            key, value = (item := json.loads(line))["key"], item["value"]
            if key == "header" and value.get("parentCommit") not in {None, found.commits[-1]}:
                raise Refused(412, "A commit has happened since")
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise Refused(400, "the commit names an object that was never uploaded")
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        found.files = files
        found.commits.append(hashlib.sha1(body, usedforsecurity=False).hexdigest())
        return found.commits[-1]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
