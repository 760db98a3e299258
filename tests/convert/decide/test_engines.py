"""`--engine`: the least lossy container that every named engine accepts, the reason, and what is refused."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from kvfold.cli import main
from kvfold.convert.formats.serving_widths import SERVING

from ...support.commands import run_main
from ...support.folds import FOR_ALL, LINEAR, QUICK, WEIGHTS, WIDE, attempt, convert, failing
from ...support.tiny import make, same_bytes


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source that caches more than 512+64."""
    return make(tmp_path_factory.mktemp("wide") / "source", rms_norm_eps=1e-5, **WIDE)


@pytest.mark.parametrize(("options", "architecture", "sentence"), [
    (LINEAR, "DeepseekV3ForCausalLM", ""),
    (("--engine", "transformers", *LINEAR), "DeepseekV3ForCausalLM", ""),
    (("--engine", "vllm"), "KvfoldForCausalLM", "for vllm the output is code of its own"),
    (("--engine", "vllm", "--container", "stock", *LINEAR), "DeepseekV3ForCausalLM",
     "the stock class for serving"),
])  # fmt: skip
def test_the_least_lossy_container_that_all_accept(
    wide: Path, tmp_path: Path, options: tuple[str, ...], architecture: str, sentence: str
) -> None:
    """And it says why; without the option, or for transformers alone, nothing changes."""
    text = convert(
        wide, "--to", "mla", "--rank", "512", *WEIGHTS, *options, out=tmp_path / "out", code=0
    ).output
    record = json.loads((tmp_path / "out" / "kvfold.json").read_text())
    assert record["container"] == architecture
    assert sentence in text
    assert not sentence or any(sentence in told for told in record["notices"])
    engines = dict(zip(options[::2], options[1::2], strict=True)).get("--engine", "transformers")
    assert failing(tmp_path / "out", engines) == []
    plain = json.loads((tmp_path / "out" / "config.json").read_text())["rms_norm_eps"]
    assert plain == (1e-6 if "serving" in text else 1e-5)


def test_a_plan_says_it_and_the_recorded_command_repeats_it(wide: Path, tmp_path: Path) -> None:
    fitted = (str(wide), "--to", "mla", "--engine", "sglang, vllm", *WEIGHTS)
    asked = (*fitted, *LINEAR)
    told = json.loads(CliRunner().invoke(main, ["convert", *fitted, "--dry-run", "--json"]).stdout)["notices"]
    assert any("was not taken: sglang refuses to load" in text for text in told)
    plan = json.loads(CliRunner().invoke(main, ["convert", *asked, "--dry-run", "--json"]).stdout)
    assert plan["engines"] == ["sglang", "vllm"]
    assert plan["cache"]["after"]["elements_per_token_per_layer"] == SERVING.cached
    assert any("stock class for serving" in told for told in plan["notices"])
    assert "sglang, vllm" in CliRunner().invoke(main, ["convert", *asked, "--dry-run"]).output
    attempt(wide, tmp_path / "one", *asked[1:])
    command = json.loads((tmp_path / "one" / "kvfold.json").read_text())["command"]
    run_main(*shlex.split(command)[1:], "--out", tmp_path / "two")
    assert same_bytes(tmp_path / "one", tmp_path / "two") == []


@pytest.mark.parametrize(("rank", "cached"), [("300", 576), ("100", 320)])
def test_narrower_latents_are_filled_up(wide: Path, tmp_path: Path, rank: str, cached: int) -> None:
    """The cache is then as large as the narrowest profile's that holds it, which is said and recorded."""
    text = convert(
        wide, "--to", "mla", "--rank", rank, "--engine", "sglang", *QUICK, out=tmp_path / "out", code=0
    ).output
    assert f"{rank}+64 wide and padded with zeros" in text
    assert f"cache 1024 -> {cached}" in text
    down = load_file(tmp_path / "out" / "model.safetensors")[
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    ]
    assert down.shape == (cached, 64)
    assert not down[int(rank) : cached - 64].any()


def test_heads_for_engines(tmp_path: Path) -> None:
    """GQA in the source's own class runs wherever that does; what an engine would not load is refused."""
    source = make(tmp_path / "source")
    convert(
        source, "--to", "gqa", "--kv-heads", "2", "--engine", FOR_ALL, *WEIGHTS, out=tmp_path / "out", code=0
    )
    assert json.loads((tmp_path / "out" / "kvfold.json").read_text())["engines"] == FOR_ALL.split(",")
    # An MLP that is not four times as wide.
    source = make(tmp_path / "neox", "gpt_neox", hidden_size=64, num_attention_heads=4)
    text = convert(
        source, "--to", "gqa", "--kv-heads", "2", "--engine", "vllm", *WEIGHTS, out=tmp_path / "no", code=2
    ).output
    assert "Falcon's MLP" in text


