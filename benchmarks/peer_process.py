"""One run of a peer's own code, in the peer's own interpreter: `python peer_process.py JOB.json`.

It imports torch, transformers and the peer's repository, and nothing of kvfold, so that the versions a peer
needs do not matter here. JOB.json has

- `adapter`: of ADAPTERS;
- `repository`: the peer's directory, or for `directory` a converted model;
- `model`: the source's directory;
- `settings`: the peer's own options, by name;
- `tokens`: a file of torch tensors: `calibration` (B, T), `windows` (N, W) and `scored` (N, W-1);
- `out`: the file for the result: `nll`, the loss of every window in nats, and `versions`.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

BATCH = 8  # sequences read at once


def plain(model: Any, repository: Path, settings: Mapping[str, Any], ids_BT: torch.Tensor) -> Any:
    """Return the source as it is."""
    return model


def directory(model: Any, repository: Path, settings: Mapping[str, Any], ids_BT: torch.Tensor) -> Any:
    """Return a model that the peer's own command has written; its code is run only if settings say so."""
    from transformers import AutoModelForCausalLM

    trusted = bool(settings.get("trust_remote_code", False))
    return AutoModelForCausalLM.from_pretrained(
        repository, torch_dtype=torch.float32, trust_remote_code=trusted
    )


def merged_heads(model: Any, repository: Path, settings: Mapping[str, Any], ids_BT: torch.Tensor) -> Any:
    """Fold by TransMLA's or CARE's two functions, `partial_rope` and `low_rank_qkv`.

    Settings are the options of their converters: qk_mqa_dim, kv_lora_rank, freqfold, balance_kv_ratio,
    q_lora_rank, kv_decomp_method (CARE), cwsvd_percdamp, cal_mode.
    """
    places = (repository / place for place in (".", "src", "transmla", "transmla/transmla"))
    sys.path.insert(0, str(next(place for place in places if (place / "lora_qkv.py").is_file())))
    from lora_qkv import low_rank_qkv  # type: ignore[import-not-found]
    from partial_rope import partial_rope  # type: ignore[import-not-found]

    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    config.head_dim = head_dim
    collapse = head_dim // int(settings["qk_mqa_dim"])
    options: dict[str, Any] = {
        "freqfold": collapse, "collapse": collapse, "q_lora_rank": None, "balance_kv_ratio": 1.0,
        "use_qkv_norm": False, "cwsvd_percdamp": 0.01, "kv_decomp_method": "transmla", **settings,
    }  # fmt: skip
    batches = [
        {"input_ids": part_BT, "attention_mask": torch.ones_like(part_BT)} for part_BT in ids_BT.split(BATCH)
    ]
    tokenizer = SimpleNamespace(pad_token_id=None)
    model = partial_rope(model, tokenizer, batches, None, **options)
    low_rank_qkv(model, tokenizer, batches, None, **options)
    return model


