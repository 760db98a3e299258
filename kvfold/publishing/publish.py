"""`kvfold publish`: upload of a checkpoint with its model card to the Hub, in one commit.

The files are chosen and checked on this machine, here and in parcel.py; upload.py sends them.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ..core.command_options import read_options, takes
from ..core.console import Command, notice, show_json, show_table, show_text
from ..core.errors import InvalidInput
from ..core.option_types import Place
from ..core.settings import Settings
from ..core.untrusted import printable
from ..results import Published

if TYPE_CHECKING:
    from ..engines.verify import VerificationReport
    from .parcel import Publication


def prepare(directory: Path, repository: str, private: bool = False) -> Publication:
    """Return the publication of a checkpoint, without using the network.

    Raises:
        InvalidInput: the repository's name is invalid, kvfold did not write the checkpoint, a file of it
            cannot be sent, or its card or its eval.json cannot be read.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    from ..checkpoints.card import FILE as CARD
    from ..checkpoints.eval_json import FILE as EVALUATION
    from ..checkpoints.eval_json import measured_by
    from ..checkpoints.identity import hashes_of, identity
    from ..checkpoints.other_forms import without_config
    from ..checkpoints.record import FILE as RECORD
    from ..checkpoints.record import other_weights, read_record
    from ..convert.write.model_card import make_card
    from .local_paths import without_paths
    from .parcel import Publication, choose_files

    owner, _, title = repository.partition("/")
    try:
        validate_repo_id(repository)
    except HFValidationError:
        title = ""
    if not (owner and title):
        raise InvalidInput(
            f"{repository!r} is not a repository; write owner/name with letters, digits, '-', '_' and '.', "
            f"at most 96 in total"
        )
    if not (directory / "config.json").is_file():
        raise InvalidInput(without_config(directory))
    record = read_record(directory)
    if record is None:
        raise InvalidInput(
            f"{directory} has no {RECORD}: kvfold publishes what kvfold convert or distill wrote; if it is "
            f"one of these, trained further with another tool, copy {RECORD} of that checkpoint into it"
        )
    hashes = hashes_of(directory)
    further = other_weights(directory, hashes)
    evaluation = measured_by(directory)
    place, out = shlex.quote(str(directory)), shlex.quote(str(directory / EVALUATION))
    measure = f"kvfold eval {place} --text FILE --out {out}"
    if further and evaluation is not None and evaluation.checkpoint.identity != identity(hashes):
        raise InvalidInput(
            f"{directory / EVALUATION} was measured on other weights than {directory} has now; remove it, "
            f"and measure again: {measure}"
        )
    card = make_card(directory, record, title, repository, evaluation, further=bool(further))
    files, left_out = choose_files(directory, str(card))
    contents = without_paths(directory, files)
    files |= {name: len(content) for name, content in contents.items()}
    notices = [further] if further else []
    if evaluation is None:
        there = " after removing the eval.json that is there" if (directory / EVALUATION).exists() else ""
        notices.append(f"the card has no perplexity; measure it first{there}: {measure}")
    if not card.data.get("license"):
        notices.append(
            f"the source does not say its licence; name it as `license:` in the metadata of "
            f"{directory / CARD}"
        )
    if not card.data.get("base_model"):
        notices.append(
            f"the source was a directory; name its Hub id as `base_model:` in the metadata of "
            f"{directory / CARD}"
        )
    return Publication(directory, repository, private, str(card), files, tuple(notices), left_out, contents)


def _verified(directory: Path, asked: str | None) -> VerificationReport:
    """Verify a checkpoint by the rules and, where possible or asked for, by a run against its source."""
    from ..checkpoints.record import directory_at, read_record
    from ..engines.fresh_process import NotRun, reason_of
    from ..engines.verify import verify

    record = read_record(directory)
    is_available = record is not None and directory_at(record["source"]["path"]) is not None
    if asked == "lint" or (asked is None and not is_available):
        return verify(directory, run=False)
    try:
        return verify(directory)
    except InvalidInput as mistake:
        if asked is None:
            notice(f"the checkpoint was not run against its source: {reason_of(mistake)}")
            return verify(directory, run=False)
        if isinstance(mistake, NotRun):
            raise NotRun(mistake.reason, "--verify lint") from None
        raise


