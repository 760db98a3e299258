"""Twins of a Llama checkpoint: they begin near it, train to the same bits, and are folded and compared."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from benchmarks.twin_sources import KINDS, new_twin, read_llama, root_mean_squares, train
from benchmarks.twins import main
from kvfold.core.errors import InvalidInput

from ..support.tiny import make
from ..support.tokenizers import save_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog and runs away from it into the woods. " * 40


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = make(tmp_path_factory.mktemp("twins") / "source", num_key_value_heads=4, vocab_size=258)
    save_tokenizer(source)
    return source


@pytest.mark.parametrize("kind", ["qwen3", "olmo2"])
def test_queries_and_keys_of_a_new_twin_have_the_size_of_those_of_the_checkpoint(
    llama: Path, kind: str
) -> None:
    ids_BS = torch.randint(258, (4, 32), generator=torch.Generator().manual_seed(0))
    source = read_llama(llama)
    wanted = root_mean_squares(source, ids_BS)
    twin = new_twin(kind, source, ids_BS)
    sizes: dict[str, float] = {}
    for name in "qk":
        twin.get_submodule(f"model.layers.1.self_attn.{name}_norm").register_forward_hook(
            lambda module, inputs, output, name=name: sizes.update(
                {name: float(output.square().mean().sqrt())}
            )
        )
    with torch.no_grad():
        twin(ids_BS)
    assert sizes == {
        name: pytest.approx(float(wanted[f"model.layers.1.self_attn.{name}_proj"]), rel=1e-3) for name in "qk"
    }


def test_twins_are_trained_to_the_same_bits_and_folded(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("one", "two"):
        for kind in KINDS:
            (tmp_path / place).mkdir(exist_ok=True)
            train(tmp_path / place / kind, kind, llama, TEXT, 2)
    for kind in KINDS:
        one, two = (load_file(tmp_path / place / kind / "model.safetensors") for place in ("one", "two"))
        assert all(torch.equal(one[name], two[name]) for name in one)
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.setattr("benchmarks.saved_rows.RESULTS", tmp_path)
    words = [str(llama), str(tmp_path / "one"), "--train", str(tmp_path / "text.txt")]
    words += ["--text", str(tmp_path / "text.txt"), "--max-windows", "2", "--budget", "50%"]
    words += ["--effort", "quick", "--twin", "llama", "--twin", "olmo2", "--name", "tiny"]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0
    rows = json.loads((tmp_path / "twins-tiny.json").read_text())["rows"]
    forms = ["--container stock", "--rope decoupled", "--rope intact"]
    assert [(row["twin"], row["form"]) for row in rows] == [
        *(("llama", form) for form in forms),
        *(("olmo2", form) for form in forms[1:]),
    ]
    assert "olmo2 --container stock 50%: --container stock cannot hold this source" in done.stderr
    assert {row["target"]["kv_lora_rank"] + row["target"]["qk_rope_head_dim"] for row in rows} == {32}
    assert "1.00" in done.stdout

    refused = CliRunner().invoke(
        main, [*words[:-6], "--twin", "olmo2", "--form", "--container stock", *words[-2:]]
    )
    assert refused.exit_code == 2
    assert "every fold asked for is refused" in refused.stderr


def test_a_checkpoint_without_a_first_token_has_no_twins(tmp_path: Path) -> None:
    source = make(tmp_path / "source", vocab_size=258, bos_token_id=None)
    save_tokenizer(source)
    with pytest.raises(InvalidInput, match="has the bos_token_id None"):
        train(tmp_path / "out", "qwen3", source, TEXT, 2)


def test_only_llama_has_twins(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "qwen2", vocab_size=258)
    save_tokenizer(source)
    with pytest.raises(InvalidInput, match="has no twins"):
        train(tmp_path / "out", "qwen3", source, TEXT, 2)
