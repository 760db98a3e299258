"""Weights given to a model a unit at a time are those that transformers loads, whatever it changes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from kvfold.core.errors import InvalidInput
from kvfold.distill.parallel.layer_units import LayerUnits, open_in_units
from kvfold.distill.parallel.sharding import call_inside, distribute, shard_teacher
from kvfold.distill.parallel.tensors import full_tensor
from kvfold.distill.recipe.recipe import Recipe, Stage
from kvfold.distill.stages import state
from kvfold.distill.stages.student import check_model, load_student
from kvfold.distill.stages.student_checkpoint import publish
from kvfold.distill.stages.teacher import Online
from kvfold.distill.stages.weights import set_trainable

from ...support.folds import fold_latent
from ...support.pair import do_as_pair
from ...support.tiny import make
from ...support.tokenizers import save_tokenizer
from ..conftest import MakeRecipe

CPU = torch.device("cpu")
# What transformers does on the way: ties, buffers of its own, transposed and fused tensors, experts stacked,
# tables in float32.
FAMILIES = [
    "llama", "gpt2", "gpt_neox", "gptj", "falcon", "phi3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe",
    "gpt_oss",
]  # fmt: skip


def filled(directory: Path, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
    """A model with all its weights given, and kept."""
    units = LayerUnits(directory, dtype, **how)
    for number in range(len(units)):
        with units.layer(number):
            pass
    with units.rest():
        pass
    return units.model


def check_same(ours: nn.Module, theirs: nn.Module) -> None:
    """The same weights and buffers, of the same dtype, under the same names, tied alike, all with a value."""
    for kind in ("named_parameters", "named_buffers"):
        mine, its = (dict(getattr(model, kind)(remove_duplicate=False)) for model in (ours, theirs))
        assert mine.keys() == its.keys()
        for name, expected in its.items():
            assert mine[name].dtype == expected.dtype, name
            assert torch.equal(mine[name], expected), name
    assert len(list(ours.parameters())) == len(list(theirs.parameters()))


@pytest.fixture(scope="module")
def latent(teacher: Path) -> Path:
    """A student whose latent norms are linearised in its file."""
    stock = ("--container", "stock", "--latent-norm", "linear")
    return fold_latent(teacher, "--kv-budget", "50%", *stock, "--dtype", "float32")


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.float32) for family in FAMILIES), ("gemma3_text", torch.bfloat16)]
)
def test_units_are_what_transformers_loads(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = make(
        tmp_path / "model",
        family,
        dtype=torch.bfloat16,
        shard_size="20KB",
        tie_word_embeddings=family == "llama",
    )
    save_tokenizer(directory)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    ours = filled(directory, dtype)
    check_same(ours, theirs)
    ids = torch.arange(12)[None]
    assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)


def test_a_base_models_names_are_found(teacher: Path, tmp_path: Path) -> None:
    """Checkpoints may leave the base model's name out."""
    theirs = AutoModelForCausalLM.from_pretrained(teacher)
    theirs.model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    check_same(filled(tmp_path), theirs)


@pytest.mark.parametrize("container", ["stock", "remote"])
def test_folds_are_opened_for_training_as_if_whole(container: str, teacher: Path, latent: Path) -> None:
    directory = latent
    if container == "remote":
        directory = fold_latent(teacher, "--kv-budget", "50%", "--container", container)
    check_same(filled(directory, opened=True), load_student(directory, 32, CPU).model)


@pytest.mark.parametrize("with_adapters", [True, False])
def test_a_saved_state_replaces_the_checkpoint(with_adapters: bool, latent: Path, tmp_path: Path) -> None:
    """Adapters are drawn as they are next to real weights, and read where the state has them."""
    pytest.importorskip("peft")
    stage = Stage.model_validate(
        {"name": "kl", "tokens": 64, "lr": 1e-3, "train": "lora", "losses": {"kl": 1.0}}
    )
    theirs = load_student(latent, 32, CPU).model
    if with_adapters:
        set_trainable(theirs, stage)
    with torch.no_grad():
        for number, parameter in enumerate(theirs.parameters()):
            parameter.fill_(number)
    state.save(tmp_path, state.Progress(), state.Gathered(theirs, torch.optim.AdamW(theirs.parameters())), 1)
    if not with_adapters:
        set_trainable(theirs, stage)

    units = LayerUnits(latent, torch.float32, opened=True)
    units.saved_weights = (state.newest(tmp_path) or tmp_path) / state.WEIGHTS
    set_trainable(units.model, stage)
    for number in range(len(units)):
        with units.layer(number):
            pass
    with units.rest():
        pass
    check_same(units.model, theirs)
    trained = [
        {name for name, weight in model.named_parameters() if weight.requires_grad}
        for model in (units.model, theirs)
    ]
    assert trained[0] == trained[1]


