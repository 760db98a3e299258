"""One checkpoint loaded as any user would load it, and measured against its source.

This is a script of its own that imports no kvfold. It reads one JSON object from stdin and writes one to
stdout. `verify.py` runs it in a fresh process, where `import kvfold` fails. Where it is asked for `texts`,
it scores these tokens instead, which another engine chose.

Legend: S sequences, T tokens, V vocabulary.
"""

import inspect
import json
import sys
from typing import Any

import torch
from torch import Tensor

PROMPT, STEPS = 8, 16  # tokens that greedy decoding starts from, and adds
FLOOR = 16  # nats below the most probable token, where llama.cpp's file ends
SHORT, LONG = 4, 8  # tokens between which the cache is seen to grow: shorter than any window


def load(directory: str, dtype: str, trust: bool) -> tuple[Any, list[str]]:
    """Load a model in eval mode, and return it with the weights that its files lack.

    Transformers fills these with random numbers.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
    )

    loader: Any = AutoModelForCausalLM
    kind = None if trust else type(AutoConfig.from_pretrained(directory, local_files_only=True))
    if kind is not None and kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        # A multimodal class; it is asked for text alone.
        classes = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)
        loader = next((known[kind] for known in classes if kind in known), loader)
    model, info = loader.from_pretrained(
        directory,
        dtype=dtype,
        trust_remote_code=trust,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        # Fused attention leaves this bound on the scores out; up to 5.19 transformers does not say so.
        model.set_attn_implementation("eager")
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), sorted(info["missing_keys"])


def advance(model: Any, ids_ST: Tensor, cache: Any, **place: Tensor) -> tuple[Any, Any]:
    """Let a model read more tokens, and return its output and its cache, called `cache` from 5.24 on."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    output = model(input_ids=ids_ST, use_cache=True, **{name: cache}, **place)
    return output, output.cache if "cache" in output else output.past_key_values