MLA_ = ("--to", "mla", *WEIGHTS, "--engine")
# name -> (family, how the source is made, options, a part of the sentence)
REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
    "unknown engine": ("llama", WIDE, (*MLA_, "vllm,ollama"), "--engine is 'ollama'; it should be 'transformers'"),
    "no engine": ("llama", WIDE, (*MLA_, ""), "--engine is empty; give it a value"),
    "small source": ("llama", {}, (*MLA_, "sglang"), "the source's cache has only 128; use --to gqa"),
    "small budget": ("llama", WIDE, (*MLA_, "sglang", "--kv-budget", "25%"), "the least would be 31.25%"),
    "rank": ("llama", WIDE, (*MLA_, "sglang", "--rank", "513"), "--rank 513 does not fit"),
    "rank in words": ("llama", WIDE, (*MLA_, "sglang", "--rank", "ten"), "it should be a whole number or 'full'"),
    "two sizes": ("llama", WIDE, (*MLA_, "sglang", "--rank", "512", "--kv-budget", "60%"), "not both"),
    "full rank": ("llama", WIDE, (*MLA_, "sglang", "--rank", "full"), "one slot at each of 32 default "
                                                                      "frequencies"),
    "rope dim": ("llama", WIDE, (*MLA_, "sglang", "--rope-dim", "32"), "--rope-dim 32 does not fit the "
                                                                       "serving profiles"),
    "no container": (
        "mixtral", {}, (*MLA_, "mlx", "--kv-budget", "50%"),
        "Error: no output format of this target suits mlx: for --container remote, mlx refuses to load: it brings "
        "its own code; for --container stock, the stock MLA class cannot hold Mixtral: its MLPs are mixtures of "
        "experts; use --to gqa\n"
    ),
    "slots": ("llama", WIDE, (*MLA_, "sglang", "--slots", "allocated"), "--slots allocated does not fit"),
    "intact": ("llama", WIDE, (*MLA_, "sglang", "--rope", "intact", "--container", "stock"),
               "rotation is left intact"),
    "peer": ("llama", WIDE, (*MLA_, "sglang", "--method", "svd"), "--method svd has slots of its own"),
    "heads": ("llama", WIDE, (*MLA_, "sglang", "--kv-heads", "2"), "--kv-heads does not apply to --to mla"),
    "wide heads": ("llama", {**WIDE, "head_dim": 256}, (*MLA_, "sglang"), "for at most 192 un-rotated dimensions"),
    "output bias": ("llama", {**WIDE, "attention_bias": True}, (*MLA_, "sglang"), "output has a bias"),
    "biases": ("glm", WIDE, (*MLA_, "sglang"), "biases can go into weights by statistics only"),
    "activation": ("gemma", WIDE, (*MLA_, "sglang", "--container", "stock"), "hidden_act is "
                                                                             "gelu_pytorch_tanh"),
    "epsilon": ("llama", {**WIDE, "rms_norm_eps": 0.0}, (*MLA_, "sglang"), "rms_norm_eps 0.0"),
    "nothing saved": ("qwen3", WIDE, (*MLA_, "vllm", "--rope", "intact"), "vllm saves no cache: its keys are rotated after "
                                                      "they are rebuilt"),
    "container": ("llama", WIDE, (*MLA_, "llama.cpp", "--container", "remote"), "llama.cpp refuses to load"),
    "expanded keys": ("llama", WIDE, (*MLA_, "sglang", "--container", "remote"), "sglang refuses to load"),
    "expanded cache": ("llama", WIDE, (*MLA_, "tgi,vllm", "--container", "auto"), "tgi saves no cache"),
    "heads in a container": (
        "llama", WIDE, ("--to", "mqa", "--engine", "vllm", "--container", "stock", *WEIGHTS),
        "--container stock does not apply"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_had_is_refused(case: str, tmp_path: Path) -> None:
    family, settings, options, sentence = REFUSED[case]
    text = convert(
        make(tmp_path / "source", family, **settings), *options, out=tmp_path / "out", code=2
    ).output
    assert text.splitlines()[-1].startswith("Error: ")
    assert sentence in text
    assert not (tmp_path / "out").exists()
