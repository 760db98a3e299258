"""The cost of GGUF types of weights, to a source and its folds, run by llama.cpp.

`python -m benchmarks.gguf_types MODEL --text FILE --llama-cpp DIR --name NAME`. The source and its latent
folds for llama.cpp, all rounded to bfloat16 first, are written in BF16 by llama.cpp's own converter, and in
F16, Q8_0 and Q4_K_M by its `llama-quantize`. The cost of a type is the mean absolute difference of the
log-probabilities of a text's tokens from BF16. MODEL may be `demo`, the bundled checkpoint with heads of 64,
or `demo-512`, the same function in a residual stream of 512, whose rows are wide enough for K-quants.
"""

import json
import re
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvfold.checkpoints.record import sha256
from kvfold.convert.cli import main as convert
from kvfold.core.console import Command, show_table
from kvfold.engines.engine_runs import CONTEXT, LETTERS_PER_TOKEN
from kvfold.engines.llama_programs import LlamaCpp, read_base
from kvfold.texts.corpus import read_text

from .folds import DEMO, HEAD, widen
from .machine import RESULTS
from .saved_rows import SavedRows

GOAL = 1.5  # times what the source loses by a type of weights
# The two kinds of tensors of a fold that lose most in few bits keep eight.
KEPT = ("--token-embedding-type", "q8_0", "--tensor-type", "attn_kv_a_mqa=q8_0")
# A type of most weights, and options of llama-quantize.
TYPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "f16": ("f16", ()),
    "q8_0": ("q8_0", ()),
    "Q4_K_M": ("Q4_K_M", ()),
    "Q4_K_M, two kept": ("Q4_K_M", KEPT),
}
CHUNKS = 16  # windows, of which the second half is scored
WIDE = 512  # hidden size of `demo-512`
NAME = "llama-cpp-types"
# Tensors by what they do; patterns of their names in sources, and in latent folds.
GROUPS = {
    "queries": (r"attn_q\.", "attn_q_a", "attn_q_b"),
    "keys": (r"attn_k\.", "attn_k_b"),
    "kv_a": ("attn_kv_a_mqa",),
    "values": (r"attn_v\.", "attn_v_b"),
    "output": ("attn_output",),
    "mlp": ("ffn_",),
    "embeddings": (),
}
_SPACE = "\u2581"  # of SentencePiece


def byte_letters() -> dict[int, str]:
    """Return the letter that stands for each byte in GPT-2's vocabulary."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def with_byte_tokens(source: Path, out: Path) -> Path:
    """Copy a checkpoint with a SentencePiece-like tokenizer, its tokens renamed as those of GPT-2.

    Token ids and merges stay, so that a text of ASCII has nearly the same tokens as before. llama.cpp's
    converter refuses the original. A tokenizer that is byte-level already is copied as it is.
    """
    shutil.copytree(source, out)
    file = out / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    if not any(_SPACE in token for token in model["vocab"]):
        return out
    letters = byte_letters()
    names = {token: token.replace(_SPACE, letters[32]) for token in model["vocab"]}
    taken = set(names.values())
    for byte, letter in letters.items():
        if f"<0x{byte:02X}>" in names and letter not in taken:
            names[f"<0x{byte:02X}>"] = letter
    if not model["merges"]:  # llama.cpp wants one: of bytes that no text has
        names["<0x02>"] = letters[0] + letters[1]
        model["merges"] = [[letters[0], letters[1]]]
    model["vocab"] = {names[token]: number for token, number in model["vocab"].items()}
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    model["merges"] = [[part.replace(_SPACE, letters[32]) for part in pair] for pair in pairs]
    model["byte_fallback"] = False
    tokenizer["normalizer"] = None
    kind = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer["pre_tokenizer"] = tokenizer["decoder"] = kind
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = out / "tokenizer_config.json"
    told = json.loads(settings.read_text(encoding="utf-8"))
    settings.write_text(json.dumps({**told, "tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8")
    return out


def spread(source: Path, out: Path, hidden: int) -> Path:
    """Copy a Llama checkpoint into a wider residual stream: the same function, by a random map.

    The map's columns are orthogonal and of such a length that a wide state has the root mean square of the
    narrow one, so that RMSNorm divides both by the same number. Weights of norms go into what reads them.

    Args:
        source: with untied or tied embeddings, which come out untied.
        out: where the copy goes.
        hidden: its hidden size.

    Legend: W, D wide and narrow hidden size.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    narrow = config["hidden_size"]
    draw = torch.Generator().manual_seed(0)
    map_WD = torch.linalg.qr(torch.randn(hidden, narrow, generator=draw, dtype=torch.float64))[0]
    map_WD *= (hidden / narrow) ** 0.5
    back_DW = map_WD.mT * (narrow / hidden)
    weights = {name: tensor.double() for name, tensor in load_file(source / "model.safetensors").items()}
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        layer, _, role = name.removesuffix(".weight").rpartition(".")
        if role in {"o_proj", "down_proj"}:
            tensors[name] = map_WD @ tensor
        elif role == "embed_tokens":
            tensors[name] = tensor @ map_WD.mT
        elif tensor.ndim == 1:
            tensors[name] = tensor.new_ones(hidden)
        else:
            place = layer.rpartition(".")[0]
            norm = "input_layernorm" if layer.endswith("self_attn") else "post_attention_layernorm"
            before = "model.norm" if role == "lm_head" else f"{place}.{norm}"
            tensors[name] = (tensor * weights[f"{before}.weight"]) @ back_DW
    out.mkdir()
    for path in source.glob("*.json"):
        shutil.copyfile(path, out / path.name)
    wide = {**config, "hidden_size": hidden, "tie_word_embeddings": False}
    (out / "config.json").write_text(json.dumps(wide), encoding="utf-8")
    whole = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
    save_file(whole, out / "model.safetensors", {"format": "pt"})
    return out


