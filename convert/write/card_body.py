"""What a model card says to people.

The cache before and after, what was measured, how it was made, how to load it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checkpoints.eval_json import EvalSummary, ModelSummary

if TYPE_CHECKING:
    from ..decide.lint import Finding, Written

CONTEXTS = (4096, 32768, 131072)  # tokens at which a cache's size is told, as kvfold convert --dry-run does
# of transformers: the first release whose cache keeps a latent instead of expanded keys and values
LATENT_SINCE = "5.15"
_KINDS = {
    "gqa": "grouped-query attention (GQA)",
    "mqa": "multi-query attention (MQA)",
    "mla": "latent attention (MLA)",
}
_ENGINES = {"transformers": "transformers", "vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp"}


def card_body(
    directory: Path,
    record: dict[str, Any],
    source: str,
    title: str,
    place: str,
    evaluation: EvalSummary | None,
) -> str:
    """The card below its metadata, in Markdown.

    Args:
        directory: the checkpoint, with all its files but the card.
        record: its kvfold.json; what it does not hold is not told.
        source: what its source is called.
        title: what it is called.
        place: what to give engines to load it.
        evaluation: what was measured of it.
    """
    from ..decide.lint import open_written

    written = open_written(directory)
    parts = [
        f"# {title}",
        _opening(record, source),
        *_cache(record, written),
        *_measured(record, evaluation),
        *_making(record, source),
        *_loading(written, place),
    ]
    return "\n" + "\n\n".join(parts) + "\n"


def _opening(record: dict[str, Any], source: str) -> str:
    kind = _KINDS.get(record.get("target", {}).get("name", ""), "a smaller KV cache")
    share = (
        f", which caches {record['cache']['ratio']:.1%} of what its source caches"
        if "cache" in record
        else ""
    )
    trained = " and distilled against it" if record["stage"] == "distill" else ", without training"
    return f"`{source}` folded to {kind} by kvfold {record.get('kvfold', '')}{share}; converted{trained}."


def _cache(record: dict[str, Any], written: Written) -> list[str]:
    if "cache" not in record:
        return []
    sides = [record["cache"]["before"], record["cache"]["after"]]
    rows = [
        ["elements per token and layer", *(f"{side['elements_per_token_per_layer']:,}" for side in sides)],
        [
            f"bytes per token ({record.get('dtype', 'as stored')})",
            *(f"{side['bytes_per_token']:,}" for side in sides),
        ],
    ]
    limit = int(written.get("max_position_embeddings", CONTEXTS[0]))
    for length in [n for n in CONTEXTS if n <= limit] or [limit]:
        rows.append(
            [
                f"at {length:,} tokens",
                *(f"{side['bytes_per_token'] * length / 1e6:,.1f} MB" for side in sides),
            ]
        )
    return ["## KV cache", _table(["", "source", "this model"], rows)]


def _measured(record: dict[str, Any], evaluation: EvalSummary | None) -> list[str]:
    predicted = record.get("predicted_loss")
    words = "" if predicted is None else (
        f"Predicted on calibration text, before any training: {predicted:.4f} nats a token lost. Every "
        f"layer was measured "
        "alone, so that this ranks folds and is no measurement of the model."
    )  # fmt: skip
    if evaluation is None:
        return ["## Quality", words or "Nothing was measured."]
    protocol, fidelity = evaluation.protocol, evaluation.fidelity
    models = [
        ("source", evaluation.teacher),
        ("before distillation", evaluation.parent),
        ("this model", evaluation.student),
    ]
    rows = [_row(name, model) for name, model in models if model is not None]
    told = [
        f"Measured by `kvfold eval` in one run, on the same windows: `{protocol.name}`, "
        f"{protocol.windows} windows of "
        f"{protocol.window} tokens, {protocol.scored_tokens:,} scored, SHA-256 of the text "
        f"`{protocol.text_sha256[:16]}`.",
        _table(["", "perplexity", "live cache, elements per token and layer", "computed in"], rows),
    ]
    if fidelity is not None:
        same = f"the same most probable token in {fidelity.same_top1.mean:.1%}"
        told.append(f"KL to the source {fidelity.kl.mean:.4f} nats a token, {same} of positions.")
    if evaluation.recovered_share.value is not None:
        told.append(
            f"Distillation recovered {evaluation.recovered_share.value:.1%} of what the conversion had lost."
        )
    return ["## Quality", *told, *([words] if words else [])]


def _row(name: str, model: ModelSummary) -> list[str]:
    cached = "" if model.cache is None else f"{model.cache.elements_per_token_per_layer:,.10g}"
    return [name, f"{model.perplexity:.4g}", cached, model.dtype]


def _making(record: dict[str, Any], source: str) -> list[str]:
    import yaml

    commands = [record["command"]] if "command" in record else []
    recipe = []
    if "distill" in record:
        commands.append("kvfold distill recipe.yaml")
        settings = yaml.safe_dump(
            record["distill"].get("recipe", {}), sort_keys=False, allow_unicode=True
        ).strip()
        recipe = [f"with this recipe.yaml:\n\n```yaml\n{settings}\n```"]
    calibration = record.get("calibration")
    text = (
        "none, weights alone"
        if calibration is None
        else f"{calibration['text']}, {calibration['tokens']:,} tokens"
    )
    target = ", ".join(f"{key} {value}" for key, value in record.get("target", {}).items())
    revision = record["source"].get("revision")
    rows = [
        ["source", source + (f" at {revision}" if revision else "")],
        *(
            [["target", target], ["method", record.get("method", "")], ["calibration", text]]
            if target
            else []
        ),
    ]
    shown = "```console\n" + "\n".join(f"$ {command}" for command in commands) + "\n```"
    rest = "`kvfold.json` has the rest: hashes of the source's files, every layer."
    return ["## How it was made", shown, *recipe, _table(["", ""], rows), rest]


def _loading(written: Written, place: str) -> list[str]:
    """A paragraph an engine: how to load, or why not, from the rules of rules.py."""
    from ..decide.engine_rules import lint

    told = ["## Loading"]
    for engine, name in _ENGINES.items():
        found = lint(written.directory, [engine])
        failing = [finding for finding in found if finding.fails]
        told.append(f"### {name}")
        told += [] if failing else [_how(engine, written, place)]
        told += [_reasons(failing or found)] if found else []
        told += (
            []
            if failing or engine == "transformers"
            else ["kvfold did not run it there; no rule that it knows forbids it."]
        )
    return told


def _reasons(findings: Sequence[Finding]) -> str:
    lines = []
    for finding in findings:
        effect = "" if finding.effect == "note" else f"{finding.effect}: "
        lines.append(f"- {effect}{finding.sentence} ({finding.learned})")
    return "\n".join(lines)


def _how(engine: str, written: Written, place: str) -> str:
    own_code = written.layout in {"decoupled", "intact"}
    if engine == "transformers":
        trust = ", trust_remote_code=True" if own_code else ""
        since = (
            ""
            if written.layout == "grouped"
            else f"  # {LATENT_SINCE} or later keeps the latent compressed in its cache"
        )
        return (
            f"```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer{since}\n\n"
            f'tokenizer = AutoTokenizer.from_pretrained("{place}")\n'
            f'model = AutoModelForCausalLM.from_pretrained("{place}", dtype="auto"{trust})\n```'
        )
    trust = " --trust-remote-code" if own_code else ""
    command = {
        "vllm": f"vllm serve {place}{trust}",
        "sglang": f"python -m sglang.launch_server --model-path {place}{trust}",
        "llama.cpp": "python convert_hf_to_gguf.py DIRECTORY --outtype bf16",
    }[engine]
    return f"```console\n$ {command}\n```"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
