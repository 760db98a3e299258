"""Costs of every attention variant, by formula: parameters, cache, multiplications. No tensors here.

A multiply-add is two FLOPs; softmax, norms, rotation and biases are left out. T new tokens, S tokens in the
cache.
"""

from dataclasses import dataclass, field

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}  # bytes of a cached number


@dataclass(frozen=True, kw_only=True)
class Costs:
    """One variant at one shape.

    Attributes:
        name: of the variant.
        parameters: weights of each matrix, without biases.
        cache: numbers cached per token and layer.
        cache_formula: where they come from.
        token_flops: of the projections of one new token.
        pair_flops: of one query token with one key token, all heads.
        expand_flops: of rebuilding keys and values of one cached token at each step of decoding; 0 where that
            is not done.
        prefill_formula: FLOPs of T new tokens.
        decode_formula: FLOPs of one token behind S others.
        order: asymptotic cost of prefill, of decoding one token, and of the cache.
        fixed_cache: numbers cached per sequence, whatever its length.
        fixed_flops: of a sequence, whatever its length.
    """

    name: str
    parameters: dict[str, int] = field(default_factory=dict)
    cache: int
    cache_formula: str
    token_flops: int
    pair_flops: int
    expand_flops: int = 0
    prefill_formula: str
    decode_formula: str
    order: tuple[str, str, str]
    fixed_cache: int = 0
    fixed_flops: int = 0

    @property
    def total(self) -> int:
        """Return the number of all parameters."""
        return sum(self.parameters.values())

    def cache_bytes(self, tokens: int, dtype: str) -> int:
        """Return the bytes of one layer's cache of one sequence."""
        return (self.cache * tokens + self.fixed_cache) * DTYPES[dtype]

    def prefill(self, tokens: int) -> int:
        """Return the FLOPs of that many new tokens; kernels skip future tokens."""
        return self.fixed_flops + tokens * self.token_flops + tokens * (tokens + 1) // 2 * self.pair_flops

    def decode(self, cached: int) -> int:
        """Return the FLOPs of one new token after that many cached ones."""
        return self.token_flops + (cached + 1) * self.pair_flops + cached * self.expand_flops


def multi_head(d_model: int, heads: int, kv_heads: int | None = None, head_dim: int | None = None) -> Costs:
    """Return the costs of MHA, GQA and MQA."""
    kv_heads, width = kv_heads or heads, head_dim or d_model // heads
    query = d_model * heads * width
    key = d_model * kv_heads * width
    parameters = {"W_Q": query, "W_K": key, "W_V": key, "W_O": query}
    return Costs(
        name="MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else f"GQA-{kv_heads}",
        parameters=parameters,
        cache=2 * kv_heads * width,
        cache_formula="2·n_kv·d_h",
        token_flops=2 * sum(parameters.values()),
        pair_flops=4 * heads * width,
        prefill_formula="T·4·d·d_h·(n_h + n_kv) + T(T+1)/2·4·n_h·d_h",
        decode_formula="4·d·d_h·(n_h + n_kv) + (S+1)·4·n_h·d_h",
        order=("T·d·(n_h+n_kv)·d_h + T²·n_h·d_h", "d·(n_h+n_kv)·d_h + S·n_h·d_h", "S·n_kv·d_h"),
    )


