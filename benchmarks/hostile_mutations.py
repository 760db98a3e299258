"""Mutations of files: each turns the content of a sound file into damaged or hostile content."""

import json
import random
import struct
from collections.abc import Callable
from typing import Any

SCRIPT = "<script>alert('kvfold')</script>"  # must never stand in a page as it is
CANARY_CODE = "open('canary', 'w').close()"  # a file in the working directory
# Values of a field, of every type and size that a reader may not expect.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 97, 255, 2**31 - 1, 2**31, 2**63, 10**30, -(10**30), 0.5,
    -0.5, 1e-300, 1e308,
    float("inf"), float("-inf"), float("nan"), "", "x", "8", "null", "../secret.key", "/etc/passwd",
    "a/b", "\x00", "\ud800",
    "[bold]x[/bold]", SCRIPT, "é漢\u202e", "x" * 10_000, [], [None], [1], ["x"], [[1]], {}, {"a": 1},
    {"": None}, [0] * 1000,
    "org/evil", "evil.py", "eager", "llama3", "float8_e4m3fn", "auto",
)  # fmt: skip
# Fields that mean something to a library, whatever file they are in.
KEYS = (
    "auto_map", "custom_pipelines", "attn_implementation", "_attn_implementation",
    "quantization_config", "trust_remote_code",
    "transformers_weights", "architectures", "model_type", "text_config", "vision_config",
    "get_text_config", "to_dict",
    "rope_scaling", "rope_parameters", "rope_theta", "max_position_embeddings", "tie_word_embeddings",
    "dtype", "torch_dtype",
    "vocab_size", "num_hidden_layers", "layer_types", "sliding_window", "per_layer_config",
    "pretraining_tp", "use_cache",
    "tokenizer_class", "chat_template", "model_max_length", "bos_token", "eos_token_id",
    "added_tokens_decoder", "extra", "",
    "__class__", "__metadata__", "schema", "partial_rotary_factor", "head_dim", "num_key_value_heads",
    "hidden_act", "is_decoder",
    "output_attentions", "return_dict", "chunk_size_feed_forward", "id2label", "num_labels",
    "gradient_checkpointing",
)  # fmt: skip
WHOLE: tuple[bytes, ...] = (
    b"", b" ", b"\n", b"null", b"[]", b"{}", b"7", b'"x"', b"true", b"[1]", b"[{}]", b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe", b"\xef\xbb\xbf{}", b"\x00" * 100, b"NaN", b"1e999", b"-", b'{"a": 1, "a": 2}', b"{" +
    b" " * 10**6 + b"}",
    b"a: &a [*a]", b"a: !!python/object/apply:os.system ['touch canary']", b"---\n- [\n---\n",
    b"\x80\x04K\x01.", b"PK\x03\x04",
    b"1" * 10**5, b'{"\\ud800": "\\ud800"}', b"%YAML 1.3\n---\n", b"\r\n\r\n", b"{'a': 1}", b"// a\n{}",
)  # fmt: skip
_PIECES = (
    b"[",
    b"{",
    b'"',
    b"null",
    b"-1",
    b"1e999",
    b"NaN",
    b"\xff",
    b"\x00",
    b"[" * 5000,
    b"}",
    b",",
    b":",
    b"\n",
    b"0",
    b"99",
)

Mutation = Callable[[bytes, random.Random], bytes]


def change_bytes(content: bytes, draw: random.Random) -> bytes:
    """Replace, insert or remove a few bytes at one to three places."""
    for _ in range(draw.randint(1, 3)):
        start, length = draw.randrange(len(content) + 1), draw.choice((0, 1, 1, 2, 5, 40))
        new = draw.choice((draw.randbytes(draw.randint(0, 4)), draw.choice(_PIECES)))
        content = content[:start] + new + content[start + length :]
    return content


def change_whole(_: bytes, draw: random.Random) -> bytes:
    """Put other content in the place of all."""
    return draw.choice(WHOLE)


def cut_short(content: bytes, draw: random.Random) -> bytes:
    """Keep only the beginning, or repeat it behind the end."""
    place = draw.randrange(len(content) + 1)
    return content[:place] if draw.random() < 0.7 else content + content[:place]


def change_value(value: Any, draw: random.Random) -> Any:
    """Change a JSON value at one to three places at any depth: replace, remove, rename, repeat or add."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        holder, key = draw.choice(places) if places else (None, None)
        if holder is None or draw.random() < 0.15:
            if not isinstance(value, dict):
                return draw.choice(VALUES)
            value[draw.choice(KEYS)] = draw.choice(VALUES)
        elif draw.random() < 0.7:
            holder[key] = draw.choice(VALUES)
        elif isinstance(holder, dict) and draw.random() < 0.5:
            holder[draw.choice(KEYS)] = holder.pop(key)
        elif isinstance(holder, list) and draw.random() < 0.5:
            holder.insert(key, holder[key])
        else:
            del holder[key]
    return value


def _places(value: Any) -> Any:
    pending = [value] if isinstance(value, dict | list) else []
    while pending:
        holder = pending.pop()
        keys = range(len(holder)) if isinstance(holder, list) else list(holder)
        for key in keys:
            yield holder, key
            if isinstance(holder[key], dict | list):
                pending.append(holder[key])


def change_json(content: bytes, draw: random.Random) -> bytes:
    """Change a file that holds one JSON value."""
    return _dump(change_value(json.loads(content), draw))


def change_lines(content: bytes, draw: random.Random) -> bytes:
    """Change one line of a file of JSON lines, or the order of its lines."""
    lines = content.splitlines()
    place = draw.randrange(len(lines))
    action = draw.random()
    if action < 0.7:
        lines[place] = _dump(change_value(json.loads(lines[place]), draw))
    elif action < 0.8:
        lines[place] = draw.choice(WHOLE).replace(b"\n", b" ")
    elif action < 0.9:
        lines.insert(draw.randrange(len(lines)), lines[place])
    else:
        lines.pop(place)
    return b"\n".join(lines) + b"\n"


def change_header(content: bytes, draw: random.Random) -> bytes:
    """Change the header of a safetensors file, whose length is then right."""
    length = struct.unpack("<Q", content[:8])[0]
    header = _dump(change_value(json.loads(content[8 : 8 + length]), draw))
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def change_length(content: bytes, draw: random.Random) -> bytes:
    """Change the length of a safetensors header."""
    length = struct.unpack("<Q", content[:8])[0]
    wrong = draw.choice((0, 1, length - 1, length + 1, length + 8, 2**32, 2**63 - 1, 2**64 - 1, 10**8 + 1))
    return struct.pack("<Q", wrong) + content[8:]


def change_numbers(content: bytes, draw: random.Random) -> bytes:
    """Write NaN, infinities or arbitrary bytes into the tensors of a safetensors file."""
    start = 8 + struct.unpack("<Q", content[:8])[0]
    if len(content) < start + 4:
        return content + b"\x00"
    place = start + 4 * draw.randrange((len(content) - start) // 4)
    new = draw.choice(
        (
            b"\x00\x00\xc0\x7f",
            b"\x00\x00\x80\x7f",
            b"\xff\xff\xff\xff",
            b"\x00\x00\x80\xff",
            draw.randbytes(4),
        )
    )
    return content[:place] + new + content[place + 4 :]


def change_front_matter(content: bytes, draw: random.Random) -> bytes:
    """Change the YAML at the head of a model card."""
    head = {"license": "mit", "tags": ["a"], "base_model": "org/x", "language": "en"}
    return b"---\n" + _dump(change_value(head, draw)) + b"\n---\n" + content


def change_part(*names: str) -> Mutation:
    """Return a mutation of one part of a JSON object: it becomes any value, goes, or changes inside.

    Args:
        names: of the parts; one of them is drawn. One that is absent is added.
    """

    def change(content: bytes, draw: random.Random) -> bytes:
        whole, name = json.loads(content), draw.choice(names)
        action = draw.random()
        if isinstance(whole.get(name), dict | list) and action < 0.6:
            whole[name] = change_value(whole[name], draw)
        elif name in whole and action < 0.7:
            del whole[name]
        else:
            whole[name] = draw.choice(VALUES)
        return _dump(whole)

    return change


def contradict(content: bytes, draw: random.Random) -> bytes:
    """Have the whole of a multimodal configuration and its text part state one field differently."""
    whole = json.loads(content)
    text = whole["text_config"]
    name = draw.choice([key for key, value in text.items() if not isinstance(value, dict)])
    value = text[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        other = draw.choice(VALUES) if value is None or isinstance(value, str | list) else not value
    else:
        other = draw.choice((value + 1, value * 2, value // 2))
    draw.choice((whole, text))[name] = other
    whole.setdefault(name, value)
    return _dump(whole)


def change_tensors(content: bytes, draw: random.Random) -> bytes:
    """Change one or two tensors of a safetensors file, whose header and offsets then fit them."""
    import torch
    from safetensors.torch import load, save

    tensors = load(content)
    for _ in range(draw.choice((1, 1, 2))):
        name = draw.choice(sorted(tensors))
        tensor = tensors[name]
        action = draw.choice((
            "drop", "rename", "cut", "lengthen", "transpose", "flatten", "cast", "cast", "reinterpret",
            "fill",
            "fill", "copy",
        ))  # fmt: skip
        if action in ("drop", "rename"):
            del tensors[name]
        if action in ("rename", "copy"):
            tensors[draw.choice((f"{name}_scale", f"{name}x", f"a.{name}", name.replace("0", "7")))] = tensor
        elif action == "cut" and tensor.ndim:
            dim = draw.randrange(tensor.ndim)
            tensors[name] = tensor.narrow(dim, 0, tensor.shape[dim] // 2)
        elif action == "lengthen" and tensor.ndim:
            tensors[name] = torch.cat([tensor.view(torch.uint8)] * 2).view(tensor.dtype)
        elif action == "transpose":
            tensors[name] = tensor.mT if tensor.ndim > 1 else tensor[None]
        elif action == "flatten":
            tensors[name] = tensor.flatten()
        elif action == "cast":
            tensors[name] = tensor.to(getattr(torch, draw.choice(_DTYPES)))
        elif action == "reinterpret":
            tensors[name] = tensor.view(torch.int8 if tensor.element_size() == 1 else tensor.dtype)
        elif action == "fill" and tensor.numel():
            plain = tensor.to(torch.float64).flatten()
            plain[draw.randrange(len(plain))] = draw.choice(
                (float("nan"), float("inf"), 0.0, -1.0, 255.0, 1e30)
            )
            tensors[name] = plain.reshape(tensor.shape).to(tensor.dtype)
    return bytes(save({name: tensor.contiguous().clone() for name, tensor in tensors.items()}))


def change_table(content: bytes, draw: random.Random) -> bytes:
    """Write the rows of a Parquet file as other types, with other columns, or with kinds that name files."""
    import pyarrow
    from pyarrow import parquet

    texts = parquet.read_table(pyarrow.BufferReader(content))["text"].to_pylist()
    action = draw.choice(("cast", "cast", "kind", "kind", "add", "rename", "none", "repeat"))
    rows = pyarrow.array(texts)
    if action == "cast":
        kind = draw.choice(("binary", "large_string", "string_view", "dictionary", "list", "struct", "null"))
        rows = {
            "dictionary": lambda: rows.dictionary_encode(),
            "list": lambda: pyarrow.array([[text] for text in texts]),
            "struct": lambda: pyarrow.array([{"a": text} for text in texts]),
            "null": lambda: pyarrow.nulls(len(texts)),
        }.get(kind, lambda: rows.cast(kind))()
    elif action == "repeat":  # one text of a megabyte, stored once
        rows = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 40_000), ["x " * 2**19])
    table = pyarrow.table({"x\n" if action == "rename" else "text": rows})
    if action == "none":
        table = table.slice(0, 0)
    if action in ("kind", "add"):
        kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
        named = draw.choice(("secret.key", "../secret.key", "/dev/zero", "http://127.0.0.1:9/x"))
        images = pyarrow.array([{"bytes": None, "path": named}] * len(table), kind)
        table = table.append_column(draw.choice(("text", "image", "")), images)
    if action == "kind":
        kinds = {
            "text": {"_type": "Value", "dtype": "string"},
            table.column_names[1]: {"_type": draw.choice(("Image", "Audio", "Video", "Pdf", "Mesh", "x"))},
        }
        described = _dump({"info": {"features": kinds}})
        table = table.replace_schema_metadata({b"huggingface": described})
    stream = pyarrow.BufferOutputStream()
    parquet.write_table(table, stream, row_group_size=max(1, len(table)))
    return bytes(stream.getvalue())


def add_code(content: bytes, draw: random.Random) -> bytes:
    """Add code to a Python file that leaves a trace where it runs."""
    lines = content.splitlines()
    lines.insert(draw.choice((0, len(lines))), CANARY_CODE.encode())
    return b"\n".join(lines)


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()


JSON_FILE = (change_json, change_json, change_json, change_bytes, change_whole, cut_short)
LINES_FILE = (change_lines, change_lines, change_lines, change_bytes, change_whole, cut_short)
TENSOR_FILE = (change_header, change_header, change_length, change_numbers, change_bytes, cut_short)
CARD_FILE = (change_front_matter, change_front_matter, change_bytes, change_whole)
CODE_FILE = (add_code, add_code, change_bytes, cut_short)
_DTYPES = (
    "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "int32", "int8", "uint8", "bool",
)  # fmt: skip
_NUMBERS = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "num_hidden_layers",
    "layer_types",
    "rope_parameters", "rope_scaling", "partial_rotary_factor", "sliding_window", "num_experts",
    "num_local_experts",
    "rotary_pct", "num_kv_heads", "new_decoder_architecture", "full_attention_interval",
    "tie_word_embeddings",
    "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "conv_L_cache", "dtype",
)  # fmt: skip
FAMILY_CONFIG = (change_json, change_part(*_NUMBERS), change_part(*_NUMBERS))
QUANTISED_CONFIG = (change_part("quantization_config"), change_part("quantization_config"), change_json)
TOWER_CONFIG = (
    change_part("text_config"), change_part("vision_config"), contradict, change_json,
    change_part("architectures", "model_type", "image_token_id", "image_token_index", "tie_word_embeddings"),
)  # fmt: skip
SOURCE_TENSORS = (change_tensors, change_tensors, change_tensors, change_header)
TEXT_FILE = (change_bytes, change_whole, cut_short)
TABLE_FILE = (change_table, change_table, change_table, change_bytes, cut_short)
