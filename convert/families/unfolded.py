"""Model types that kvfold does not fold, each with the reason; all causal ones of transformers are here.

Read in transformers 5.24. `kvfold families --all` prints them. A model type in neither this table nor that of
families is reported as not examined.
"""

from collections.abc import Iterable

NOT_EXAMINED = "not examined"
_BY_REASON: dict[str, tuple[str, ...]] = {
    "it is an encoder, which reads a whole text at once": (
        "albert", "bert", "bert-generation", "big_bird", "camembert", "clip", "data2vec-text",
        "deberta", "deberta-v2", "distilbert", "electra", "ernie", "megatron-bert", "modernbert",
        "mpnet", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
        "siglip", "vit", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod",
    ),
    "it is a part of an encoder-decoder model, whose decoder also attends to an encoder": (
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "musicgen",
        "mt5", "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "t5", "trocr", "umt5", "whisper",
    ),
    "it is an output of kvfold; fold its source again": ("kvfold",),
    "its attention is latent already, and reads the tokens that an index selects": (
        "axk2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4",
    ),
    "its attention is latent already, and gated": ("bailing_hybrid",),
    "its attention is latent already, and every layer has it twice": ("longcat_flash",),
    "it has no attention": ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"),
    "some of its layers have no attention, and folding only the others is not implemented": (
        "falcon_h1", "lfm3", "nemotron_h", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "zamba",
        "zamba2",
    ),
    "it gates each dimension of the attention's output, so values cannot change their basis": (
        "beam", "hrm_text", "laguna",
    ),
    "which of its layers rotate depends on two fields, and no row describes that": (
        "granite_swa", "granitemoe_swa",
    ),
    "its scores have a bias for each distance, and its class one key head per query head": ("bloom", "mpt"),
    "its class has one key head per query head, and no row describes its attention": (
        "biogpt", "codegen", "cpmant", "ctrl", "gpt_neo", "gpt_neox_japanese", "modernbert-decoder",
        "openai-gpt", "persimmon", "xglm",
    ),
    "its layers share keys and values, or differ in their widths": (
        "dots3_note", "dots3_note_text", "gemma3n", "gemma3n_text", "mimo_v2_flash",
    ),
    "it is a draft model, which reads the keys and values of the model that it drafts for": (
        "gemma4_assistant", "gemma4_unified_assistant",
    ),
    "it selects the tokens that it attends to by an index of its own": ("minimax_m3_vl_text",),
    "it is a multimodal model": (
        "emu3", "fuyu", "git", "got_ocr2", "mllama", "moshi", "moss_transcribe_diarize", "phi4_multimodal",
    ),
    "it is a multimodal model, whose text tower is folded in its place": (
        "gemma3", "gemma4", "gemma4_unified", "llama4", "qwen3_5", "qwen3_5_moe",
    ),
    "no row describes its attention": (
        "blt", "cohere_compass_text", "inkling2_text", "inkling_text", "lara_mini", "sarvam_moe", "zaya",
    ),
    "it runs some layers several times over, and may cache each pass": ("dory", "inkling2_loop_text"),
}  # fmt: skip
UNFOLDED = {kind: reason for reason, kinds in _BY_REASON.items() for kind in kinds} | {
    "bitnet": "its projections are ternary",
    "exaone": "its files name weights otherwise than its class does, and no row describes that",
    "dbrx": "its attention settings are in a config of their own, and its projections may be clamped",
    "diffllama": "its attention is the difference of two",
    "doge": "its attention mask is computed from the values",
    "gpt-sw3": "its checkpoints have model_type gpt2, which can be folded",
    "gpt_bigcode": "it has one key/value head already; with multi_query false no row describes its attention",
    "jetmoe": "its heads are experts, and each token uses only some",
}  # fmt: skip
# Model types that only checkpoints' own code computes, each with the class that their weights convert to.
CODE_ONLY: dict[str, str] = {
    "minicpm": "its factors can go into the weights of a LlamaForCausalLM, so convert it to that class first",
    "kimi_k2": "its weights are DeepseekV3ForCausalLM's, so set model_type deepseek_v3 without auto_map",
    "internlm": "convert it to LlamaForCausalLM with attention_bias first",
    "internlm2": "convert it to LlamaForCausalLM first, which has wqkv as three projections",
    "baichuan": "convert a 7B model to LlamaForCausalLM first, which has W_pack as three projections; no "
    "class of transformers has the distance biases of a 13B model",
    "chatglm": "convert ChatGLM2, ChatGLM3 or GLM-4 to GlmForCausalLM first; no class of transformers "
    "computes the first ChatGLM",
    "deci": "convert it to LlamaForCausalLM first, by repeating key/value heads until each layer has as many",
    "nemotron-nas": "no class of transformers leaves out the attention of some layers as it does",
}


def verdict(kind: str, folded: Iterable[str]) -> str:
    """Return `supported`, or the reason why a model type is not folded."""
    return "supported" if kind in folded else UNFOLDED.get(kind, NOT_EXAMINED)