def latent(
    d_model: int,
    heads: int,
    rank: int,
    q_rank: int | None = None,
    *,
    nope: int,
    rope: int,
    value: int,
    absorbed: bool = False,
    experts: int = 1,
    top_k: int = 1,
) -> Costs:
    """Return the costs of MLA, expanded or absorbed.

    With more than one expert its up-projections are a mixture.
    """
    rows = heads * (nope + value)
    queries = {"W_Q": d_model * heads * (nope + rope)}
    if q_rank is not None:
        queries = {"W_DQ": d_model * q_rank, "W_UQ, W_QR": q_rank * heads * (nope + rope)}
    parameters = {
        **queries,
        "W_DKV": d_model * rank,
        "W_KR": d_model * rope,
        "W_UK": experts * rank * heads * nope,
        "W_UV": experts * rank * heads * value,
        "W_O": heads * value * d_model,
    }
    if experts > 1:
        parameters["router"] = experts * rank
    # W_UK and W_UV once for a token, on either side.
    used = sum(parameters.values()) - (experts - top_k) * rank * rows
    pair = heads * (2 * rank + rope if absorbed else nope + rope + value)
    up = "d_c·n_h·(d_n+d_v)" if experts == 1 else "d_c·(k·n_h·(d_n+d_v) + E)"
    once = f"d·(n_h·(d_n+d_r) + d_c + d_r + n_h·d_v) + {up}"
    if q_rank is not None:
        once = f"d·(d_q + d_c + d_r + n_h·d_v) + d_q·n_h·(d_n+d_r) + {up}"
    pair_formula = "2·n_h·(2·d_c+d_r)" if absorbed else "2·n_h·(d_n+d_r+d_v)"
    again = "" if absorbed else f" + S·2·{up}"
    width = "n_h·d_c" if absorbed else "n_h·(d_n+d_r+d_v)"
    return Costs(
        name=(f"MLA, {experts} experts" if experts > 1 else "MLA") + (", absorbed" if absorbed else ""),
        parameters=parameters,
        cache=rank + rope,
        cache_formula="d_c + d_r",
        token_flops=2 * used,
        pair_flops=2 * pair,
        expand_flops=0 if absorbed else 2 * top_k * rank * rows + (2 * experts * rank if experts > 1 else 0),
        prefill_formula=f"T·2·({once}) + T(T+1)/2·{pair_formula}",
        decode_formula=f"2·({once}) + (S+1)·{pair_formula}{again}",
        order=(f"T·params + T²·{width}", f"params + S·{width if absorbed else up}", "S·(d_c+d_r)"),
    )


def intact(
    d_model: int, heads: int, kv_heads: int, head_dim: int, rank: int, q_rank: int | None = None
) -> Costs:
    """Return the costs of MLA whose keys are rebuilt from the latent, then rotated.

    Every cached token is rebuilt at each step.
    """
    rows = 2 * kv_heads * head_dim
    width = heads * head_dim
    queries = (
        {"W_Q": d_model * width} if q_rank is None else {"W_DQ": d_model * q_rank, "W_UQ": q_rank * width}
    )
    parameters = {**queries, "W_DKV": d_model * rank, "W_UK, W_UV": rank * rows, "W_O": width * d_model}
    asked = "d·n_h·d_h" if q_rank is None else "d_q·(d + n_h·d_h)"
    once = f"{asked} + d·(d_c + n_h·d_h) + 2·d_c·n_kv·d_h"
    return Costs(
        name="MLA, rotation intact",
        parameters=parameters,
        cache=rank,
        cache_formula="d_c",
        token_flops=2 * sum(parameters.values()),
        pair_flops=4 * width,
        expand_flops=2 * rank * rows,
        prefill_formula=f"T·2·({once}) + T(T+1)/2·4·n_h·d_h",
        decode_formula=f"2·({once}) + (S+1)·4·n_h·d_h + S·4·d_c·n_kv·d_h",
        order=("T·params + T²·n_h·d_h", "params + S·d_c·n_kv·d_h", "S·d_c"),
    )


def latent_query(d_model: int, heads: int, latents: int) -> Costs:
    """Return the costs of Perceiver-style latents that read.

    A token is read by all latents, and no token reads another.
    """
    parameters = {
        "latents": latents * d_model,
        **dict.fromkeys(("W_Q", "W_K", "W_V", "W_O"), d_model * d_model),
    }
    return Costs(
        name=f"latent queries, {latents}",
        parameters=parameters,
        cache=0,
        cache_formula="L·n_h·(d_h+1) a sequence",
        token_flops=4 * d_model * d_model + 4 * latents * d_model,
        pair_flops=0,
        prefill_formula="T·(4·d² + 4·L·d), and 4·L·d² once for W_Q and W_O",
        decode_formula="4·d² + 4·L·d to read one more token",
        order=("T·d² + T·L·d", "d² + L·d", "L·d"),
        fixed_flops=4 * latents * d_model * d_model,
        fixed_cache=latents * heads * (d_model // heads + 1),
    )


def variants(d_model: int, heads: int, kv_heads: int, head_dim: int) -> list[Costs]:
    """Return the source and every GQA that its key/value heads divide into, down to MQA."""
    return [multi_head(d_model, heads, n, head_dim) for n in range(kv_heads, 0, -1) if kv_heads % n == 0]
