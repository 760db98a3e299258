"""Rules that calibrate behind the layers that they have changed: the inputs are those that the output has."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

from kvfold.convert.calibration import capacity
from kvfold.convert.calibration.capacity import Need
from kvfold.convert.calibration.layerwise import Calls
from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.decide.plan import Plan
from kvfold.convert.families.source import open_source
from kvfold.convert.request import fold_request
from kvfold.convert.settle.in_order import in_order
from kvfold.convert.settle.settle import make_plan
from kvfold.convert.write.rewrite import rewrite
from kvfold.core.errors import InvalidInput

from ...support.tiny import make

WIDTH, LAYERS = 4, 3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("order") / "source", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def statistics(source: Path) -> Statistics:
    taken = study(open_source(source), "self", sequences=6, length=16, seed=0)
    assert taken is not None
    return taken


def planned(source: Path, statistics: Statistics, method: str, rank: int) -> Plan:
    asked = {"to": "mla", "method": method, "rank": rank, "rope_dim": WIDTH, "dtype": "float32"}
    asked |= {"latent_norm": "linear"}  # no norm between a layer's output and the next one's input
    return make_plan(source, fold_request({"model": str(source), **asked}), statistics)


def moments(output: Path, ids_BT: Tensor) -> list[Tensor]:
    """Return the second moment of every layer's input, by transformers' own forward pass."""
    model, found = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval(), list[Tensor]()
    for block in model.model.layers:
        block.input_layernorm.register_forward_hook(lambda _, inputs, x_BTD: found.append(x_BTD.detach()))
    model(input_ids=ids_BT)
    rows = [pad(x_BTD.flatten(0, 1), (0, 1), value=1).double() for x_BTD in found]
    return [rows_XE.mT @ rows_XE / len(rows_XE) for rows_XE in rows]


@pytest.mark.parametrize("method", ["care", "no-sqrt-care", "transmla", "transmla-care"])
def test_inputs_pass_changed_layers(
    source: Path, statistics: Statistics, tmp_path: Path, method: str
) -> None:
    """CARE's layers see the output's inputs, TransMLA's those of a model that lost only rotation."""
    rank = 5
    plan = planned(source, statistics, method, rank)
    geometry = plan.source.geometry
    whole = geometry.cache_elements - WIDTH - 1
    assert whole >= geometry.hidden_size
    kept = rank if method in ("care", "no-sqrt-care") else whole
    rewrite(planned(source, statistics, method, kept), tmp_path / "out")
    expected = moments(tmp_path / "out", statistics.ids_BT)
    assert list(plan.inputs) == list(range(LAYERS))
    for number, moment_EE in plan.inputs.items():
        torch.testing.assert_close(moment_EE, expected[number], rtol=1e-4, atol=1e-5)
    first_EE, *others = (layer.input_EE for layer in statistics.layers)
    torch.testing.assert_close(plan.inputs[0], first_EE, rtol=1e-5, atol=1e-6)
    for number, input_EE in enumerate(others, start=1):
        assert (plan.inputs[number] - input_EE).norm() > 0.01 * input_EE.norm(), "nothing was changed before"


def test_other_methods_read_the_source(source: Path, statistics: Statistics) -> None:
    for method in ("svd", "mha2mla", "subspace"):
        rope_dim = {"rope_dim": 8} if method == "mha2mla" else {"rope_dim": WIDTH}
        asked = {"model": str(source), "to": "mla", "method": method, "rank": 5, **rope_dim}
        plan = make_plan(source, fold_request(asked), statistics)
        assert in_order(plan) is plan


def test_saved_statistics_hold_their_tokens(source: Path, statistics: Statistics, tmp_path: Path) -> None:
    statistics.save(tmp_path / "taken.safetensors")
    read = Statistics.load(tmp_path / "taken.safetensors")
    assert torch.equal(read.ids_BT, statistics.ids_BT)
    large = tmp_path / "large.safetensors"
    replace(statistics, ids_BT=statistics.ids_BT + 1000).save(large)
    with pytest.raises(InvalidInput, match="but the source has 97 embeddings"):
        study(open_source(source), str(large), sequences=6, seed=0)


def test_fewer_sequences_are_read_at_once_where_a_gpu_is_small(
    source: Path, statistics: Statistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers see the same inputs, three sequences at a time."""
    usual = planned(source, statistics, "care", 5)
    read, run = list[int](), Calls.run

    def counted(calls: Calls, block: Any, number: int, hidden_BTD: Tensor) -> Tensor:
        read.append(len(hidden_BTD))
        return run(calls, block, number, hidden_BTD)

    monkeypatch.setattr(Calls, "run", counted)
    need = Need.of(usual.source, sequences=3, length=16).by_layer
    monkeypatch.setattr(capacity, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(capacity, "gpu_bytes", lambda: need)
    halved = in_order(usual)
    assert set(read) == {3}
    for number, moment_EE in usual.inputs.items():
        torch.testing.assert_close(halved.inputs[number], moment_EE, rtol=1e-6, atol=1e-7)
