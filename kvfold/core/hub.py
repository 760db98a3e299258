"""Local directories of models that the user names by a path, or by a Hub id with an optional `@revision`."""

import re
import socket
from pathlib import Path

from .errors import InvalidInput
from .untrusted import printable

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")
# Everything that a checkpoint needs, without pickles; the card, for its licence; the code of remote outputs,
# which kvfold compares with its own and does not run.
_WANTED = [
    "model*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "*.txt",
    "*.tiktoken",
    "*_kvfold.py",
    "LICENSE*",
    "NOTICE*",
    "README.md",
]
# Errors that retrying cannot fix.
_OF_CODE = (MemoryError, TypeError, AttributeError, NameError, AssertionError)


def resolve(model: str, revision: str | None = None) -> Path:
    """Return the local directory of a model, after a download if that is needed.

    Anything that is not a directory is taken as a Hub id, and downloaded through huggingface_hub into its
    cache. Environment variables such as HF_HOME, HF_HUB_OFFLINE and HF_ENDPOINT apply there.

    Raises:
        InvalidInput: there is no such directory, and no such model can be downloaded.
    """
    path = local_directory(model)
    if path is not None:
        if revision is not None:
            raise InvalidInput(f"--revision {revision} applies to a Hub id, but {model} is a directory")
        return check_name(path.resolve())
    name, _, pinned = model.partition("@")
    if pinned and revision not in {None, pinned}:
        raise InvalidInput(f"{model} names another revision than --revision {revision}; give one of them")
    return _download(name, revision or pinned or None)


def local_directory(model: str) -> Path | None:
    """Return the directory that a user names; None for what may be a Hub id, which is not looked for.

    Raises:
        InvalidInput: it is neither.
    """
    try:
        path = Path(model).expanduser()
    except RuntimeError:  # ~name, of a user that this machine does not have
        raise InvalidInput(
            f"{model} names the home of a user who is not known here; give a directory"
        ) from None
    if path.is_dir():
        return path
    if path.exists():
        kind = "a GGUF file, and kvfold reads safetensors" if path.suffix == ".gguf" else "a file"
        raise InvalidInput(f"{model} is {kind}; give the directory that holds config.json")
    if model.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(model):
        raise InvalidInput(f"{model} is not a directory, and not a Hub id of the form org/name")
    return None


def check_name(path: Path) -> Path:
    """Return a path that a record can hold: one in UTF-8.

    Raises:
        InvalidInput: it is not in UTF-8.
    """
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidInput(f"the path {printable(path)} is not UTF-8; rename the directory") from None
    return path


def commit_of(directory: Path) -> str | None:
    """Return the commit that a directory of the Hub's cache holds; None for any other directory."""
    inside_cache = directory.parent.name == "snapshots" and directory.parent.parent.name.startswith(
        "models--"
    )
    return directory.name if inside_cache else None


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import errors, snapshot_download

    refusals = {
        errors.RepositoryNotFoundError: "is neither a directory nor a model on the Hub that you may read",
        errors.RevisionNotFoundError: f"has no revision {revision}; name a branch, tag or commit of it",
        errors.LocalEntryNotFoundError: "is not a directory here, not in the local Hub cache, and the Hub "
        "cannot be reached; give a directory",
    }
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_WANTED)).resolve()
    except Exception as error:  # of a connection that breaks and of any answer, by several libraries
        for kind, sentence in refusals.items():
            if isinstance(error, kind):
                raise InvalidInput(f"{name} {sentence}") from None
        if isinstance(error, errors.HfHubHTTPError | errors.HFValidationError):
            raise InvalidInput(f"{name} could not be downloaded: {str(error).splitlines()[0]}") from None
        of_network = isinstance(error, ConnectionError | TimeoutError | socket.gaierror)
        of_machine = getattr(error, "errno", None) is not None and not of_network
        if of_machine or isinstance(error, _OF_CODE):
            raise
        raise InvalidInput(
            f"{name} could not be downloaded ({plain_reason(error)}); run the same command again, which "
            "keeps what has arrived"
        ) from None


def plain_reason(error: BaseException) -> str:
    """Return an error's message on one line, without addresses."""
    text = printable(" ".join(re.sub(r"\w+://\S+", "its address", str(error)).split()))
    return text[:300] or type(error).__name__
