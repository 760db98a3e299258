"""Two processes, each with half of the tokens and weights: gradients are those of one process with all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.distill.data.batch import Batch
from kvfold.distill.losses.predictions import Predictions, predict
from kvfold.distill.losses.vocabulary import mix

from ...support.pair import do_as_pair

LENGTH = 16
WEIGHTS = {"kl": 0.9, "ce": 0.1}
# Whether the head is tied to the embeddings, and whether it is a unit of its own, not gathered where the loss
# reads it.
CASES = {"tied": (True, False), "untied": (False, False), "own-unit": (False, True)}


class Loss(nn.Module):
    """A student and its loss, wrapped together."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, teacher: Predictions) -> Tensor:
        return mix(predict(self.model, batch), teacher, batch.labels_BS.flatten(), WEIGHTS, chunk=5)[0]


def build(is_tied: bool) -> tuple[Any, Batch, Predictions]:
    torch.manual_seed(0)
    size = {
        "vocab_size": 59, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**size, tie_word_embeddings=is_tied)).eval()
    ids = torch.randint(59, (4, LENGTH + 1))
    batch = Batch(ids[:, :-1], ids[:, 1:], torch.arange(LENGTH).expand(4, LENGTH))
    return model, batch, Predictions(torch.randn(4 * LENGTH, 8), torch.randn(59, 8), None)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        name: getattr(grad, "full_tensor", lambda grad=grad: grad)()
        for name, grad in found.items()
        if grad is not None
    }


def work(rank: int, directory: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name, (is_tied, has_own_unit) in CASES.items():
        model, batch, teacher = build(is_tied)
        for unit in [*model.model.layers, *([model.lm_head] if has_own_unit else [])]:
            fully_shard(unit, mesh=mesh)
        module = fully_shard(Loss(model), mesh=mesh)
        mine = slice(2 * rank, 2 * rank + 2)
        part = Batch(batch.input_ids_BS[mine], batch.labels_BS[mine], batch.position_ids_BS[mine])
        rows = torch.arange(4 * LENGTH) // (2 * LENGTH) == rank
        # Shards get the mean over processes; this makes it the sum.
        module(part, teacher.at(rows)).mul(2).backward()
        whole = gradients(model)
        if rank == 0:
            save_file(whole, directory / f"{name}.safetensors")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gradients by two processes, a file a case."""
    directory = tmp_path_factory.mktemp("shards")
    do_as_pair(work, directory, directory)
    return directory


@pytest.mark.parametrize("name", CASES)
def test_a_sharded_head_has_the_gradient_of_one_process(name: str, shards: Path) -> None:
    model, batch, teacher = build(CASES[name][0])
    Loss(model)(batch, teacher).backward()
    expected, found = gradients(model), load_file(shards / f"{name}.safetensors")
    assert found.keys() == expected.keys()
    for key, grad in expected.items():
        torch.testing.assert_close(
            found[key], grad, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )
