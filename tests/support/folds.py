"""Runs of `kvfold convert` on tiny checkpoints."""

from pathlib import Path

from click.testing import CliRunner, Result

from kvfold.cli import main
from kvfold.convert.cli import main as command
from kvfold.engines.rules.engine_rules import lint

from .commands import ended

WEIGHTS = ("--calibration", "none")
# Where a test asks only what engines take: fitting a norm of 512 numbers takes seconds a layer.
LINEAR = ("--latent-norm", "linear")
QUICK = (*WEIGHTS, *LINEAR)
GQA = ("--to", "gqa", "--kv-heads", "2", *WEIGHTS)
MLA = ("--to", "mla", "--rank", "24", "--rope-dim", "4", *WEIGHTS)
FOR_ALL = "vllm,sglang,llama.cpp"
# A cache of 1024 numbers per token and layer.
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}


def convert(source: Path | str, *options: str, out: Path | None = None, code: int | None = None) -> Result:
    """Run the command, which must end with `code` if given; `out` defaults to a sibling of the source."""
    out = out or Path(source).with_name("out")
    return ended(CliRunner().invoke(command, [str(source), *options, "--out", str(out)]), code)


def fold_latent(source: Path, *options: str) -> Path:
    """Fold to MLA by weights alone, into a directory that is named after the options."""
    out = source.with_name("-".join([source.name, *options[1::2]]).replace("%", ""))
    command([str(source), "--to", "mla", *WEIGHTS, *options, "--out", str(out)], standalone_mode=False)
    return out


def attempt(source: Path, out: Path, *options: str) -> tuple[int, str]:
    """Run the command, which may refuse, and return its exit code and its output."""
    result = CliRunner().invoke(main, ["convert", str(source), *options, "--out", str(out)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def failing(directory: Path, engines: str) -> list[str]:
    """Return the findings of the engines that would not run a checkpoint."""
    return [str(finding) for finding in lint(directory, engines.split(",")) if finding.fails]
