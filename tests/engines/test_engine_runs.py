"""Engines that `kvfold verify` starts, as stand-ins (`make test-mlx` and `make test-llamacpp` run them)."""

import struct
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest

from kvfold.core.errors import InvalidInput
from kvfold.engines import llama_programs
from kvfold.engines.engine_runs import started_engines
from kvfold.engines.llama_programs import LlamaCpp, LlamaFailure, read_base
from kvfold.engines.rules.rule_types import LintFinding
from kvfold.engines.verify import verify

from ..support.commands import run_main
from ..support.folds import WEIGHTS, convert
from ..support.tiny import make

BASE_LINE = "llama_kv_cache: size = 24.00 MiB ( 256 cells, 6 layers, 16/16 seqs), K (f32): 12.00 MiB, V (f32): 12.00 MiB"


def test_only_what_can_be_started_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = ("transformers", "vllm", "mlx", "llama.cpp", "sglang", "tgi")
    monkeypatch.setattr("kvfold.engines.engine_runs.find_spec", lambda name: name == "mlx_lm" or None)
    started, unasked = started_engines(asked, (), None, run=True)
    assert started == ("mlx",)
    assert [line.split(":")[0] for line in unasked] == [
        "vllm is not installed here", "llama.cpp is not started without --llama-cpp DIR",
        "sglang is not installed here", "tgi is never started",
    ]  # fmt: skip
    assert started_engines(asked, (), tmp_path, run=True)[0] == ("mlx", "llama.cpp")
    assert started_engines(asked, (), tmp_path, run=False)[0] == ()
    broken = LintFinding("mlx", "refuses to load", "it brings its own code")
    started, unasked = started_engines(asked, (broken,), tmp_path, run=True)
    assert started == ("llama.cpp",)
    assert any("mlx was not started: a broken rule" in line for line in unasked)