def quantised(llama: LlamaCpp, model: Path, work: Path, text: Path, chunks: int) -> dict[str, float]:
    """Return the mean absolute difference of log-probabilities from BF16, by type, in nats.

    Args:
        llama: the converter and the programs.
        model: a checkpoint.
        work: a directory for GGUF files, which are removed.
        text: of at least `chunks` windows.
        chunks: windows.
    """
    scores = {}
    whole = llama.convert(model, work / "bf16.gguf", "bf16")
    for label, (kind, options) in {"bf16": ("bf16", ()), **TYPES}.items():
        file = whole if kind == "bf16" else llama.quantize(whole, work / "typed.gguf", kind.upper(), options)
        llama.perplexity(file, text, work / "base", CONTEXT, chunks)
        scores[label] = numpy.array(read_base(work / "base").scores())
    found = {label: float(numpy.abs(scores[label] - scores["bf16"]).mean()) for label in TYPES}
    for file in work.glob("*.gguf"):
        file.unlink()
    return found


def groups(
    llama: LlamaCpp, model: Path, work: Path, text: Path, chunks: int, kind: str
) -> dict[str, dict[str, Any]]:
    """Return what a type costs where one group of tensors has it and all others BF16, by group.

    A row has the mean absolute difference of log-probabilities from BF16 (`cost`, nats) and the types that
    llama-quantize gave the group's tensors of the first layer (`types`). Other arguments are those of
    `quantised`.

    Args:
        llama, model, work, text, chunks: as there.
        kind: the type.
    """
    whole = llama.convert(model, work / "bf16.gguf", "bf16")
    found: dict[str, dict[str, Any]] = {}
    base = None
    for group in ("", *GROUPS):
        others = [name for other, names in GROUPS.items() if other != group for name in names]
        options = [word for name in others for word in ("--tensor-type", f"{name}=bf16")]
        if group != "embeddings":
            options += ["--token-embedding-type", "bf16", "--output-tensor-type", "bf16"]
        file = llama.quantize(whole, work / "group.gguf", kind, options)
        llama.perplexity(file, text, work / "base", CONTEXT, chunks)
        scores = numpy.array(read_base(work / "base").scores())
        base = scores if base is None else base
        if group:
            found[group] = {"cost": float(numpy.abs(scores - base).mean()), "types": _types(file)}
        file.unlink()
    whole.unlink()
    return found


def _types(file: Path) -> dict[str, str]:
    """Return the types of the tensors of a GGUF file's first layer and embeddings that are rounded."""
    from gguf import GGUFReader

    return {
        str(tensor.name).removeprefix("blk.0.").removesuffix(".weight"): tensor.tensor_type.name
        for tensor in GGUFReader(file).tensors
        if tensor.name.startswith(("blk.0.", "token", "output."))
        and tensor.tensor_type.name not in {"F32", "BF16"}
    }