def published(student: nn.Module, start: Path, place: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Publish a student, and return the tensors of the new checkpoint and of the one that it started from."""
    state.save(place / "state", state.Progress(), state.Gathered(student), 1)
    latest = state.newest(place / "state")
    assert latest
    (place / "out").mkdir()
    publish(latest, start, place / "out")
    return load_file(place / "out" / "model.safetensors"), load_file(start / "model.safetensors")


@pytest.mark.parametrize("container", ["llama", "gpt2", "gemma2", "stock", "deepseek"])
def test_publishing_untrained_weights_gives_it_back(container: str, latent: Path, tmp_path: Path) -> None:
    """Tied, transposed, linearised, with a buffer that is in the file: every tensor in its own dtype."""
    if container == "stock":
        directory = latent
    elif container == "deepseek":
        directory = make_deepseek(tmp_path / "model")
    else:
        directory = make(
            tmp_path / "model", container, dtype=torch.bfloat16, tie_word_embeddings=container != "llama"
        )
        save_tokenizer(directory)
    ours, theirs = published(load_student(directory, 32, CPU).model, directory, tmp_path)
    assert ours.keys() == theirs.keys() or container == "deepseek"
    for name in ours.keys() & theirs.keys():
        assert ours[name].dtype == theirs[name].dtype
        # What was opened for training is scaled back, by a number that is no power of two.
        torch.testing.assert_close(ours[name], theirs[name], rtol=3e-7 if container == "stock" else 0, atol=0)
    if container == "deepseek":
        check_same(load_student(tmp_path / "out", 32, CPU).model, load_student(directory, 32, CPU).model)


def test_publishing_keeps_what_short_training_changed(tmp_path: Path) -> None:
    """Each weight moves by a fifth of a step of bfloat16 or less, so the nearest numbers are the old ones."""
    directory = make(tmp_path / "model", dtype=torch.bfloat16)
    save_tokenizer(directory)
    student = load_student(directory, 32, CPU).model
    with torch.no_grad():
        for weight in student.parameters():
            weight.mul_(1 + 0.2 * 2**-8)
    ours, theirs = published(student, directory, tmp_path)
    for name, weight in student.state_dict().items():
        assert torch.equal(weight.bfloat16(), theirs[name])
    before, after = (torch.cat([file[name].flatten() for name in theirs]).float() for file in (theirs, ours))
    change = (after - before) @ before / before.square().sum()
    assert float(change) == pytest.approx(0.2 * 2**-8, rel=0.1)


def make_deepseek(directory: Path) -> Path:
    """With experts, which transformers fuses, and a gate whose buffer is in the file."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=258, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1,
        first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8,
        max_position_embeddings=64,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.normal_()
    model.to(torch.bfloat16).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def damage(directory: Path, what: str) -> str:
    """Make a checkpoint one that cannot be read by the unit; returns what is said of it."""
    tensors = load_file(directory / "model.safetensors")
    if what == "pickled":
        torch.save(tensors, directory / "pytorch_model.bin")
        (directory / "model.safetensors").unlink()
        return "holds pickled weights"
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = {key: tensor for key, tensor in tensors.items() if key != name} | (
        {name: torch.ones(3, 3)} if what == "misshapen" else {}
    )
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return f"1 weight is missing or misshapen, e.g. {name}"


@pytest.mark.parametrize("what", ["pickled", "missing", "misshapen"])
def test_what_cannot_be_read_by_the_unit_is_loaded_whole_and_said(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever loads it whole refuses what is not there: random numbers in its place would be the worst."""
    directory = make(tmp_path / "model", "llama")
    save_tokenizer(directory)
    reason = damage(directory, what)
    assert open_in_units(directory, torch.float32) is None
    message = caplog.text
    assert f"every process loads the whole of {directory} before it keeps its shards" in message
    assert reason in message


def test_a_nan_is_refused(tmp_path: Path) -> None:
    directory = make(tmp_path / "model", "llama")
    save_tokenizer(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInput, match=r"up_proj.weight of .* holds NaN or infinite values; .* damaged"):
        filled(directory)


class Measured(LayerUnits):
    """Layer units that count what is in memory while each is there."""

    most = 0

    @contextmanager
    def layer(self, number: int) -> Iterator[nn.Module]:
        with super().layer(number) as layer:
            yield layer
            self.most = max(self.most, bytes_in(self.model, self._source.model))

    @contextmanager
    def rest(self) -> Iterator[None]:
        with super().rest():
            yield
            self.most = max(self.most, bytes_in(self.model, self._source.model))


def bytes_in(*models: nn.Module) -> int:
    """Of their weights, each place in memory once."""
    tensors = [getattr(weight, "_local_tensor", weight) for model in models for weight in model.parameters()]
    places = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if not tensor.is_meta
    }
    return sum(places.values())


class Around(nn.Module):
    """The surroundings of a student in a stage."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


def work(rank: int, directory: Path, teacher: str, students: dict[str, str], recipe: dict[str, Any]) -> None:
    """Shard a teacher and students as a run does, and hold them against whole ones."""
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    for reshard, student in students.items():
        os.environ["FSDP_RESHARD_AFTER_FORWARD"] = reshard
        units = Measured(Path(student), torch.float32, opened=True)
        theirs = load_student(Path(student), 32, CPU).model
        module = distribute(SimpleNamespace(mixed_precision="no"), Around(units.model), units.model, units)  # type: ignore[arg-type]
        check_shards(units, theirs)
        call_inside(module, lambda units=units: check_model(units.loaded, Recipe.model_validate(recipe)))  # type: ignore[misc]
        check_shards(units, theirs)  # they are shards again, also where layers stay gathered after a forward
        loaded = load_student(Path(student), 32, CPU).model  # what cannot be had by the unit
        distribute(SimpleNamespace(mixed_precision="no"), Around(loaded), loaded)  # type: ignore[arg-type]
        for name, weight in loaded.named_parameters():
            assert torch.equal(full_tensor(weight.detach()), theirs.get_parameter(name)), name
    units = Measured(Path(teacher), torch.bfloat16)
    online = Online(units.model)
    shard_teacher(online, units)
    theirs = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.bfloat16)
    check_shards(units, theirs)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(
            units.model.base_model(ids).last_hidden_state, theirs.base_model(ids).last_hidden_state
        )
    (directory / f"checked-{rank}").touch()


def check_shards(units: Measured, theirs: nn.Module) -> None:
    """Every weight is in shards, and never more in memory than half of the model and a unit."""
    expected = dict(theirs.named_parameters(remove_duplicate=False))
    assert units.model.state_dict().keys() == theirs.state_dict().keys()
    for name, weight in units.model.named_parameters():
        assert isinstance(weight, DTensor), name
        assert torch.equal(full_tensor(weight.detach()), expected[name]), name
    # Of a tied teacher's embedding there are two, since its base model and its head are called one after the
    # other.
    total = sum(weight.numel() * weight.element_size() for weight in units.model.parameters())
    layers = [bytes_in(layer) for layer in theirs.get_submodule("model.layers")]  # type: ignore[arg-type]
    assert units.most <= 0.51 * total + max(*layers, bytes_in(theirs) - sum(layers))
    assert units.most < 0.95 * total


def test_two_processes_keep_half_of_every_weight_and_see_one_unit_at_a_time(
    teacher: Path, student: Path, latent: Path, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    students = {"true": str(student), "false": str(latent)}  # by whether layers let go of what was gathered
    do_as_pair(work, tmp_path, tmp_path, str(teacher), students, make_recipe().resolved())
    assert len(list(tmp_path.glob("checked-*"))) == 2
