"""Upload of a publication to the Hub by huggingface_hub's `create_commit`: all files in one commit.

The server keeps large files before a commit refers to them. The same command therefore resumes an interrupted
upload, and the repository never holds half a checkpoint.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..core.console import is_terminal
from ..core.errors import InvalidInput
from ..core.hub import plain_reason
from .parcel import WEIGHTS, Publication

if TYPE_CHECKING:
    from huggingface_hub import HfApi

RESUME = "run the same command again: files that arrived are not sent again"


def publish(publication: Publication) -> tuple[str, tuple[str, ...]]:
    """Upload a publication; files that the repository already has are not sent again.

    The token is the one that huggingface_hub finds: HF_TOKEN, or the one that `hf auth login` stored.

    Returns:
        The id of the commit, and the files of weights sent earlier that it removed.

    Raises:
        InvalidInput: there is no token, it may not write there, the repository holds another model, or the
            Hub cannot be reached or fails.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils import disable_progress_bars

    api, repository = HfApi(), publication.repository
    if not is_terminal(sys.stderr):
        disable_progress_bars()  # they would print many lines
    with _failures(publication):
        api.whoami()
        api.create_repo(repository, private=publication.private or None, exist_ok=True)
        info = api.model_info(repository)
        there = {sibling.rfilename for sibling in info.siblings or []}
        _check_repository(publication, there, bool(info.private))
        if "README.md" in there:
            _check_text(api, publication)
        removed = tuple(sorted(name for name in there - publication.sizes.keys() if WEIGHTS.fullmatch(name)))
        written = {**publication.contents, "README.md": publication.card.encode()}
        files = ((name, written.get(name, publication.directory / name)) for name in publication.sizes)
        commit = api.create_commit(
            repository,
            [
                *(CommitOperationAdd(name, content) for name, content in files),
                *map(CommitOperationDelete, removed),
            ],
            commit_message=f"Publish {publication.directory.resolve().name} with kvfold",
            parent_commit=info.sha,
        )
    return str(commit.oid), removed


def _check_repository(publication: Publication, there: set[str], private: bool) -> None:
    if publication.private and not private:
        raise InvalidInput(
            f"--private: {publication.repository} exists and is public; make it private on the Hub, or "
            f"name another repository"
        )
    if "kvfold.json" not in there and any(
        name == "config.json" or name.endswith(".safetensors") for name in there
    ):
        raise InvalidInput(
            f"{publication.repository} holds a model that kvfold did not publish; name another repository"
        )


def _check_text(api: HfApi, publication: Publication) -> None:
    """Refuse to replace a card that was written on the Hub with a generated one."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    from ..convert.write.model_card import without_metadata, written_by_kvfold

    address = f"{api.endpoint}/{publication.repository}/resolve/main/README.md"
    answer = get_session().get(address, headers=build_hf_headers())
    hf_raise_for_status(answer)
    theirs = without_metadata(answer.text)
    if (
        theirs.strip()
        and not written_by_kvfold(theirs)
        and written_by_kvfold(without_metadata(publication.card))
    ):
        raise InvalidInput(
            f"README.md of {publication.repository} was written on the Hub; copy it into "
            f"{publication.directory} to keep its text, or delete it there"
        )


@contextmanager
def _failures(publication: Publication) -> Iterator[None]:
    from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except InvalidInput:
        raise
    except LocalTokenNotFoundError:
        raise InvalidInput(
            "there is no token for the Hub; set HF_TOKEN to a token with write access, or run: hf auth login"
        ) from None
    except OfflineModeIsEnabled:
        raise InvalidInput("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it") from None
    except ValueError as error:  # an error about a single file, such as an exceeded quota
        raise InvalidInput(f"the Hub refuses the upload: {plain_reason(error)}") from None
    except (HTTPError, RuntimeError, ConnectionError, TimeoutError, PermissionError) as error:
        if getattr(error, "filename", None) is not None:
            raise  # an error of a local file
        # The library's threads pass on their errors as these, and hf_xet raises all its errors as these.
        told = error if isinstance(error, HTTPError) else error.__cause__ or error
        raise InvalidInput(_sentence(publication.repository, told)) from None


def _sentence(repository: str, error: BaseException) -> str:
    """Return the reason of a failure, without the Hub's address."""
    response = getattr(error, "response", None)
    # The form of hf_xet's messages.
    match = re.search(r"\((\d{3}) [A-Z]", str(error)) if response is None else None
    status = int(match[1]) if match else getattr(response, "status_code", None)
    if status is None:
        return f"the Hub cannot be reached ({plain_reason(error)}); when it can, {RESUME}"
    if status == 401 and response is not None and "whoami" in str(response.url):
        return "the Hub does not know the token; set HF_TOKEN to one with write access, or run: hf auth login"
    if status in {401, 403, 404}:
        return (
            f"the token may not write to {repository}; name a repository of your own, or use a token "
            f"with write access to it"
        )
    if status == 412:
        return f"{repository} changed during the upload; {RESUME}"
    reason = str(
        getattr(error, "server_message", None) or getattr(response, "reason_phrase", type(error).__name__)
    )
    return f"the Hub answered {status} ({' '.join(reason.split())}); {RESUME}"
