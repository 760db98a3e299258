"""The table of quantisation schemes that kvfold reads: one row per quant_method."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import InvalidInput
from ...core.untrusted import read_json, shorten
from .bitsandbytes_layouts import find_bitsandbytes
from .compressed import find_compressed
from .int4_layouts import find_awq, find_gptq
from .modelopt_layouts import find_modelopt
from .packed_tensor import PackedTensor, StoredTensors
from .scaled_numbers import find_fp8, find_mxfp4
from .unconverted import Spelling, in_compressed, in_list, in_modelopt, in_patterns

MODELOPT_FILE = "hf_quant_config.json"
LISTS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A row.

    Attributes:
        reads: the formats of it that are read, in words.
        find: returns the quantised weights of a checkpoint, from its tensors and quantization_config.
        unconverted: names an output's unquantised modules in a quantization_config.
        note: what to know before an output with quantised weights is loaded, a sentence.
    """

    reads: str
    find: Callable[[StoredTensors, Mapping[str, Any]], dict[str, PackedTensor]]
    unconverted: Spelling
    note: str = ""


SCHEMES = {
    "fp8": Scheme(
        reads="FP8 with scales per block, row or tensor (DeepSeek, Qwen3)",
        find=find_fp8,
        unconverted=in_list("modules_to_not_convert", "ignored_layers"),
    ),
    "mxfp4": Scheme(
        reads="MXFP4 experts (gpt-oss)", find=find_mxfp4, unconverted=in_list("modules_to_not_convert")
    ),
    "compressed-tensors": Scheme(
        reads="FP8, int8, packed int2, int4 and int8, NVFP4, MXFP4",
        find=find_compressed,
        unconverted=in_compressed,
    ),
    "gptq": Scheme(reads="2, 4 and 8 bits, gptq and gptq_v2", find=find_gptq, unconverted=in_patterns),
    "awq": Scheme(reads="4 bits, gemm", find=find_awq, unconverted=in_list("modules_to_not_convert")),
    "bitsandbytes": Scheme(
        reads="4 bits (NF4, FP4, also nested) and 8 bits",
        find=find_bitsandbytes,
        unconverted=in_list("llm_int8_skip_modules"),
    ),
    "modelopt": Scheme(
        reads="FP8, NVFP4",
        find=find_modelopt,
        unconverted=in_modelopt,
        note="transformers has no reader of ModelOpt checkpoints: it loads wrong weights, or refuses them; "
        "use another engine, or --dequantize",
    ),
}


def quantization_of(directory: Path, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return how a checkpoint is quantised; None where it is not.

    It is given by the key of its row in `SCHEMES` and its quantization_config.

    Raises:
        InvalidInput: kvfold reads no such method.
    """
    found, text = config.get("quantization_config"), config.get("text_config")
    if not found and isinstance(text, dict):
        found = text.get("quantization_config")  # of a multimodal model; transformers reads both places
    file = directory / MODELOPT_FILE
    if not found and file.is_file():
        found = {"quant_method": "modelopt", **read_json(file)}
    if not found:
        return None
    known = ", ".join(SCHEMES)
    if not isinstance(found, dict):
        raise InvalidInput(
            f"{directory / 'config.json'} has quantization_config {shorten(found)}, where an object with one "
            f"of the methods {known} is needed"
        )
    method = found.get("quant_method")
    if method is None and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        method = "bitsandbytes"  # as transformers wrote it before it named methods
    if method is None:
        raise InvalidInput(
            f"{directory / 'config.json'} has a quantization_config without quant_method, where one of "
            f"{known} is needed; download the checkpoint again"
        )
    if not isinstance(method, str) or method not in SCHEMES:
        raise InvalidInput(
            f"{directory} is quantised by {shorten(method)}, which kvfold does not read; it reads {known}. "
            "Fold the unquantised checkpoint, and quantise the result"
        )
    nested = found.get("quantization")
    for part in (found, nested if isinstance(nested, dict) else {}):
        for field in LISTS:
            names = part.get(field)
            if names is not None and not (isinstance(names, list) and all(isinstance(n, str) for n in names)):
                raise InvalidInput(
                    f"{directory} has {field} {shorten(names)} in its quantization_config, where a list of "
                    "names is needed"
                )
        if not isinstance(part.get("dynamic") or {}, dict):
            raise InvalidInput(
                f"{directory} has dynamic {shorten(part['dynamic'])} in its quantization_config, where an "
                "object of patterns is needed"
            )
    return method, found
