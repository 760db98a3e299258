"""SGLang's probe against a stand-in with a scheduler process, as SGLang has (`make test-sglang` runs it)."""

from pathlib import Path
from typing import Any

import pytest

from kvfold.engines.fresh_process import PROBES, run_apart
from kvfold.engines.probes import probe_sglang

ASKED = {
    "directory": "model", "dtype": "float32", "trust": False, "latent": True, "multimodal": False,
    "text": [[5, 6, 7], [8, 9, 10]], "prompt": 2, "steps": 2,
}  # fmt: skip
PACKAGE = {
    "__init__.py": """
import multiprocessing
from .srt.model_executor.model_runner import schedule

__version__ = "9"

class Engine:
    def __init__(self, **settings):
        assert settings["dtype"] == "float32" and settings["attention_backend"] == "torch_native", settings
        self.scheduler = multiprocessing.get_context("spawn").Process(target=schedule)
        self.scheduler.start()

    def generate(self, input_ids, sampling_params, return_logprob=False, logprob_start_len=-1):
        self.scheduler.join()
        assert not return_logprob or logprob_start_len == 0
        return [
            {
                "output_ids": [token + 1 for token in ids[-1:]] * sampling_params["max_new_tokens"],
                "meta_info": {"input_token_logprobs": [(-float(i) if i else None, ids[i], None) for i in range(len(ids))]},
            }
            for ids in input_ids
        ]

    def shutdown(self):
        pass
""",
    "srt/model_executor/model_runner.py": """
import torch
from types import SimpleNamespace

class Pool:
    latent, keys, values = torch.zeros(8, 1, 24), torch.zeros(8, 2, 4), torch.zeros(8, 2, 3)

    def get_key_buffer(self, layer):
        return (self.latent, self.keys)[layer]

    def get_value_buffer(self, layer):
        return (self.latent[..., :16], self.values)[layer]

class ModelRunner:
    model_config = SimpleNamespace(num_hidden_layers=2)

    def alloc_memory_pool(self, config=None):
        self.token_to_kv_pool = Pool()

def schedule():
    import sys

    assert sys.modules["kvfold"] is None
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    ModelRunner().alloc_memory_pool()
    assert factory.get_rope_cpu(64, 64, 128, 1e4, True, None, None, 1.0, "cpu") == "as on GPUs"
    assert AttentionBackendRegistry.known["torch_native"](None, None) == "latents"
""",
    "srt/layers/rotary_embedding/factory.py": """
def get_rope(head, turned, positions, base, halves, scaling, dtype, share):
    return "as on GPUs"

def get_rope_cpu(*given):
    raise AssertionError("YaRN alone")
""",
    "srt/models/deepseek_common/attention_backend_handler.py": """
class AttnForwardMethod:
    MLA = "latents"

class AttentionBackendRegistry:
    known = {}

    @classmethod
    def register(cls, name, handler):
        cls.known[name] = handler
""",
}


def test_answers_of_an_engine_with_a_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores leave the first token out; a latent, whose values are a part of it, counts once."""
    for name, code in PACKAGE.items():
        file = tmp_path / "sglang" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = tmp_path / "model" / "config.json"
    config.parent.mkdir()
    config.write_text("{}")
    asked = {**ASKED, "directory": str(config.parent)}
    assert run_apart(PROBES["sglang"], asked) == {
        "version": "9", "by": "torch alone on a CPU", "dtype": "float32",
        "log_probs": [[-1.0, -2.0], [-1.0, -2.0]], "tokens": [[7, 7], [10, 10]], "cache": [24.0, 14.0],
    }  # fmt: skip
    config.write_text('{"attn_logit_softcapping": 50.0}')
    assert "leaves out the bound" in run_apart(PROBES["sglang"], asked)["lacking"]
    assert "processor of images" in run_apart(PROBES["sglang"], {**asked, "multimodal": True})["lacking"]
    config.write_text("{}")
    (tmp_path / "sglang/srt/layers/rotary_embedding/factory.py").write_text("")
    assert "has not what kvfold knows of 0.5.23" in run_apart(PROBES["sglang"], asked)["lacking"]


@pytest.mark.parametrize(("cuda", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_gpu_computes_in_bfloat16_by_its_own_choice_of_kernels(cuda: bool, dtype: str) -> None:
    given: dict[str, Any] = probe_sglang._settings(ASKED, cuda)
    assert given["dtype"] == dtype
    assert ("attention_backend" in given) != cuda
    assert given["context_length"] > max(len(ASKED["text"][0]), ASKED["prompt"] + ASKED["steps"])