def norm_ranks(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    """Return the ranks of the rotary pairs of every layer and key head by norm, the largest first.

    MHA2MLA's own command for this reads Nanosets on a GPU. As there, a pair's number is the mean norm over
    tokens of the key's pair times that of the query's, summed over the query heads of a key head.

    Args:
        model: the source.
        ids_BT: calibration tokens.

    Returns:
        Integers (layers, key heads, head dim), each rank once for either half of a head.
    """
    config = model.config
    sums: dict[str, Any] = {}

    def count(name: str) -> Callable[[Any, Any, torch.Tensor], None]:
        def hook(_module: Any, _inputs: Any, rows_BTR: torch.Tensor) -> None:
            pairs = rows_BTR.unflatten(-1, (-1, 2, config.head_dim // 2)).norm(dim=-2)
            sums[name] = sums.get(name, 0) + pairs.double().sum((0, 1))

        return hook

    layers = list(enumerate(model.model.layers))
    hooks = [
        getattr(layer.self_attn, f"{role}_proj").register_forward_hook(count(f"{number}{role}"))
        for number, layer in layers
        for role in "qk"
    ]
    for part_BT in ids_BT.split(BATCH):
        model(input_ids=part_BT, use_cache=False)
    for hook in hooks:
        hook.remove()
    heads = config.num_key_value_heads
    products = [
        sums[f"{number}q"].unflatten(0, (heads, -1)).sum(1) * sums[f"{number}k"] for number, _ in layers
    ]
    ranks = torch.stack(products).argsort(-1, descending=True).argsort(-1)
    return torch.cat([ranks, ranks], -1)


def mha2mla(model: Any, repository: Path, settings: Mapping[str, Any], ids_BT: torch.Tensor) -> Any:
    """Fold by MHA2MLA's `patch_model` and `mha2mla_llama`.

    Settings: partial_rope_version, rope_dim_for_mla and low_rank (per key head), svd_init_method,
    qk_tensor_path. The version `2-norm` without qk_tensor_path ranks pairs on the calibration tokens.
    """
    sys.path.insert(0, str(repository / "src" / "mha2mla"))
    from patching_llama import mha2mla_llama  # type: ignore[import-not-found]
    from patching_model_load import patch_model  # type: ignore[import-not-found]

    options: dict[str, Any] = {
        "partial_rope_version": "high", "uniform_start_point": 0, "qk_tensor_path": None,
        "svd_init_method": "joint", "is_gqa2mha2mla": False, "is_mla_from_scratch": False, **settings,
    }  # fmt: skip
    if options["partial_rope_version"] == "2-norm" and options["qk_tensor_path"] is None:
        ranks = Path("ranks.pth").resolve()  # the working directory is temporary
        torch.save(norm_ranks(model, ids_BT), ranks)
        options["qk_tensor_path"] = str(ranks)
    model, queries, keys = patch_model(model, model.config, SimpleNamespace(**options))
    mha2mla_llama(queries, keys)
    return model


def xecomla(model: Any, repository: Path, settings: Mapping[str, Any], ids_BT: torch.Tensor) -> Any:
    """Fold all layers by X-EcoMLA's model wrapper with its SVD initialisation.

    Settings: qk_rope_head_dim and kv_lora_rank; the rest of a head is un-rotated, and queries keep their full
    rank, which is not cached. The wrapper asks for a GPU and FlashAttention. Here it gets the CPU and its own
    attention class without FlashAttention instead.
    """
    from transformers import PretrainedConfig

    sys.path.insert(0, str(repository / "X-EcoMLA"))
    # A config is the default of a data class there, which Python takes since 3.11 only if it can be hashed.
    PretrainedConfig.__hash__ = object.__hash__  # type: ignore[method-assign]
    import mla.hybrid_model as parts  # type: ignore[import-not-found]
    import mla.hybrid_wrapper as wrapper  # type: ignore[import-not-found]
    from mla.hybrid_mla_config import DeepseekV3Config, MLAConfig  # type: ignore[import-not-found]

    class Attention(parts.DeepseekV3Attention):  # type: ignore[misc, name-defined]
        def forward(self, hidden_states: Any, attention_mask: Any = None, **further: Any) -> Any:
            # transformers makes masks that have room for one token more.
            mask = attention_mask[..., : hidden_states.shape[1]]
            return super().forward(hidden_states, mask, **further)

    parts.DeepseekV3FlashAttention2 = Attention
    model.config._attn_implementation = "eager"  # so that layers get a mask
    config, width = model.config, int(settings["qk_rope_head_dim"])
    layer = DeepseekV3Config(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        attention_dropout=config.attention_dropout,
        num_attention_heads=config.num_attention_heads,
        llama_num_key_value_heads=config.num_key_value_heads,
        mla_num_key_value_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        rope_theta=config.rope_theta,
        q_lora_rank=min(config.hidden_size, config.num_attention_heads * config.head_dim),
        q_energy_ratio=None,
        qk_rope_head_dim=width,
        kv_lora_rank=int(settings["kv_lora_rank"]),
        use_lora_layer_norm=False,
        v_head_dim=config.head_dim,
        qk_nope_head_dim=config.head_dim - width,
        attention_bias=config.attention_bias,
    )
    whole = MLAConfig(
        config.hidden_size,
        layer,
        config.rms_norm_eps,
        d_inner=config.num_attention_heads * config.head_dim,
        d_xb=config.num_key_value_heads * config.head_dim,
        intermediate_size=config.intermediate_size,
        hidden_act=config.hidden_act,
        n_layer=config.num_hidden_layers,
        attn_layers=[],
    )
    torch.nn.Module.cuda = torch.nn.Module.cpu  # type: ignore[assignment, method-assign]
    wrapper.MLATransformerHybridModelWrapper(None, model, whole, [], torch.float32, True)
    return model


Adapter = Callable[[Any, Path, Mapping[str, Any], torch.Tensor], Any]
ADAPTERS: dict[str, Adapter] = {
    "source": plain,
    "directory": directory,
    "transmla": merged_heads,
    "care": merged_heads,
    "mha2mla": mha2mla,
    "xecomla": xecomla,
}


@torch.no_grad()
def losses(model: Any, windows_NW: torch.Tensor, scored_NT: torch.Tensor) -> torch.Tensor:
    """Return the summed loss of every window (N,), nats, float64."""
    found = []
    for ids_BW, scored_BT in zip(windows_NW.split(BATCH), scored_NT.split(BATCH), strict=True):
        logits_BTV = model(input_ids=ids_BW[:, :-1], use_cache=False).logits.double()
        nll_BT = torch.nn.functional.cross_entropy(logits_BTV.mT, ids_BW[:, 1:], reduction="none")
        found.append((nll_BT * scored_BT).sum(1))
    return torch.cat(found)


def main(file: Path) -> None:
    """Run the job that a file describes."""
    import transformers
    from transformers import AutoModelForCausalLM

    job = json.loads(file.read_text(encoding="utf-8"))
    tokens = torch.load(job["tokens"], weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(job["model"], torch_dtype=torch.float32).eval()
    with torch.no_grad():
        model = ADAPTERS[job["adapter"]](
            model, Path(job["repository"]), job["settings"], tokens["calibration"]
        ).eval()
    nll_N = losses(model, tokens["windows"], tokens["scored"])
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    Path(job["out"]).write_text(json.dumps({"nll": nll_N.tolist(), "versions": versions}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
