"""The training of the bundled checkpoint: `python -m kvfold.recipes.train_demo OUT`, an hour on two cores.

A Llama with multi-head attention (8 heads, 8 key/value heads) and a byte-level BPE vocabulary of 2,048,
trained on the source text of CPython's standard library, which every machine that runs Python has. The
modules of `kvfold.texts.standard_library.HELD_OUT` are never seen: they are the demo's evaluation text.
"""

import math
import time
from pathlib import Path

import click
import torch
from torch import Tensor

from ..texts.standard_library import stdlib_documents

VOCABULARY = 2048
CONTEXT = 256
BATCH = 16  # windows a step
PEAK_LR = 3e-3
WARM_UP = 200


def train_tokenizer(documents: tuple[str, ...]) -> "object":
    """Return a byte-level BPE tokenizer of `VOCABULARY` entries; `<s>` starts every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", model_max_length=CONTEXT
    )


def windows(stream: Tensor, generator: torch.Generator) -> Tensor:
    """Return a batch of `BATCH` windows (B, CONTEXT + 1) of the token stream, at random places."""
    starts = torch.randint(0, len(stream) - CONTEXT - 1, (BATCH,), generator=generator)
    return torch.stack([stream[start : start + CONTEXT + 1] for start in starts.tolist()])


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth of the peak."""
    if step < WARM_UP:
        return PEAK_LR * (step + 1) / WARM_UP
    progress = (step - WARM_UP) / max(1, steps - WARM_UP)
    return PEAK_LR * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--steps", default=3500, show_default=True, help=f"Optimizer steps of {BATCH} x {CONTEXT} tokens."
)
def main(out: Path, steps: int) -> None:
    """Train the demo checkpoint and write it to OUT."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    documents = stdlib_documents(held_out=False)
    tokenizer = train_tokenizer(documents)
    ids = [token for text in documents for token in tokenizer(text, verbose=False).input_ids]  # type: ignore[operator]
    stream = torch.tensor(ids)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    click.echo(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(stream):,} tokens of text")
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(0)
    start = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        batch = windows(stream, generator)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            click.echo(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - start:.0f} s")
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