def written(model: Any, sequences: int, length: int, seed: int) -> Tensor:
    """Let a model write text (S, T) at temperature 1."""
    vocabulary = model.get_output_embeddings().weight.shape[0]
    bos = model.config.get_text_config().bos_token_id
    chance_ST = torch.rand(
        sequences, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    first_S = (chance_ST[:, 0] * vocabulary).long()
    if isinstance(bos, int) and bos < vocabulary:
        first_S.fill_(bos)
    columns = [first_S.to(model.device)]
    cache = None
    for chance_S in chance_ST[:, 1:].T.to(model.device):
        output, cache = advance(model, columns[-1][:, None], cache)
        below_SV = output.logits[:, -1].softmax(-1).cumsum(-1, dtype=torch.float64)
        aim_S1 = chance_S[:, None] * below_SV[:, -1:]
        columns.append(torch.searchsorted(below_SV, aim_S1, right=True).squeeze(1).clamp(max=vocabulary - 1))
    return torch.stack(columns, 1)


def logits(model: Any, text_ST: Tensor) -> Tensor:
    """Return logits (S, T, V), float32, on the CPU, computed one sequence at a time."""
    return torch.cat(
        [model(input_ids=text_1T[None], use_cache=False).logits.float().cpu() for text_1T in text_ST]
    )


def compared(ours_STV: Tensor, theirs_STV: Tensor, text_ST: Tensor) -> dict[str, float]:
    """Return the distance of one model's predictions from another's, in nats, and both perplexities."""
    width = min(ours_STV.shape[-1], theirs_STV.shape[-1])
    divergence = same = loss = source_loss = farthest = largest = 0.0
    for ours_TV, theirs_TV, text_T in zip(
        ours_STV[..., :width], theirs_STV[..., :width], text_ST.cpu(), strict=True
    ):
        q_TV = ours_TV.double().log_softmax(-1)
        p_TV = theirs_TV.double().log_softmax(-1)
        divergence += (p_TV.exp() * (p_TV - q_TV)).sum(-1).mean().item()
        same += (q_TV.argmax(-1) == p_TV.argmax(-1)).double().mean().item()
        loss -= q_TV[:-1].gather(1, text_T[1:, None]).mean().item()
        source_loss -= p_TV[:-1].gather(1, text_T[1:, None]).mean().item()
        farthest = max(farthest, (ours_TV - theirs_TV).abs().max().item())
        largest = max(largest, theirs_TV.std(-1).max().item())
    count = len(text_ST)
    return {
        "kl": divergence / count,
        "same_top1": same / count,
        "perplexity": float(torch.tensor(loss / count).exp()),
        "source_perplexity": float(torch.tensor(source_loss / count).exp()),
        "max_difference": farthest,
        "logit_deviation": largest,
    }


def decode(model: Any, prompt_ST: Tensor) -> tuple[Tensor, Tensor]:
    """Decode the most probable tokens (S, STEPS) over the cache, and return each one's lead in nats.

    The lead is over the next most probable token.
    """
    last_ST, cache, chosen, leads = prompt_ST, None, [], []
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    for step in range(STEPS):
        place = {}
        if step and any(kind in {"linear_attention", "conv"} for kind in kinds):
            # Some classes count positions from a layer that has no keys, or not at all.
            place = {"position_ids": torch.full_like(last_ST, prompt_ST.shape[1] + step - 1)}
        output, cache = advance(model, last_ST, cache, **place)
        best = output.logits[:, -1].float().topk(2)
        last_ST = best.indices[:, :1]
        chosen.append(last_ST)
        leads.append(best.values[:, :1] - best.values[:, 1:])
    return torch.cat(chosen, 1), torch.cat(leads, 1)


def greedy_gap(model: Any, prompt_1T: Tensor) -> float:
    """Return how far greedy tokens over the cache fall short of those of one pass without it.

    It is 0 where decoding with and without the cache gives the same tokens, and a rounding where two tokens
    are equally probable.
    """
    chosen_1T, _ = decode(model, prompt_1T)
    text_1T = torch.cat([prompt_1T, chosen_1T], 1)
    row_TV = model(input_ids=text_1T, use_cache=False).logits[0, prompt_1T.shape[1] - 1 : -1].float()
    chosen_T = row_TV.gather(1, chosen_1T[0, :, None])[:, 0]
    return float((row_TV.max(-1).values - chosen_T).max())


def answers(model: Any, logits_STV: Tensor, text_ST: Tensor) -> dict[str, Any]:
    """Return the answers that another engine's are compared with.

    They are log-probabilities of the text, greedy tokens, and their leads.
    """
    score_ST = logits_STV[:, :-1].log_softmax(-1).gather(2, text_ST.cpu()[:, 1:, None]).squeeze(2)
    token_ST, lead_ST = decode(model, text_ST[:, :PROMPT])
    return {"log_probs": score_ST.tolist(), "tokens": token_ST.tolist(), "leads": lead_ST.tolist()}


def growth(model: Any, text_1T: Tensor) -> list[list[float]]:
    """Return how much one more token adds to the keys and values of a live cache, in elements.

    There is an entry for each layer that has keys; other layers keep a state of fixed size.
    """
    sizes = []
    for length in (SHORT, LONG):
        layers = advance(model, text_1T[:, :length], None)[1].layers
        cached = [layer for layer in layers if getattr(layer, "keys", None) is not None]
        sizes.append([[layer.keys.numel(), layer.values.numel()] for layer in cached])
    return [
        [(b - a) / (LONG - SHORT) for a, b in zip(short, long, strict=True)]
        for short, long in zip(*sizes, strict=True)
    ]


def scored(asked: dict[str, Any]) -> dict[str, Any]:
    """Score the second half of every window of tokens, and continue a prompt, as llama.cpp does."""
    from transformers import AutoTokenizer

    model, _ = load(asked["directory"], "float32", False)
    tokenizer = AutoTokenizer.from_pretrained(
        asked["directory"], local_files_only=True, trust_remote_code=False
    )
    begin = asked["texts"][0][0]
    begins = begin in (tokenizer.bos_token_id, model.config.bos_token_id)  # then it begins every window
    scores = []
    first = len(asked["texts"][0]) // 2
    for window in asked["texts"]:
        ids = [begin, *window[1:]] if begins else window
        text_1T = torch.tensor([ids], device=model.device)
        known_TV = logits(model, text_1T)[0, first:-1].log_softmax(-1)
        known_TV = known_TV.maximum(known_TV.max(-1, keepdim=True).values - FLOOR)
        scores += known_TV.gather(1, torch.tensor(ids[first + 1 :])[:, None])[:, 0].tolist()
    prompt = tokenizer(asked["prompt"], add_special_tokens=False)["input_ids"]
    prompt_1T = torch.tensor([[begin, *prompt] if begins else prompt], device=model.device)
    chosen_1T, lead_1T = decode(model, prompt_1T)
    return {
        "scores": scores,
        "continued": tokenizer.decode(chosen_1T[0].tolist()),
        "least_lead": float(lead_1T.min()),
    }


def main() -> None:
    """Measure what stdin asks for."""
    sys.modules["kvfold"] = None  # type: ignore[assignment]
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    asked = json.load(sys.stdin)
    if "texts" in asked:
        print(json.dumps(scored(asked)))
        return
    sizes = {name: asked[name] for name in ("sequences", "length", "seed")}
    theirs_STV = text_ST = None
    told: dict[str, Any] = {}
    if asked["source"] is not None:
        source, _ = load(asked["source"], asked["dtype"], False)
        text_ST = written(source, **sizes)
        theirs_STV = logits(source, text_ST)
        told |= {"source": answers(source, theirs_STV, text_ST)} if asked["answers"] else {}
        del source
    model, missing = load(asked["directory"], asked["dtype"], asked["trust"])
    text_ST = written(model, **sizes) if text_ST is None else text_ST
    ours_STV = logits(model, text_ST)
    seen: dict[str, Any] = {
        "class": type(model).__name__,
        "missing": missing,
        "finite": bool(ours_STV.isfinite().all()),
    }
    if seen["finite"]:
        if asked["answers"]:
            told |= {
                "text": text_ST.tolist(),
                "prompt": PROMPT,
                "steps": STEPS,
                "own": answers(model, ours_STV, text_ST),
            }
            seen["answers"] = told
        seen["greedy_gap"] = greedy_gap(model, text_ST[:1, :PROMPT])
        seen["cache"] = growth(model, text_ST[:1])
        if theirs_STV is not None:
            seen |= compared(ours_STV, theirs_STV, text_ST)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