class PublishRequest(Settings):
    """A publication as a user asks for it: `kvfold publish` takes its fields as options."""

    directory: Place
    """The checkpoint, which kvfold wrote; it is not changed."""
    repository: str
    """`owner/name` of the Hub."""
    private: bool = False
    """Make the repository private. Default: the owner's setting."""
    verify: Literal["full", "lint"] | None = None
    """`lint` checks the rules of `kvfold verify`, `full` also runs the checkpoint against its source.
    Default: full where the source is available."""
    dry_run: bool = False
    """Show the card and the files; upload nothing and do not use the network."""


def release(asked: PublishRequest) -> Published:
    """Check a checkpoint and upload it, unless the check fails or this is a dry run.

    Raises:
        InvalidInput: the checkpoint, the name or the repository cannot be used, or the Hub cannot be reached.
    """
    from .upload import publish

    publication = prepare(asked.directory, asked.repository, asked.private)
    report = _verified(asked.directory, asked.verify)
    commit: str | None = None
    removed: tuple[str, ...] = ()
    if not report.failures:
        for text in publication.notices:
            notice(text)
        if not asked.dry_run:
            commit, removed = publish(publication)
    return Published(
        repository=asked.repository,
        card=publication.card,
        files=publication.sizes,
        commit=commit,
        removed=removed,
        notices=publication.notices,
        left_out=publication.left_out,
        verification=report,
    )


@click.command("publish", cls=Command)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("repository", metavar="REPO")
@takes(PublishRequest, without=("directory", "repository"))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def main(as_json: bool, **options: Any) -> None:
    """Publish the checkpoint in DIRECTORY as the repository REPO (owner/name) of the Hub.

    The checkpoint is verified first; exit code 3 means that kvfold verify fails. It is then uploaded in one
    commit with a model card made from kvfold.json and, where there is one, DIRECTORY/eval.json (written by
    `kvfold eval --out DIRECTORY/eval.json`). A README.md of your own keeps its text. In the copies of
    kvfold.json, eval.json and reports that are uploaded, names stand for absolute paths. DIRECTORY is not
    changed. The same command resumes an interrupted upload. Only the files of a checkpoint and kvfold's
    measurements of it are uploaded; the others are listed as left out.
    """
    from ..engines.verify import FAILED

    asked = read_options(PublishRequest, options)
    directory, repository, private = asked.directory, asked.repository, asked.private
    found = release(asked)
    if found.verification.failures:
        failures = "; ".join(found.verification.failures)
        click.echo(
            printable(f"Error: {directory} does not pass kvfold verify, so nothing was uploaded: {failures}"),
            err=True,
        )
        raise SystemExit(FAILED)
    if as_json:
        show_json(
            {
                "repository": repository,
                "private": private,
                "card": found.card,
                "files": found.files,
                "left_out": found.left_out,
                "commit": found.commit,
                "removed": found.removed,
                "verify": found.verification.to_dict(),
            }
        )
    elif asked.dry_run:
        show_text(found.card.expandtabs())
        rows = [(name, f"{size:,}") for name, size in found.files.items()]
        show_table(f"{found.repository} (dry run)", ("file", "bytes"), rows)
        if found.left_out:
            show_table("Left out", ("file", ""), list(found.left_out.items()))
        kind = "private repository" if private else "repository"
        size = sum(found.files.values()) / 1e6
        show_text(
            f"{len(rows)} files, {size:,.1f} MB, in one commit to {found.repository}; the {kind} is "
            f"created if it does not exist"
        )
    else:
        removed = f", {', '.join(found.removed)} removed" if found.removed else ""
        show_text(
            f"Published {directory} as {repository} at commit {found.commit}: {len(found.files)} "
            f"files{removed}"
        )
        if found.left_out:
            show_text(f"Left out: {', '.join(found.left_out)}")