def written_base(file: Path, tokens: list[list[int]], vocabulary: int, seed: int = 0) -> numpy.ndarray:
    """Write a file as llama-perplexity does, and return the log-probabilities in it."""
    context = len(tokens[0])
    rows = context - 1 - context // 2
    random = numpy.random.default_rng(seed)
    known = -random.uniform(0, 10, (len(tokens), rows, vocabulary)).astype(numpy.float32)
    known -= numpy.log(numpy.exp(known).sum(-1, keepdims=True))
    data = b"_logits_" + struct.pack("<Iii", context, vocabulary, len(tokens))
    data += numpy.array(tokens, numpy.int32).tobytes()
    for row in known.reshape(-1, vocabulary):
        scale, least = (row.max() - row.min()) / 65535, row.min()
        steps = numpy.zeros(2 * ((vocabulary + 1) // 2), numpy.uint16)
        steps[:vocabulary] = numpy.round((row - least) / scale)
        data += struct.pack("<ff", scale, least) + steps.tobytes()
    file.write_bytes(data)
    return known


@pytest.mark.parametrize("vocabulary", [11, 12])
def test_log_probabilities_of_a_file(vocabulary: int, tmp_path: Path) -> None:
    tokens = [[0, 3, 4, 5, 6, 7, 8, 9], [0, 1, 2, 3, 4, 5, 6, 10]]
    known = written_base(tmp_path / "base", tokens, vocabulary)
    found = read_base(tmp_path / "base")
    assert found.tokens == tokens
    wanted = [known[0, 0, 7], known[0, 1, 8], known[0, 2, 9], known[1, 0, 5], known[1, 1, 6], known[1, 2, 10]]
    assert found.scores() == pytest.approx([float(score) for score in wanted], abs=2e-4)
    (tmp_path / "other").write_bytes(b"something else")
    with pytest.raises(LlamaFailure, match="no log-probabilities"):
        read_base(tmp_path / "other")


def test_distance_of_two_files(tmp_path: Path) -> None:
    tokens = [[0, 3, 4, 5, 6, 7, 8, 9]]
    ours, source = (written_base(tmp_path / str(seed), tokens, 11, seed) for seed in (0, 1))
    files = [read_base(tmp_path / str(seed)) for seed in (0, 1)]
    nats = (numpy.exp(source) * (source - ours)).sum(-1).mean()
    same = (source.argmax(-1) == ours.argmax(-1)).mean()
    assert files[0].distance(files[1]) == pytest.approx({"mean": nats, "same_top": same}, abs=5e-4)
    assert files[0].distance(files[0]) == {"mean": 0.0, "same_top": 1.0}
    written_base(tmp_path / "other", [[0, 3, 4, 5, 6, 7, 8, 10]], 11)
    with pytest.raises(LlamaFailure, match="other tokens"):
        files[0].distance(read_base(tmp_path / "other"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A llama.cpp whose programs say what the test wants."""
    place = tmp_path / "llama.cpp"
    (place / "build" / "bin").mkdir(parents=True)
    (place / "convert_hf_to_gguf.py").write_text("raise SystemExit('no such class')\n")
    for name in ("llama-perplexity", "llama-completion"):
        program(place, name, "print('version: 7 (abc)')")
    return place


def program(home: Path, name: str, code: str) -> None:
    file = home / "build" / "bin" / name
    file.write_text(f"#!{sys.executable}\n{code}\n")
    file.chmod(0o755)


def test_what_the_programs_print(home: Path, tmp_path: Path) -> None:
    """The size of the cache; statistics that the log lost the first time; greedy text; a failure's last line."""
    llama = LlamaCpp.at(home)
    assert llama.version == "llama.cpp 7 (abc)"
    assert llama.programs == (home / "build" / "bin").resolve()
    program(home, "llama-perplexity", f"print({BASE_LINE!r})")
    model = tmp_path / "model.gguf"
    assert llama.perplexity(model, model, tmp_path / "base", 128, 4) == 256
    count = tmp_path / "count"
    lines = "'Mean    KLD:   0.012345 ± 0.000001\\nSame top p: 93.750 ± 0.1 %'"
    code = f"from pathlib import Path\nfile = Path({str(count)!r})\nif file.exists(): print({lines})\nfile.touch()"
    program(home, "llama-perplexity", code)
    assert llama.divergence(model, model, model, 128, 4) == {"mean": 0.012345, "same_top": 0.9375}
    program(home, "llama-perplexity", "pass")
    assert llama.divergence(model, model, model, 128, 4) is None
    program(
        home, "llama-completion", "import sys\nprint(sys.argv[sys.argv.index('-p') + 1] + ' more', end='')"
    )
    assert llama.complete(model, "once", 4) == "once more"
    program(home, "llama-completion", "raise SystemExit('error: the model is too large')")
    with pytest.raises(LlamaFailure, match="too large"):
        llama.complete(model, "once", 4)


def test_a_program_that_does_not_end_is_stopped(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one of another machine taken for llama.cpp's."""
    llama = LlamaCpp.at(home)
    program(home, "llama-completion", "import time\ntime.sleep(600)")
    with monkeypatch.context() as patch:
        patch.setattr(llama_programs, "HOURS", 1e-4)
        with pytest.raises(LlamaFailure, match="llama-completion was stopped, since it had not ended after"):
            llama.complete(home, "once", 4)
    (home / "build" / "bin" / "llama-perplexity").write_text("#!/no/such/interpreter\n")
    with pytest.raises(InvalidInput, match="llama-perplexity cannot be started"):
        LlamaCpp.at(home)


def write_converter(home: Path, refusal: str) -> None:
    """Write a converter that refuses the tokenizer of every checkpoint in these words."""
    (home / "conversion").mkdir()
    (home / "conversion" / "__init__.py").touch()
    (home / "conversion" / "base.py").write_text(
        "class TextModel:\n"
        "    def get_vocab_base_pre(self, tokenizer):\n"
        f"        raise NotImplementedError({refusal!r})\n"
    )
    (home / "convert_hf_to_gguf.py").write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from conversion.base import TextModel\n"
        "name = TextModel().get_vocab_base_pre(None)\n"
        "Path(sys.argv[sys.argv.index('--outfile') + 1]).write_text(name)\n"
    )


def test_a_tokenizer_that_the_converter_does_not_know(home: Path, tmp_path: Path) -> None:
    """It is written as GPT-2's, and said so; any other refusal is one."""
    llama = LlamaCpp.at(home)
    with pytest.raises(LlamaFailure, match="no such class"):
        llama.convert(tmp_path, tmp_path / "out.gguf", "f32")
    assert llama.guessed == []
    write_converter(home, "BPE pre-tokenizer was not recognized")
    assert llama.convert(tmp_path, tmp_path / "out.gguf", "f32").read_text() == "gpt-2"
    assert llama.guessed == [tmp_path]


def test_the_same_tokenizer_is_guessed_once(home: Path, tmp_path: Path) -> None:
    """The converter is not started in vain on a second checkpoint with a tokenizer that it does not know."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("{}")
    write_converter(home, "it was started")
    llama = LlamaCpp.at(home)
    with pytest.raises(LlamaFailure, match="it was started"):
        llama.convert(tmp_path / "two", tmp_path / "out.gguf", "f32")
    llama.guessed.append(tmp_path / "one")
    with pytest.raises(LlamaFailure, match="it was started"):
        llama.convert(tmp_path, tmp_path / "out.gguf", "f32")  # it has no tokenizer that is known to be so
    assert llama.convert(tmp_path / "two", tmp_path / "out.gguf", "f32").read_text() == "gpt-2"
    assert llama.guessed == [tmp_path / "one", tmp_path / "two"]


def test_a_directory_that_is_no_llama_cpp(home: Path, tmp_path: Path) -> None:
    (home / "build" / "bin" / "llama-completion").unlink()
    with pytest.raises(InvalidInput, match="cmake --build build --target llama-perplexity llama-completion"):
        LlamaCpp.at(home)
    (home / "convert_hf_to_gguf.py").unlink()
    with pytest.raises(InvalidInput, match="has no convert_hf_to_gguf"):
        LlamaCpp.at(home)
    source = make(tmp_path / "source", num_hidden_layers=1)
    convert(source, "--to", "gqa", "--kv-heads", "2", *WEIGHTS, out=tmp_path / "out", code=0)
    arguments = ["verify", str(tmp_path / "out"), "--engine", "llama.cpp", "--llama-cpp", str(tmp_path)]
    assert "has no convert_hf_to_gguf.py" in run_main(*arguments, code=2).output
    alone = run_main("verify", tmp_path / "out", "--llama-cpp", tmp_path, code=2)
    assert "is for --engine llama.cpp, which is not asked for" in alone.stderr


@pytest.mark.skipif(find_spec("mlx_lm") is None, reason="`make test-mlx` installs MLX")
def test_mlx_answers_as_transformers_does(tmp_path: Path) -> None:
    settings = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    source = make(tmp_path / "source", equal_heads=True, tie_word_embeddings=True, **settings)
    convert(source, "--to", "mla", "--engine", "mlx", *WEIGHTS, out=tmp_path / "out", code=0)
    report = verify(tmp_path / "out", ["mlx"], source)
    assert report.failures == []
    found = report.measured["mlx"]
    assert found["source"]["max_difference"] < 3e-5
    assert found["source"]["same_tokens"] == found["source"]["tokens"]
    assert found["cache"] == 320
