"""From what the user said of calibration to statistics of a source: read back, or taken on text of its own or a file's."""

from pathlib import Path

from .calibration import load_model, load_tokenizer, read_sequences, sample_from
from .errors import InvalidInput
from .source import Source
from .statistics import Statistics, collect

BATCH = 8  # sequences at once


def study(
    source: Source, calibration: str, *, sequences: int, length: int, seed: int, save: Path | None = None
) -> Statistics | None:
    """Statistics of a source, or None for weights only.

    Args:
        source: the checkpoint; its model is loaded whole unless the statistics are read back.
        calibration: `none`; `self`, text sampled from the model at temperature 1; a .txt or .jsonl file; or a .safetensors
            file of statistics saved earlier.
        sequences: how many sequences are read.
        length: tokens of each, cut to the model's positions; distances beyond it are not seen.
        seed: of the text and the labels.
        save: where to keep the statistics, so that other folds of this source need not take them again.

    Raises:
        InvalidInput: there is no such file, it is of another model, or a statistic is not finite.
    """
    if calibration == "none":
        if save is not None:
            raise InvalidInput("--save-statistics has nothing to save with --calibration none; use --calibration self")
        return None
    if calibration.endswith(".safetensors"):
        return _fitting(Statistics.load(Path(calibration)), source, calibration)
    file = Path(calibration)
    if calibration != "self" and not file.is_file():
        raise InvalidInput(f"--calibration {calibration} is not none, self or a .txt, .jsonl or .safetensors file")
    if save is not None and save.exists():
        raise InvalidInput(f"--save-statistics {save} exists and nothing is overwritten; name another file")
    directory = source.checkpoint.directory
    model, length = load_model(directory), min(length, source.positions)
    if calibration == "self":
        bos = source.config.get("bos_token_id")
        tokens = sample_from(model, sequences=sequences, length=length, bos=bos, seed=seed, batch_size=sequences)
    else:
        tokens = read_sequences(file, load_tokenizer(directory), sequences=sequences, length=length, seed=seed)
    name = "self" if calibration == "self" else f"text:{file.name}"
    statistics = collect(model, tokens, projections=source.family.projections, batch_size=BATCH, calibration=name, seed=seed)
    if save is not None:
        statistics.save(save)
    return statistics


def _fitting(statistics: Statistics, source: Source, file: str) -> Statistics:
    geometry = source.geometry
    found = (len(statistics.layers), statistics.layers[0].input_EE.shape[0] - 1, *statistics.layers[0].query_NHH.shape[:2])
    wanted = (source.layers, geometry.hidden_size, geometry.num_attention_heads, geometry.head_dim)
    if found != wanted:
        raise InvalidInput(
            f"{file} holds statistics of a model with (layers, hidden_size, heads, head_dim) {found}, the source has {wanted}"
        )
    return statistics
