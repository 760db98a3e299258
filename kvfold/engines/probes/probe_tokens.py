"""One checkpoint in transformers on tokens that another engine chose: scores, and what greedy decoding adds.

This is a script that imports no kvfold. It reads one JSON object from stdin and writes one to stdout.
"""

import inspect
import json
import sys

FLOOR = 16  # nats below the most probable token, where llama.cpp's file ends


def main() -> None:
    """Score the second half of every window, and continue the prompt."""
    sys.modules["kvfold"] = None  # type: ignore[assignment]
    asked = json.load(sys.stdin)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    local = {"local_files_only": True, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(
        asked["directory"], dtype=torch.float32, use_safetensors=True, **local
    ).eval()
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # as in probe.py: others may leave this bound on scores out
    tokenizer = AutoTokenizer.from_pretrained(asked["directory"], **local)
    begin = asked["texts"][0][0]
    begins = begin in (tokenizer.bos_token_id, model.config.bos_token_id)  # then it begins every window
    scores = []
    first = len(asked["texts"][0]) // 2
    for window in asked["texts"]:
        ids = [begin, *window[1:]] if begins else window
        known = (
            model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, first:-1].float().log_softmax(-1)
        )
        known = known.maximum(known.max(-1, keepdim=True).values - FLOOR)
        scores += known.gather(1, torch.tensor(ids[first + 1 :])[:, None])[:, 0].tolist()
    prompt = tokenizer(asked["prompt"], add_special_tokens=False)["input_ids"]
    if begins:
        prompt = [begin, *prompt]
    # As transformers calls it from 5.24 on, or before.
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    last, cache, chosen, leads = torch.tensor([prompt]), None, [], []
    for _ in range(asked["steps"]):
        output = model(input_ids=last, use_cache=True, **{named: cache})
        best = output.logits[0, -1].float().topk(2)
        cache = output.cache if "cache" in output else output.past_key_values
        last = best.indices[None, :1]
        chosen.append(int(last))
        leads.append(float(best.values[0] - best.values[1]))
    told = {"scores": scores, "continued": tokenizer.decode(chosen), "least_lead": min(leads)}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
