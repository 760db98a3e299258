"""Sizes of every part: `FULL` for a data-centre GPU, `LENT` for 15 minutes of it, `TOY` for a test."""

from dataclasses import dataclass, replace
from typing import Any

from kvfold.convert.methods.refinement import STEPS

from ..fidelity import FOLDS, RULES


@dataclass(frozen=True, kw_only=True)
class SourceSizes:
    """One model to be trained.

    Attributes:
        config: fields of `LlamaConfig` that are not `vocab_size`.
        micro_batch: windows of a forward pass, halved where they do not fit.
        step_windows: windows of an optimizer step.
        rate: peak learning rate.
    """

    config: dict[str, Any]
    micro_batch: int
    step_windows: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a whole day.

    Attributes:
        name: `full`, `lent` or `toy`; results of two of them are never mixed.
        checks: words that folds of `benchmarks.cuda_check` must contain.
        agreements: rank and rotary width of correctness checks.
        speeds: rank, rotary width, context and batch of timings, the most important first.
        tiles: latents of a tile and tiles on their way, each of them timed at the contexts of `steps`.
        fresh: bytes of cache that a timing reads at least.
        heads: attention heads of timings.
        steps: context and batch of whole decoding steps.
        step_shape: layers, heads, head dim, rank and rotary width of the models of these steps.
        text_bytes: bytes of training text.
        vocabulary: of the tokenizer.
        window: tokens of a training window, and positions of the sources.
        sources: by name; the first is folded and distilled.
        shares: of the time of training, by name of source.
        carried: the source that is small enough to be carried home.
        most_seconds: of training.
        calibration: sequences and tokens of each.
        budgets: shares of the cache, the most important first.
        folds: labels of rows, the most important first: of `benchmarks.fidelity`.
        rule_shares: rotary widths at which published rules are tried, as shares.
        refine_steps: steps of refined folds.
        windows: evaluation windows, and tokens of each.
        retrieval: settings of the suite `retrieval`.
        recovery: sizes of `benchmarks.recovery`'s runs.
        cells: target, start and recipe of distillations.
        pretrained: options of `kvfold convert` for folds of a pretrained source, by name.
        pretrained_windows: tokens of an evaluation window, and how many.
        trained: which of these folds are trained.
        training: tokens of a window, and keys of a recipe's stage and evaluation.
        kinds: kinds of `benchmarks.training`.
        step_tokens: tokens of a timed training step, and of a window.
        losses: options of `benchmarks.losses`.
        large: fields of `LlamaConfig` of a model with random weights, which is folded by command.
        large_folds: options of `kvfold convert` by name of the fold.
    """

    name: str
    checks: str
    agreements: tuple[tuple[int, int], ...]
    speeds: tuple[tuple[int, int, int, int], ...]
    tiles: tuple[tuple[int, int], ...]
    fresh: int
    heads: int
    steps: tuple[tuple[int, int], ...]
    step_shape: dict[str, int]
    text_bytes: int
    vocabulary: int
    window: int
    sources: dict[str, SourceSizes]
    shares: dict[str, float]
    carried: str
    most_seconds: float
    calibration: tuple[int, int]
    budgets: tuple[str, ...]
    folds: tuple[str, ...]
    rule_shares: tuple[float, ...]
    refine_steps: int
    windows: tuple[int, int]
    retrieval: dict[str, Any]
    recovery: dict[str, int]
    cells: tuple[tuple[str, str, str], ...]
    pretrained: dict[str, str]
    pretrained_windows: tuple[tuple[int, int], ...]
    trained: tuple[str, ...]
    training: dict[str, Any]
    kinds: tuple[tuple[str, str], ...]
    step_tokens: tuple[int, int]
    losses: tuple[str, ...]
    large: dict[str, Any]
    large_folds: dict[str, str]


_CONTEXTS = (32768, 8192, 131072)
_BATCHES = (8, 1, 64)
_WIDTHS = ((512, 64), (256, 64), (384, 64), (1024, 64))
_FIRST = ("mla", "gqa", "mla, closed form", "gqa, closed form", "gqa mean", *RULES, "mla --rope intact")
_ORDER = tuple(dict.fromkeys((*_FIRST, *FOLDS)))

FULL = Sizes(
    name="full",
    checks="",
    agreements=(
        (512, 64), (16, 0), (24, 8), (64, 32), (128, 32), (192, 64), (256, 0), (256, 32), (384, 64),
        (576, 64), (768, 64), (1024, 64), (256, 256), (1024, 256),
    ),
    speeds=tuple(
        (*width, context, batch) for width in _WIDTHS for context in _CONTEXTS for batch in _BATCHES
    ),
    tiles=((64, 2), (64, 3), (32, 2), (32, 4), (32, 6), (16, 8)),
    fresh=2**28,
    heads=32,
    steps=((32768, 8), (8192, 1)),
    step_shape={"layers": 4, "heads": 32, "head_dim": 128, "rank": 512, "rope": 64},
    text_bytes=160 * 10**6,
    vocabulary=16384,
    window=4096,
    sources={
        # 206 M parameters; 8 key/value heads of 64, so that 12.5 % of the cache is one head
        "source": SourceSizes(
            config={
                "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16,
                "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
            },
            micro_batch=4, step_windows=8, rate=8e-4,
        ),
        # 19 M parameters, 38 MB in bfloat16
        "twin": SourceSizes(
            config={
                "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8,
                "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
            },
            micro_batch=8, step_windows=16, rate=2e-3,
        ),
    },
    shares={"source": 0.8, "twin": 0.2},
    carried="twin",
    most_seconds=3600.0,
    calibration=(48, 2048),
    budgets=("25%", "12.5%", "50%"),
    folds=_ORDER,
    rule_shares=(0.25, 0.5),
    refine_steps=STEPS,
    windows=(32, 4096),
    retrieval={"retrieval_lengths": "1024,4096", "retrieval_samples": 4},
    recovery={"tokens": 2**22, "batch_tokens": 32768, "window": 2048, "evaluations": 8, "windows": 32},
    cells=(
        ("mla 12.5%", "best", "kl"), ("mla 12.5%", "plain", "ce"), ("mla 12.5%", "best", "align+kl"),
        ("mla 12.5%", "best", "ce"), ("mla 12.5%", "plain", "kl"), ("mla 25%", "best", "kl"),
        ("mla 25%", "plain", "ce"), ("gqa 1 head", "best", "kl"), ("gqa 1 head", "plain", "ce"),
    ),
    pretrained={
        "mla 50%": "--to mla --kv-budget 50% --container remote --length 256",
        # the best of twelve settings on SmolLM2-135M (docs/results/pretrained.md)
        "transmla 50%": "--to mla --kv-budget 50% --rope-dim 32 --method transmla:fold2:balance0.5"
        " --container remote",
        "mla 25%": "--to mla --kv-budget 25% --container remote",
        "gqa 1 head": "--to gqa --kv-heads 1",
    },
    pretrained_windows=((256, 32), (2048, 16)),
    trained=("mla 50%", "transmla 50%"),
    training={
        "window": 1024,
        "stage": {"lr": 2e-4, "tokens": 2**22, "batch_tokens": 32768, "micro_batch": 8},
        "evaluate": {"every": 16, "windows": 32},
    },
    kinds=(
        ("all", "plain"), ("all", "online"), ("attention", "plain"), ("attention", "online"),
        ("attention", "shared"),
    ),
    step_tokens=(32768, 4096),
    losses=(
        "--tokens", "8192", "--vocabulary", "128256", "--hidden", "4096", "--repeats", "1", "--chunks", "27",
    ),
    # the shape of Llama 3.2 1B
    large={
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True,
    },
    large_folds={
        "mla 25%": "--to mla --kv-budget 25% --jobs 4",
        "mla 25% quick": "--to mla --kv-budget 25% --jobs 4 --effort quick",
        "gqa 25%": "--to gqa --kv-budget 25% --jobs 4",
    },
)  # fmt: skip

# One source that trains for three minutes and is small enough to be carried home, where what needs no GPU is
# measured.
LENT = replace(
    FULL,
    name="lent",
    text_bytes=120 * 10**6,
    vocabulary=8192,
    sources={
        # 29 M parameters, 58 MB in bfloat16; 8 key/value heads of 64
        "source": SourceSizes(
            config={
                "hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": 7,
                "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
            },
            micro_batch=8, step_windows=8, rate=1.5e-3,
        ),
    },
    shares={"source": 1.0},
    carried="source",
    most_seconds=140.0,
    folds=("mla, default effort", "gqa, default effort", "mla --rope intact, default effort", "gqa mean"),
    windows=(16, 4096),
    recovery={**FULL.recovery, "tokens": 2**21, "windows": 16},
    cells=(("mla 12.5%", "best", "kl"), ("mla 12.5%", "plain", "ce"), ("mla 12.5%", "plain", "kl")),
    kinds=(("all", "plain"), ("all", "online"), ("attention", "shared")),
)  # fmt: skip

TOY = Sizes(
    name="toy",
    checks="gpt2 --to mqa",
    agreements=((24, 8),),
    speeds=((32, 8, 64, 2),),
    tiles=(),
    fresh=2**12,
    heads=4,
    steps=((16, 2),),
    step_shape={"layers": 1, "heads": 2, "head_dim": 8, "rank": 8, "rope": 4},
    text_bytes=200_000,
    vocabulary=320,
    window=256,
    sources={
        name: SourceSizes(
            config={
                "hidden_size": size, "intermediate_size": 2 * size, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
            },
            micro_batch=2, step_windows=2, rate=3e-3,
        )
        for name, size in (("source", 32), ("twin", 16))
    },
    shares={"source": 0.6, "twin": 0.4},
    carried="twin",
    most_seconds=1.5,
    calibration=(4, 64),
    budgets=("25%",),
    folds=("gqa mean", "mla", "mla svd"),
    rule_shares=(0.5,),
    refine_steps=2,
    windows=(2, 64),
    retrieval={
        "retrieval_lengths": "200", "retrieval_samples": 1, "retrieval_depths": 1, "retrieval_keys": 2,
    },
    recovery={"tokens": 1024, "batch_tokens": 512, "window": 64, "evaluations": 2, "windows": 2},
    cells=(("mla 25%", "plain", "kl"),),
    pretrained={
        "mla 50%": "--to mla --kv-budget 50% --container remote --sequences 4 --length 32 --refine 2",
        "gqa 1 head": "--to gqa --kv-heads 1",
    },
    pretrained_windows=((64, 2),),
    trained=("mla 50%",),
    training={
        "window": 64,
        "stage": {"lr": 2e-4, "tokens": 512, "batch_tokens": 256, "micro_batch": 2},
        "evaluate": {"every": 1, "windows": 2},
    },
    kinds=(("all", "plain"), ("all", "online")),
    step_tokens=(128, 32),
    losses=("--tokens", "32", "--vocabulary", "64", "--hidden", "16", "--repeats", "1", "--chunks", "10"),
    large={
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 256,
    },
    large_folds={"mla 50%": "--to mla --kv-budget 50% --sequences 4 --length 32 --refine 2"},
)  # fmt: skip
SIZES = {sizes.name: sizes for sizes in (FULL, LENT, TOY)}
