"""The text of a model card: cache before and after, quality, how it was made, how to load it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checkpoints.cost_blocks import CacheBlock
from ...checkpoints.eval_json import EvalReport
from ...checkpoints.quantised.packed_checkpoint import is_quantised
from ...checkpoints.record import is_distilled
from ...core.units import show_kinds
from ...core.untrusted import printable
from ...engines.rules.engine_names import NAMES

if TYPE_CHECKING:
    from ...engines.rules.rule_types import Written

CONTEXTS = (4096, 32768, 131072)  # tokens at which the cache's size is shown, as in kvfold convert --dry-run
# The first release of transformers whose cache keeps a latent instead of expanded keys and values.
LATENT_SINCE = "5.15"
_TRAINING = (
    "Train it further like its source, with `transformers.Trainer`, TRL or PEFT. For LoRA, "
    "`target_modules` are `all-linear`, or some of {}."
)
# PEFT takes a dense model of this class for one with experts, and leaves its MLP out of `target_modules`.
_STOCK_TRAINING = (
    "Train it further like its source, with `transformers.Trainer`, TRL or PEFT. For LoRA, "
    "`target_modules` are {}, and `target_parameters` are {}: PEFT 0.21 leaves the MLP of this class out of "
    "`all-linear`."
)
_LINEAR = (
    "Train it further with `kvfold distill` only: the norm of its latent is linear by a small scale, which "
    "optimizers at usual rates, float16 and the quantisers of other tools destroy."
)
_FURTHER = (
    " Its weight files are not those that kvfold wrote: another tool saved them later, and what it "
    "changed, such as by training, is not among the commands below."
)
_KINDS = {
    "gqa": "grouped-query attention (GQA)",
    "mqa": "multi-query attention (MQA)",
    "mla": "latent attention (MLA)",
}
_ENGINES = ("transformers", "vllm", "vllm+kvfold", "sglang", "llama.cpp", "mlx")
# Marks of Markdown: not within a word.
_MARKS = re.compile(r"[\\`*~&\[\]<>]|^[#+-]|(?<![^\W_])_|_(?![^\W_])")
_ADDRESS = re.compile(r"://|www\.|@[\w-]+\.|mailto:|xmpp:", re.IGNORECASE)


def card_body(
    directory: Path,
    record: dict[str, Any],
    source: str,
    title: str,
    place: str,
    evaluation: EvalReport | None,
    *,
    further: bool = False,
) -> str:
    """Return the card below its metadata, in Markdown; arguments are those of `make_card`.

    Parts that the record lacks are left out. `source` is the name of the source.
    """
    from ...engines.rules.rule_types import open_written

    written = open_written(directory)
    parts = [
        f"# {as_words(title)}",
        _opening(record, source, scheme_of(directory, record), further=further),
        *_cache(record, written),
        *_measured(record, evaluation, further=further),
        *_making(record, source),
        *_loading(written, place),
    ]
    return "\n" + "\n\n".join(parts) + "\n"


def scheme_of(directory: Path, record: dict[str, Any]) -> str | None:
    """Return the scheme of `kvfold quantize`; None without, also where all weights were distilled since."""
    rounded = record.get("quantize")
    return rounded["scheme"] if rounded is not None and is_quantised(directory) else None


def _opening(record: dict[str, Any], source: str, scheme: str | None, *, further: bool) -> str:
    more = _FURTHER if further else ""
    form = "" if scheme is None else as_words(scheme.upper())
    if form and "target" not in record and not is_distilled(record):
        return (
            f"{as_code(source)} with weights in {form}, rounded by kvfold {as_words(record['kvfold'])}.{more}"
        )
    kind = _KINDS.get(record.get("target", {}).get("name", ""), "a smaller KV cache")
    told = f"{as_code(source)} folded to {kind} by kvfold {as_words(record.get('kvfold', ''))}"
    if record.get("cache"):
        told += f", which caches {record['cache']['ratio']:.1%} of what its source caches"
    untrained = "" if further else ", without training"
    told += f"; converted{' and distilled against it' if is_distilled(record) else untrained}."
    if form:
        but = ", but for those that were trained afterwards" if _is_rounded_first(record) else ""
        told += f" Its linear weights are in {form}{but}."
    return told + more


def _is_rounded_first(record: dict[str, Any]) -> bool:
    return "quantize" in record and record["stage"] == "distill"


def _cache(record: dict[str, Any], written: Written) -> list[str]:
    if not record.get("cache"):
        return []
    sides = [record["cache"]["before"], record["cache"]["after"]]
    dtype = as_words(record.get("dtype", "as stored"))
    rows = [
        ["elements per token and layer", *(f"{side['elements_per_token_per_layer']:,}" for side in sides)],
        [f"bytes per token ({dtype})", *(f"{side['bytes_per_token']:,}" for side in sides)],
    ]
    limit = int(written.get("max_position_embeddings", CONTEXTS[0]))
    for length in [n for n in CONTEXTS if n <= limit] or [limit]:
        at = (f"{side['bytes_per_token'] * length / 1e6:,.1f} MB" for side in sides)
        rows.append([f"at {length:,} tokens", *at])
    kinds = record["cache"].get("layers")
    words = [] if not kinds else [
        f"The model has {as_words(show_kinds(kinds))}. These numbers are those of the layers that attend; "
        "the others keep a state of fixed size, as in the source."
    ]  # fmt: skip
    if unlike := record["cache"].get("kinds"):
        each = "; ".join(
            f"{size['layers']} {as_words(kind)} layers cache {size['before']:,} elements per token in the "
            f"source, {size['after']:,} here"
            for kind, size in unlike.items()
        )
        words.append(f"Elements per layer are a mean: {each}.")
    return ["## KV cache", as_table(["", "source", "this model"], rows), *words]


def _measured(record: dict[str, Any], evaluation: EvalReport | None, *, further: bool) -> list[str]:
    predicted = None if further else record.get("predicted_loss")
    words = "" if predicted is None else (
        f"Predicted on calibration text, before any training: {predicted:.4f} nats per token lost. "
        "Every layer was measured alone, so this number ranks folds and does not measure the model."
    )  # fmt: skip
    measured = None if further else record.get("measured_kl")
    if measured is not None:
        tokens = measured["sequences"] * measured["length"]
        words += (
            f" On {tokens:,} tokens of that text, held back from the fit, the predictions of the whole fold "
            f"were {measured['kl']:.4f} nats per token (KL) from the source's; other text may lose more."
        )
    stored = record.get("cache_dtype") or {}
    if words and stored.get("predicted_loss") is not None and stored.get("unprepared") is not None:
        words += (
            f" It is prepared for a cache in {as_words(stored['name'])}: {stored['predicted_loss']:.4f} nats "
            f"are predicted with that, {stored['unprepared']:.4f} without the preparation."
        )
    if evaluation is None:
        return ["## Quality", words or "The quality was not measured."]
    protocol, fidelity = evaluation.protocol, evaluation.fidelity
    assert protocol is not None, "a perplexity is one of a text"
    caches, recovered = evaluation.block("cache", CacheBlock), evaluation.ppl.recovered_share.value
    its_cache = "" if evaluation.cache_dtype is None else f", its cache in {as_words(evaluation.cache_dtype)}"
    rows = []
    for name, role in (
        ("source", "teacher"),
        ("before distillation", "parent"),
        (f"this model{its_cache}", "student"),
    ):
        model, cache = getattr(evaluation.ppl, role), getattr(caches, role, None)
        if model is not None:
            cached = "" if cache is None else f"{cache.elements_per_token_per_layer:,.10g}"
            rows.append([name, f"{model.perplexity:.4g}", cached, as_words(model.dtype)])
    paragraphs = [
        f"Measured by `kvfold eval` in one run, on the same windows: {as_code(protocol.name)}, "
        f"{protocol.windows} windows of {protocol.window} tokens, {protocol.scored_tokens:,} scored, SHA-256 "
        f"of the text {as_code(protocol.text_sha256[:16])}.",
        as_table(["", "perplexity", "live cache, elements per token and layer", "computed in"], rows),
    ]
    if fidelity is not None:
        same = f"the same most probable token in {fidelity.same_top1.mean:.1%}"
        paragraphs.append(f"KL to the source {fidelity.kl.mean:.4f} nats per token, {same} of positions.")
    if recovered is not None:
        trained = "Training" if further else "Distillation"
        paragraphs.append(f"{trained} recovered {recovered:.1%} of what the conversion had lost.")
    return ["## Quality", *paragraphs, *([words] if words else [])]


def _making(record: dict[str, Any], source: str) -> list[str]:
    import yaml

    commands = [record["command"]] if "command" in record else []
    then = [record[stage]["command"] for stage in ("assemble", "quantize") if stage in record]
    recipe, student = [], None
    if "distill" in record:
        named = _named(record["distill"].get("recipe", {}), record, source)
        student = named.get("student")
        if student is not None and student == named.get("output"):  # names of steps of `kvfold migrate`
            named["output"] = f"{student}-distilled"
        then.insert(len(then) if _is_rounded_first(record) else 0, "kvfold distill recipe.yaml")
        settings = yaml.safe_dump(named, sort_keys=False, allow_unicode=True).strip()
        recipe = ["with this recipe.yaml:\n\n" + fenced("yaml", settings)]
    if commands and (fold := _name_of_fold(record, student)):
        commands[0] += f" --out {shlex.quote(fold)}"
    commands += then
    calibration = record.get("calibration")
    text = (
        "none, weights alone"
        if calibration is None
        else f"{as_words(calibration['text'])}, {calibration['tokens']:,} tokens"
    )
    target = as_words(", ".join(f"{key} {value}" for key, value in record.get("target", {}).items()))
    revision = record["source"].get("revision")
    rows = [["source", as_words(source + (f" at {revision}" if revision else ""))]]
    if target:
        rows += [["target", target], ["method", as_words(record.get("method", ""))], ["calibration", text]]
    shown = _commands(commands, record, source)
    search = []
    if record.get("migrate"):
        found_by = _commands([f"{record['migrate']['command']} --out DIR"], record, source)
        search = ["A search found this size:\n\n" + found_by, "These commands make it without the search:"]
    rest = "`kvfold.json` has the details: hashes of the source's files, the losses of every layer."
    if record.get("request", {}).get("ignore_code"):
        rest += (
            " Code that the source has next to its weights was not read: this model computes what "
            "transformers' class of the source's model_type computes."
        )
    return ["## How it was made", *search, shown, *recipe, as_table(["", ""], rows), rest]


def _commands(commands: Sequence[str], record: dict[str, Any], source: str) -> str:
    """Return commands, with names in place of absolute paths, as a block of code."""
    lines = []
    for command in commands:
        words = _split(command)
        named = _named(words, record, source)
        lines.append("$ " + printable(command if named == words else shlex.join(named)))
    return fenced("console", "\n".join(lines))


def _name_of_fold(record: dict[str, Any], student: Any) -> str:
    """Return the directory in which the command after `kvfold convert` finds the fold; "" if unknown."""
    stages = [parent["stage"] for parent in record.get("parents", [])]
    stages += ["assemble" if "assemble" in record else record["stage"]]
    after = stages[stages.index("convert") + 1] if "convert" in stages[:-1] else ""
    if stages.count(after) != 1:  # a record has the newest command of each kind
        return ""
    if after in {"assemble", "quantize"} and after in record:
        return "".join(_split(record[after]["command"])[2:3])
    return student if after == "distill" and isinstance(student, str) else ""


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return []


def _named(value: Any, record: dict[str, Any], source: str) -> Any:
    """Return a text, or texts within lists and mappings, with names in place of absolute paths.

    Paths are of one machine and its user alone; that of the source becomes its name.
    """
    if isinstance(value, list):
        return [_named(item, record, source) for item in value]
    if isinstance(value, dict):
        return {key: _named(item, record, source) for key, item in value.items()}
    if isinstance(value, str) and value.startswith("self+"):
        return "self+" + _named(value.removeprefix("self+"), record, source)
    if not isinstance(value, str) or not Path(value).is_absolute():
        return value
    return source if str(Path(value)) == record["source"]["path"] else Path(value).name or value


def _loading(written: Written, place: str) -> list[str]:
    """Return one section per engine: the command that loads the model, or the reasons why it fails."""
    from ...engines.rules.engine_rules import lint_written
    from ...engines.rules.output_kinds import UNKNOWN

    parts = ["## Loading"]
    for engine in _ENGINES:
        found = lint_written(written, [engine])
        failing = [finding for finding in found if finding.fails]
        parts.append(f"### {NAMES[engine]}")
        is_known = all(finding.effect != UNKNOWN for finding in found)
        if is_known and not failing:
            parts.append(_how(engine, written, place))
        if engine == "transformers" and written.layout in {"stock", "decoupled", "intact"}:
            parts.append(_LINEAR if written.is_linear else _training(written))
        lines = []
        for finding in failing or found:
            effect = "" if finding.effect == "note" else f"{finding.effect}: "
            lines.append(f"- {effect}{as_words(finding.sentence)} ({finding.learned})")
        parts += ["\n".join(lines)] if lines else []
        if is_known and not failing and engine != "transformers":
            parts.append("kvfold did not run the model there; no rule that it knows forbids it.")
    return parts


def _training(written: Written) -> str:
    projections = listed(_weights_next_to(written, "kv_b_proj"))
    if written.layout != "stock":
        return _TRAINING.format(projections)
    inside = [f"mlp.{name}.weight" for name in _weights_next_to(written, "down_proj")]
    return _STOCK_TRAINING.format(projections, listed(inside))


def _weights_next_to(written: Written, known: str) -> list[str]:
    """Return the names of the linear layers in the module of a known one, as adapters take them.

    PEFT refuses any other layer by name: `q_rope_proj` has one matrix per head.
    """
    place = next(name.rpartition(known)[0] for name in written.specs if f".{known}." in name)
    inside = [name.removeprefix(place) for name in written.specs if name.startswith(place)]
    parts = [name.partition(".")[0] for name in inside]
    return [part for part in dict.fromkeys(parts) if "proj" in part and part != "q_rope_proj"]


def _how(engine: str, written: Written, place: str) -> str:
    own_code = written.layout in {"decoupled", "intact"}
    if engine == "transformers" and written.layout.startswith("multimodal"):
        kind = "ImageTextToText" if "vision_config" in written.config else "MultimodalLM"
        return (
            f"```python\nfrom transformers import AutoModelFor{kind}, AutoProcessor\n\n"
            f'processor = AutoProcessor.from_pretrained("{place}")\n'
            f'model = AutoModelFor{kind}.from_pretrained("{place}", dtype="auto")\n```'
        )
    if engine == "transformers":
        trust = ", trust_remote_code=True" if own_code else ""
        since = f"  # {LATENT_SINCE} or later keeps the latent compressed in its cache"
        since = "" if written.layout == "grouped" else since
        return (
            f"```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer{since}\n\n"
            f'tokenizer = AutoTokenizer.from_pretrained("{place}"{trust})\n'
            f'model = AutoModelForCausalLM.from_pretrained("{place}", dtype="auto"{trust})\n```'
        )
    trust = " --trust-remote-code" if own_code else ""
    on_text = " --language-model-only" if written.layout.startswith("multimodal") else ""
    in_vllm = (
        "vllm serve {0}\n"
        "# with the CPU package of vLLM, which has no such command: python -m "
        "vllm.entrypoints.openai.api_server --model {0}"
    )
    command = {
        "vllm": in_vllm.format(f"{place}{trust}{on_text}"),
        "vllm+kvfold": f"pip install kvfold  # where vLLM is installed\n$ {in_vllm.format(place)}",
        "sglang": f"python -m sglang.launch_server --model-path {place}{trust}",
        "llama.cpp": "python convert_hf_to_gguf.py DIRECTORY --outtype bf16",
        "mlx": f"mlx_lm.generate --model {place} --prompt 'Once upon a time'",
    }[engine]
    return f"```console\n$ {command}\n```"


def as_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table whose first column is of words and whose others are of numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def as_words(text: str) -> str:
    """Return a text of a file on one line of Markdown, in which it is neither markup nor HTML.

    Many readers make a link of an address in spite of escapes, but not in code.
    """
    return as_code(text) if _ADDRESS.search(text) else _MARKS.sub(r"\\\g<0>", printable(text))


def as_code(text: str) -> str:
    """Return a text of a file on one line as code of Markdown, which knows no escapes."""
    shown = re.sub(r"\\+\|", "|", printable(text))  # in a table they would undo the escape of the bar
    return f"`{shown.replace('`', chr(39))}`"


def fenced(language: str, text: str) -> str:
    """Return lines as a block of code, between fences that are longer than any in the lines."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    lines = "\n".join(map(printable, text.splitlines()))
    return f"{fence}{language}\n{lines}\n{fence}"


def listed(names: Sequence[str]) -> str:
    """Return names as code, with commas between them."""
    return ", ".join(map(as_code, names))
