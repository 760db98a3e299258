"""`FoldRequest`: one description that the command, the Python API, a file and kvfold.json share."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from kvfold.checkpoints.record import read_record
from kvfold.convert.cli import main
from kvfold.convert.request import GQA, MLA, MQA, FoldRequest, fold_request, read_config, request_of
from kvfold.core.errors import InvalidInput

from ..support.commands import run_main
from ..support.tiny import make, same_bytes

OF_THE_COMMAND = {"config", "dry_run", "as_json"}
FIELDS = FoldRequest.model_fields


def test_options_are_the_fields() -> None:
    options = {str(one.name): one for one in main.params if one.name not in OF_THE_COMMAND}
    assert options.keys() == FIELDS.keys()
    assert options["engines"].opts[0] == "--engine"
    assert options["kv_budget"].opts[0] == "--kv-budget"


@pytest.mark.parametrize("request_", [
    FoldRequest(model="m", to="mqa"),
    FoldRequest(model="a dir", to="gqa", kv_heads=2, method="mean", calibration="none"),
    request_of("org/m@v1", MLA(rank=512, rope_dim=64, q_lora_rank="full"), engines=("vllm", "sglang")),
    request_of("m", MLA(kv_budget=0.25, rope="intact"), calibration="self", seed=3, refine=0),
    request_of("m", GQA(kv_budget="25%"), calibration="kept.safetensors", revision="main"),
    request_of("m", MLA(kv_budget="25%", slots="uniform"), container="stock", dtype="bfloat16"),
    request_of("m", MQA(), shard_size="500MB", calibration="text.jsonl", sequences=3, length=7),
])  # fmt: skip
def test_a_command_says_what_its_request_says(request_: FoldRequest, tmp_path: Path) -> None:
    """The printed command, and the recorded values, are read back as the same request."""
    program, name, *words = shlex.split(request_.command)
    assert (program, name) == ("kvfold", "convert")
    with main.make_context("convert", words) as ctx:
        default = click.core.ParameterSource.DEFAULT
        given = {key: ctx.params[key] for key in FIELDS if ctx.get_parameter_source(key) != default}
    assert fold_request(given) == request_
    assert fold_request(json.loads(json.dumps(request_.essentials()))) == request_
    file = tmp_path / "request.yaml"
    file.write_text(yaml.safe_dump(request_.essentials()))
    assert read_config(file, {}) == request_
    assert read_config(file, {"seed": 9}).seed == 9


@pytest.mark.parametrize(("values", "sentence"), [
    ({"model": "m"}, "to is missing: Attention of the output; choose from gqa, mqa, mla"),
    ({"to": "gqa"}, "model is missing"),
    ({"model": "m", "to": "mlaa"}, "to is 'mlaa'; it should be 'gqa', 'mqa' or 'mla'"),
    ({"kv_budgets": "25%"}, "'kv_budgets'; did you mean 'kv_budget'?"),
    ({"kv_lora_rank": 8}, "did you mean 'rank'?"),
    ({"kv_heads": "two"}, "kv_heads is 'two'; it should be a whole number"),
    ({"kv_heads": True}, "kv_heads is True; it should be a whole number"),
    ({"shard_size": True}, "shard_size is True; it should be a whole number"),
    ({"context": False}, "context is False; it should be a whole number"),
    ({"rank": [8]}, "rank is [8]; it should be a whole number or 'full'"),
    ({"rank": True}, "rank is True; it should be a whole number"),
    ({"rank": 8.5}, "rank is 8.5; it should be a whole number or 'full'"),
    ({"kv_budget": [1]}, "kv_budget is [1]; it should be a share"),
    ({"out": 5}, "out is 5; it should be a path"),
    ({"out": ""}, "out is ''; it should be a path, neither empty nor with a null character"),
    ({"sequences": 0}, "sequences is 0; it should be greater than or equal to 1"),
    ({"length": 1}, "length is 1; it should be greater than or equal to 2"),
    ({"seed": -1}, "seed is -1"),
    ({"refine": -1}, "refine is -1"),
    ({"jobs": 0}, "jobs is 0"),
    ({"rope": "none"}, "rope is 'none'; it should be 'decoupled' or 'intact'"),
    ({"slots": "all"}, "slots is 'all'; it should be 'allocated' or 'uniform'"),
    ({"container": "x"}, "container is 'x'"),
    ({"dtype": "int8"}, "dtype is 'int8'"),
    ({"verify": "yes"}, "verify is 'yes'; it should be 'full', 'lint' or 'none'"),
    ({"shard_size": "5 apples"}, "it should be a size, for example 500MB or 5GB"),
    ({"shard_size": 0}, "shard_size is 0"),
    ({"engines": 3}, "engines is 3"),
    ({"calibration": ""}, "calibration is ''"),
    ({"model": "", "to": "mla"}, "model is ''"),
])  # fmt: skip
def test_a_mistake_is_one_sentence(values: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    if not {"model", "to"} & values.keys():
        values = {"model": "m", "to": "mla", **values}
    with pytest.raises(InvalidInput) as caught:
        fold_request(values)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    file = tmp_path / "request.json"
    file.write_text(json.dumps(values))
    result = run_main("convert", "--config", file, code=2)
    assert sentence in result.output
    assert "request.json: " in result.output


def test_a_whole_float_is_a_rank() -> None:
    request = request_of("m", MLA(rank=32.0))
    assert request.rank == 32
    assert request.essentials()["rank"] == "32", "as earlier records have it"


def test_a_file_may_name_engines_as_the_option_does(tmp_path: Path) -> None:
    file = tmp_path / "request.yaml"
    file.write_text("{model: m, to: mla, engine: 'vllm,sglang'}")
    assert read_config(file, {}).engines == ("vllm", "sglang")
    assert read_config(file, {"engines": "mlx"}).engines == ("mlx",)
    file.write_text("{model: m, to: mla, engine: [vllm], engines: [mlx]}")
    with pytest.raises(InvalidInput, match="unknown key 'engine'; did you mean 'engines'"):
        read_config(file, {})


@pytest.mark.parametrize("words", [("--out", ""), ("--out=",)])
def test_an_empty_output_is_not_this_directory(words: tuple[str, ...]) -> None:
    result = run_main("convert", "m", "--to", "mqa", *words, code=2)
    assert "--out is empty; give it a value, or leave it out" in result.output


def test_an_empty_argument_behind_a_flag_is_not_the_flags() -> None:
    assert "an argument is empty" in run_main("convert", "m", "--to", "mqa", "--dry-run", "", code=2).output


@pytest.mark.parametrize(("content", "sentence"), [
    (None, "cannot be read"),
    ("a: [", "is not YAML"),
    ("- 1", "holds a list; give a mapping of YAML"),
    ("", "holds nothing; give a mapping of YAML"),
])  # fmt: skip
def test_a_file_that_is_none(content: str | None, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "request.yaml"
    if content is not None:
        file.write_text(content)
    assert sentence in run_main("convert", "--config", file, code=2).output


@pytest.mark.parametrize(("words", "missing"), [(("--to", "mqa"), "MODEL"), (("m",), "--to")])
def test_what_is_missing_on_the_command_line(words: tuple[str, ...], missing: str) -> None:
    assert f"{missing} is missing: " in run_main("convert", *words, code=2).output


def test_a_file_gives_what_options_give(tmp_path: Path) -> None:
    """The same bytes, whichever way a fold is asked for; an option overrides the file; the record says all."""
    source, file = make(tmp_path / "source"), tmp_path / "request.yaml"
    file.write_text(f"model: {source}\nto: gqa\nkv_heads: 4\ncalibration: none\nmethod: mean\n")
    by_options = [str(source), "--to", "gqa", "--kv-heads", "2", "--calibration", "none", "--method", "mean"]
    for words, name in (
        ([*by_options, "--out", str(tmp_path / "options")], "options"),
        (["--config", str(file), "--kv-heads", "2", "--out", str(tmp_path / "file")], "file"),
    ):
        run_main("convert", *words)
        record = read_record(tmp_path / name)
        asked = {"model": str(source), "to": "gqa", "kv_heads": 2, "calibration": "none", "method": "mean"}
        assert record["request"] == asked
        assert record["command"] == fold_request(asked).command
    assert same_bytes(tmp_path / "options", tmp_path / "file") == []


def test_a_record_without_a_request_is_read(tmp_path: Path) -> None:
    """Outputs of earlier versions have a command alone."""
    record = {
        "schema": 1,
        "stage": "convert",
        "command": "kvfold convert m --to mqa",
        "source": {"name": "m", "path": "m", "revision": None, "files": {}},
        "parents": [],
    }
    (tmp_path / "kvfold.json").write_text(json.dumps(record))
    assert read_record(tmp_path) == record


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--to", "gqa", "--kv-heads", "2", "--calibration", "none"), ("GQA: num_key_value_heads 2; ", "weights alone")),
        (
            ("--to", "mla", "--kv-budget", "50%", "--effort", "quick", "--length", "12"),
            ("divided as is predicted to lose least; ", "by 8 sequences of 12 tokens of text of its own; "),
        ),
        (
            ("--to", "mla", "--rank", "9", "--rope-dim", "4", "--refine", "0", "--length", "12", "--sequences", "2"),
            ("MLA: kv_lora_rank 9, qk_rope_head_dim 4, ", "by 2 sequences of 12 tokens"),
        ),
    ],
)  # fmt: skip
def test_the_first_line_says_what_is_done(
    tmp_path: Path, words: tuple[str, ...], parts: tuple[str, str]
) -> None:
    source = make(tmp_path / "source")
    result = run_main("convert", source, *words, "--out", tmp_path / "out")
    first = result.stderr.splitlines()[0]
    assert all(part in first for part in parts), first
    assert re.search(r"; about \d+ s \(.*\) and \d+ MB of memory$", first)
