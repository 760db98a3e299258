"""A publication's way to the Hub: large files one after another, then one commit that shows them all.

Files stay with the server before anything refers to them: an upload that was cut off goes on with the file it
was at, and the repository never holds half a checkpoint. Only the public interface of huggingface_hub is
used, the same in 1.5 and 2.4.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.errors import InvalidInput
from .parcel import WEIGHTS, Publication

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

RESUME = "run the same command again: files that arrived are not sent again"


@dataclass(frozen=True)
class Published:
    """What became of it.

    The commit, and files that were removed because they belong to weights sent earlier.
    """

    commit: str
    removed: tuple[str, ...]


def publish(publication: Publication) -> Published:
    """Upload a publication; what the repository has already is not sent again.

    The token is the one that huggingface_hub finds (HF_TOKEN, or what `hf auth login` keeps).

    Raises:
        InvalidInput: there is no token, it may not write there, the repository holds something else, or the
        Hub cannot be
            reached or fails.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    api, repository = HfApi(), publication.repository
    if not sys.stderr.isatty():
        disable_progress_bars()  # they would be lines upon lines
    with _failures(publication):
        api.whoami()
        _check_card(api, publication.card)
        api.create_repo(repository, private=publication.private or None, exist_ok=True)
        info = api.model_info(repository)
        there = {sibling.rfilename for sibling in info.siblings or []}
        _check_repository(publication, there, bool(info.private))
        if "README.md" in there:
            _check_text(api, publication)
        removed = tuple(sorted(name for name in there - publication.sizes.keys() if WEIGHTS.fullmatch(name)))
        return Published(_upload(api, publication, removed, info.sha), removed)


def _upload(api: HfApi, publication: Publication, removed: tuple[str, ...], parent: str | None) -> str:
    """The commit with all files, of which the large ones are sent first."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    additions = [CommitOperationAdd(name, str(publication.directory / name)) for name in publication.files]
    large = [addition for addition in additions if addition.path_in_repo.endswith(".safetensors")]
    for addition in _told(large, publication.files):
        api.preupload_lfs_files(publication.repository, [addition], free_memory=False)
    card = CommitOperationAdd("README.md", publication.card.encode())
    commit = api.create_commit(
        publication.repository,
        [card, *additions, *map(CommitOperationDelete, removed)],
        commit_message=f"Publish {publication.directory.resolve().name} with kvfold",
        parent_commit=parent,
    )
    return str(commit.oid)


def _told(additions: list[CommitOperationAdd], sizes: dict[str, int]) -> Iterator[CommitOperationAdd]:
    """Files with a line for each where there is no terminal; on one the library shows its own bars."""
    total, sent = sum(sizes[addition.path_in_repo] for addition in additions), 0
    for number, addition in enumerate(additions, 1):
        yield addition
        sent += sizes[addition.path_in_repo]
        if not sys.stderr.isatty():
            share = f"{number}/{len(additions)} files, {sent / 1e9:,.3f} of {total / 1e9:,.3f} GB"
            print(f"on the Hub: {share}", file=sys.stderr, flush=True)


def _check_card(api: HfApi, card: str) -> None:
    """Ask the Hub whether it takes the card's metadata, before anything large is sent.

    Not by ModelCard.validate, which before huggingface_hub 2 asks a host of its own instead of the endpoint.
    """
    from huggingface_hub.utils import get_session, hf_raise_for_status

    answer = get_session().post(
        f"{api.endpoint}/api/validate-yaml", json={"content": card, "repoType": "model"}
    )
    if answer.status_code == 400:
        raise InvalidInput(
            f"the Hub refuses the metadata of README.md: {' '.join(answer.text.split())[:300]}"
        )
    hf_raise_for_status(answer)


def _check_repository(publication: Publication, there: set[str], private: bool) -> None:
    if publication.private and not private:
        raise InvalidInput(
            f"--private: {publication.repository} exists and is public; make it private there, or name "
            f"another"
        )
    if "kvfold.json" not in there and any(
        name == "config.json" or name.endswith(".safetensors") for name in there
    ):
        raise InvalidInput(
            f"{publication.repository} holds a model that kvfold did not publish; name another repository"
        )


def _check_text(api: HfApi, publication: Publication) -> None:
    """Refuse to replace a card that somebody wrote on the Hub by one that is ours."""
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
            f"README.md of {publication.repository} was written there; put it into "
            f"{publication.directory} to keep its text, "
            "or delete it there"
        )


@contextmanager
def _failures(publication: Publication) -> Iterator[None]:
    """What can go wrong between here and the Hub as sentences."""
    from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except LocalTokenNotFoundError:
        raise InvalidInput(
            "there is no token for the Hub; set HF_TOKEN to one that may write, or run: hf auth login"
        ) from None
    except OfflineModeIsEnabled:
        raise InvalidInput("HF_HUB_OFFLINE is set, so that nothing can be uploaded; unset it") from None
    except HTTPError as error:
        raise InvalidInput(_sentence(publication.repository, error)) from None
    except ValueError as error:  # what the Hub says of single files, such as a full quota
        raise InvalidInput(f"the Hub refuses the upload: {_plain(error)}") from None
    except (RuntimeError, ConnectionError, TimeoutError, PermissionError) as error:
        if getattr(error, "filename", None) is not None:
            raise  # a file of this machine
        # How the library's threads pass on what happened in them, and how hf_xet says all that happens to it.
        raise InvalidInput(_sentence(publication.repository, error.__cause__ or error)) from None


def _sentence(repository: str, error: BaseException) -> str:
    """Why the Hub refused, without its address."""
    response = getattr(error, "response", None)
    told = re.search(r"\((\d{3}) [A-Z]", str(error)) if response is None else None  # as hf_xet puts it
    status = int(told[1]) if told else getattr(response, "status_code", None)
    if status is None:
        return f"the Hub cannot be reached ({_plain(error)}); when it can, {RESUME}"
    if status == 401 and response is not None and "whoami" in str(response.url):
        return "the Hub does not know the token; set HF_TOKEN to one that may write, or run: hf auth login"
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


def _plain(error: BaseException) -> str:
    """What an error says, in a line, without addresses."""
    return " ".join(re.sub(r"\w+://\S+", "its address", str(error)).split())[:300] or type(error).__name__
