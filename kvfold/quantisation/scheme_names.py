"""The table of schemes of `kvfold quantize`. It imports nothing heavy, since `--help` goes through it."""

from dataclasses import dataclass

GROUPS = (128, 64, 32)  # that vLLM's kernels take, the usual one first


@dataclass(frozen=True, kw_only=True)
class WeightScheme:
    """A row.

    Attributes:
        preset: its name in compressed-tensors.
        words: what it stores and computes in, a sentence's part.
        bits: of a weight.
        grouped: whether groups of columns share a scale, instead of whole rows.
    """

    preset: str
    words: str
    bits: int
    grouped: bool = False


SCHEMES = {
    "fp8": WeightScheme(
        preset="FP8_DYNAMIC", bits=8, words="FP8 (E4M3) weights and activations, scales per row and per token"
    ),
    "w4a16": WeightScheme(
        preset="W4A16", bits=4, grouped=True, words="4-bit weights with scales per group, 16-bit activations"
    ),
    "w8a8": WeightScheme(
        preset="W8A8", bits=8, words="int8 weights and activations, scales per row and per token"
    ),
}