def source_of(model: str, place: Path) -> Path:
    """Return a checkpoint in bfloat16 that llama.cpp's converter takes, as a new directory."""
    if model == "demo":
        made = widen(DEMO, place, HEAD)
    elif model == f"demo-{WIDE}":
        made = spread(widen(DEMO, place.with_name("narrow"), HEAD), place, WIDE)
    else:
        made = with_byte_tokens(Path(model), place)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(made / "model.safetensors").items()}
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    (made / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}), encoding="utf-8")
    return made


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median over folds of each type's cost, as times the source's."""
    folds = [row for row in rows if all(f"{kind} / source" in row for kind in TYPES)]
    return {kind: statistics.median(row[f"{kind} / source"] for row in folds) for kind in TYPES}


@click.command(cls=Command)
@click.argument("model")
@click.option("--text", default="stdlib", show_default=True, help="Text that both are scored on.")
@click.option(
    "--llama-cpp", "home", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True,
    help="Source of llama.cpp with llama-perplexity, llama-completion and llama-quantize built.",
)  # fmt: skip
@click.option("--fold", "folds", multiple=True, help="Options of a fold with a fitted norm.")
@click.option("--chunks", default=CHUNKS, show_default=True, help="Windows of 128 tokens.")
@click.option(
    "--keep", type=click.Path(path_type=Path, file_okay=False), help="Keep folds here, or take them."
)
@click.option(
    "--groups",
    "kinds",
    multiple=True,
    metavar="TYPE",
    help="Measure this quantised type for groups of tensors alone.",
)
@click.option("--name", required=True, help="Of the model in the rows.")
@click.option("--revision", required=True, help="The commit of kvfold, for the results.")
def main(
    model: str,
    text: str,
    home: Path,
    folds: tuple[str, ...],
    chunks: int,
    keep: Path | None,
    kinds: tuple[str, ...],
    name: str,
    revision: str,
) -> None:
    """Print the cost of each type, and save it in benchmarks/results/llama-cpp-types.json.

    A row is saved when it is measured, and is not measured again at the same commit, on the same windows.
    """
    llama = LlamaCpp.at(home)
    saved = SavedRows(NAME, {"version": llama.version}, update=True)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        source = source_of(model, root / "source")
        words = root / "text.txt"
        words.write_text(read_text(text).joined[: CONTEXT * chunks * LETTERS_PER_TOKEN], encoding="utf-8")

        protocol = {"commit": revision, "chunks": chunks, "text_sha256": sha256(words)}

        def measure(fold: str, place: Path, own: dict[str, Any] | None = None) -> dict[str, Any]:
            known = saved.find("rows", model=name, fold=fold, **protocol)
            if known is not None:
                return known
            row: dict[str, Any] = {"model": name, "fold": fold, **protocol}
            row |= quantised(llama, place, root, words, chunks)
            if own is not None:
                row |= {f"{kind} / source": row[kind] / own[kind] for kind in TYPES}
            saved.put("rows", row, "model", "fold")
            saved.write()
            return row

        def measure_groups(fold: str, place: Path) -> None:
            for kind in kinds:
                row: dict[str, Any] = {"model": name, "fold": fold, "type": kind, **protocol}
                if saved.find("groups", **row) is None:
                    row["groups"] = groups(llama, place, root, words, chunks, kind)
                    saved.put("groups", row, "model", "fold", "type")
                    saved.write()

        own = measure("", source)
        measure_groups("", source)
        for options in folds:
            out = (keep or root) / re.sub(r"\W+", "-", f"{revision} {name} {options}")
            if not out.exists():
                asked = ["--to", "mla", "--latent-norm", "fitted", *options.split()]
                convert.main([str(source), *asked, "--out", str(out)], standalone_mode=False)
            measure(options, out, own)
            measure_groups(options, out)
    result = json.loads((RESULTS / f"{NAME}.json").read_text(encoding="utf-8"))
    _show(result["rows"])
    _show_groups(result.get("groups", []))


def _show(rows: list[dict[str, Any]]) -> None:
    ratios = [f"{kind} / source" for kind in TYPES]
    lines = [
        (
            row["model"],
            row["fold"] or "source",
            *(f"{row[kind]:.4f}" if kind in row else "-" for kind in TYPES),
            *(f"{row[ratio]:.2f}" if ratio in row else "" for ratio in ratios),
        )
        for row in rows
    ]
    columns = ("", "", *TYPES, *ratios)
    show_table("mean difference of log-probabilities from BF16, nats", columns, lines)
    told = ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in medians(rows).items())
    click.echo(f"medians of folds: {told}; the goal is {GOAL}")


def _show_groups(rows: list[dict[str, Any]]) -> None:
    lines = [
        (
            row["model"],
            row["fold"] or "source",
            row["type"],
            *(f"{row['groups'][group]['cost']:.4f}" for group in GROUPS),
        )
        for row in rows
    ]
    show_table("the same of one group of tensors, others in BF16", ("", "", "type", *GROUPS), lines)


if __name__ == "__main__":
    main()
