"""The model card (README.md): metadata for the Hub above a text for readers.

Its content comes from kvfold.json, from eval.json where there is one, and from the rules of `kvfold verify`.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checkpoints.card import FILE, LICENSE_FIELDS, license_of, read_card
from ...checkpoints.directory import read_config
from ...checkpoints.eval_json import EvalReport
from ...checkpoints.record import directory_at, hub_id, is_distilled
from ...core.errors import InvalidInput
from ..families.recognition import is_multimodal
from .card_body import card_body, scheme_of

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCard

_MARK = re.compile(r"\n<!-- written by kvfold ([0-9a-f]{16}): an edited card is kept as it is -->\s*\Z")


def write_card(directory: Path, record: dict[str, Any]) -> None:
    """Write README.md into a new checkpoint, after all its other files.

    The card does not depend on the directory's name, so the same fold twice gives the same bytes.
    """
    kind = record["target"]["name"].upper() if "target" in record else "a distilled model"
    title = f"{source_name(record['source'])} as {kind}"
    if scheme := scheme_of(directory, record):
        form = "" if "target" not in record else f" as {kind}"
        title = f"{source_name(record['source'])}{form} in {scheme.upper()}"
    text = str(make_card(directory, record, title, "."))
    (directory / FILE).write_text(text, encoding="utf-8", newline="")


def make_card(
    directory: Path,
    record: dict[str, Any],
    title: str,
    place: str,
    evaluation: EvalReport | None = None,
    *,
    further: bool = False,
) -> ModelCard:
    """Return the card of a checkpoint.

    A README.md whose text was written or edited by others keeps its text. Existing metadata is always kept:
    missing fields are added, tags are merged, and measurements of the same kind on the same text are
    replaced.

    Args:
        directory: the checkpoint; nothing is written to it.
        record: its kvfold.json.
        title: name of the checkpoint.
        place: the repository or directory that engines load it from.
        evaluation: its measured quality.
        further: the weights are not those that the record describes, as after training with another tool.

    Raises:
        InvalidInput: the metadata of README.md cannot be read, or the directory holds no checkpoint.
    """
    from huggingface_hub import ModelCard

    card, known = read_card(directory), metadata(directory, record, further=further)
    if card is None or written_by_kvfold(card.text):
        body = card_body(
            directory, record, source_name(record["source"]), title, place, evaluation, further=further
        )
        card = ModelCard("---\n{}\n---\n") if card is None else card
        card.text = f"{body}\n<!-- written by kvfold {_digest(body)}: an edited card is kept as it is -->\n"
    data = card.data
    licensed = data.get("license") is not None  # its name and link are then kept too
    for field, value in known.items():
        if data.get(field) is None and not (licensed and field in LICENSE_FIELDS):
            data[field] = value
    tags = data.get("tags") or []
    data["tags"] = list(dict.fromkeys([*([tags] if isinstance(tags, str) else tags), *known["tags"]]))
    if evaluation is not None:
        results = _results(evaluation)
        theirs = [
            old for old in data.get("eval_results") or [] if not any(map(old.is_equal_except_value, results))
        ]
        data["eval_results"], data["model_name"] = [*theirs, *results], data.get("model_name") or title
    return card


def metadata(directory: Path, record: dict[str, Any], *, further: bool = False) -> dict[str, Any]:
    """Return the card's metadata without measurements; arguments are those of `make_card`."""
    target, distilled = record.get("target", {}).get("name"), is_distilled(record)
    scheme, config = scheme_of(directory, record), read_config(directory)
    pipeline = "text-generation"
    if is_multimodal(config):
        pipeline = "image-text-to-text" if "vision_config" in config else "audio-text-to-text"
    base, source = hub_id(record["source"]), directory_at(record["source"]["path"]) or directory
    tags = ["kvfold", "kv-cache", *([target] if target else [])]
    tags += ["latent-attention"] if target == "mla" else []
    try:
        theirs = read_card(source)
    except InvalidInput:  # the source may have changed since the fold; its card is only read for its licence
        theirs = None
    relation = "finetune" if distilled or further else ""
    if scheme:
        relation = "quantized"
    return {
        **license_of(directory, source, [] if theirs is None else [theirs.data.to_dict()]),
        "library_name": "transformers",
        "pipeline_tag": pipeline,
        **({} if base is None else {"base_model": base}),
        # No relation means "converted": it is left to be inferred unless the weights were trained.
        **({"base_model_relation": relation} if relation and base else {}),
        "tags": tags + (["distillation"] if distilled else []) + ([scheme] if scheme else []),
    }


def source_name(source: dict[str, Any]) -> str:
    """Return the Hub id of a record's source, or else its name."""
    return hub_id(source) or str(source["name"])


def written_by_kvfold(text: str) -> bool:
    """Return whether a card's text is as kvfold wrote it, by the hash at its end."""
    text = text.replace("\r\n", "\n")
    match = _MARK.search(text)
    return match is not None and match[1] == _digest(text[: match.start()])


def without_metadata(text: str) -> str:
    """Return a card's text below its metadata."""
    return re.sub(
        r"\A---\n.*?^---\n", "", text.replace("\r\n", "\n"), count=1, flags=re.DOTALL | re.MULTILINE
    )


def _digest(body: str) -> str:
    return hashlib.sha256(body.strip().encode()).hexdigest()[:16]


def _results(evaluation: EvalReport) -> list[EvalResult]:
    from huggingface_hub import EvalResult

    protocol = evaluation.protocol
    assert protocol is not None, "a perplexity is one of a text"
    stored = {} if evaluation.cache_dtype is None else {"cache_dtype": evaluation.cache_dtype}
    values = {"perplexity": ("Perplexity", evaluation.ppl.student.perplexity)}
    if evaluation.fidelity is not None:
        values["kl_divergence"] = ("KL to the source, nats per token", evaluation.fidelity.kl.mean)
        values["same_top1"] = ("Same most probable token as the source", evaluation.fidelity.same_top1.mean)
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=re.split(r"[\s:]", protocol.name)[0].lower(),
            dataset_name=protocol.name,
            dataset_args={
                "text_sha256": protocol.text_sha256,
                "window": protocol.window,
                "windows": protocol.windows,
                **stored,
            },
            metric_type=kind,
            metric_name=name,
            metric_value=value,
        )
        for kind, (name, value) in values.items()
    ]
