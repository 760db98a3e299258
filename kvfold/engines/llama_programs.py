"""llama.cpp's converter and programs, as a directory of its source with a build holds them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from ..core.errors import InvalidInput
from .fresh_process import HOURS

CONVERTER = "convert_hf_to_gguf.py"
PROGRAMS = ("llama-perplexity", "llama-completion")
_PLACES = ("build/bin", "bin", ".")
_UNKNOWN_TOKENIZER = "BPE pre-tokenizer was not recognized"
_ATTEMPTS = 3  # a thread writes the programs' log, and they exit without waiting for it
# Flash attention and the default cache round to 16 bits.
_EXACT = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")


class LlamaFailure(Exception):
    """A program of llama.cpp that failed, and why."""


@dataclass
class LlamaCpp:
    """A directory of llama.cpp.

    Attributes:
        home: with the converter.
        programs: where its programs are.
        version: of the programs.
        guessed: checkpoints whose tokenizer the converter does not know, and which were taken for GPT-2's.
    """

    home: Path
    programs: Path
    version: str
    guessed: list[Path] = field(default_factory=list)

    @classmethod
    def at(cls, home: Path) -> LlamaCpp:
        """Return the llama.cpp in a directory.

        Raises:
            InvalidInput: the converter or a program is not there.
        """
        if not (home / CONVERTER).is_file():
            raise InvalidInput(
                f"--llama-cpp {home} has no {CONVERTER}; name a directory of llama.cpp's source"
            )
        for place in _PLACES:
            if all((home / place / name).is_file() for name in PROGRAMS):
                programs = home / place
                break
        else:
            raise InvalidInput(
                f"--llama-cpp {home} has no {' and '.join(PROGRAMS)} in {', '.join(_PLACES)}; build them "
                f"with `cmake -B build && cmake --build build --target {' '.join(PROGRAMS)}`"
            )
        try:
            told = _finished([str(programs / PROGRAMS[0]), "--version"])
        except LlamaFailure as failure:
            raise InvalidInput(f"--llama-cpp {home}: {failure}; build it again") from None
        found = re.search(r"version: (.+)", told.stdout + told.stderr)
        return cls(home.resolve(), programs.resolve(), f"llama.cpp {found.group(1) if found else 'unknown'}")

    def convert(self, directory: Path, out: Path, kind: str) -> Path:
        """Write a checkpoint as GGUF.

        A tokenizer that the converter does not know is written as GPT-2's, which matters for no weight.

        Args:
            directory: the checkpoint.
            out: the file.
            kind: `f32`, `f16`, `bf16` or `q8_0`.

        Raises:
            LlamaFailure: the converter refuses it.
        """
        arguments = [str(directory.resolve()), "--outfile", str(out), "--outtype", kind]
        is_unknown = any(_same_tokenizer(directory, other) for other in self.guessed)
        if not is_unknown:
            done = self._python([str(self.home / CONVERTER), *arguments])
            is_unknown = bool(done.returncode) and _UNKNOWN_TOKENIZER in done.stderr
        if is_unknown:
            if directory not in self.guessed:
                self.guessed.append(directory)
            script = Path(__file__).parent / "probes" / "convert_gguf.py"
            done = self._python([str(script), str(self.home), *arguments])
        if done.returncode:
            raise LlamaFailure(f"{CONVERTER} ended with {_last(done.stderr)}")
        return out

    def perplexity(self, model: Path, text: Path, base: Path, context: int, chunks: int) -> float | None:
        """Write the log-probabilities of a text to a file that `read_base` reads.

        Returns:
            The elements that one layer caches per token; None where the log does not say.

        Raises:
            LlamaFailure: the program fails.
        """
        words = ["-m", str(model), "-f", str(text), "--kl-divergence-base", str(base), "-lv", "4"]
        log = self._run("llama-perplexity", [*words, *self._window(context, chunks), *_EXACT])
        counts = r"(\d+) cells,\s+(\d+) layers,\s+(\d+)/\d+ seqs\), "
        found = re.search(counts + r"K \((\w+)\):\s+([\d.]+) MiB, V \((\w+)\):\s+([\d.]+) MiB", log)
        if found is None:
            return None
        sizes = {"f32": 4, "f16": 2, "bf16": 2}
        cells = int(found.group(1)) * int(found.group(2)) * int(found.group(3))
        parts = ((found.group(4), found.group(5)), (found.group(6), found.group(7)))
        if any(kind not in sizes for kind, _ in parts):
            return None
        return round(sum(float(size) * 2**20 / sizes[kind] for kind, size in parts) / cells, 1)

    def divergence(
        self, model: Path, base: Path, text: Path, context: int, chunks: int
    ) -> dict[str, float] | None:
        """Return llama.cpp's own measure of a model's distance from the log-probabilities in a file.

        Returns:
            `mean` KL divergence in nats, and `same_top`, the share of equal most probable tokens. None where
            its log loses them: `BaseFile.distance` measures the same.

        Raises:
            LlamaFailure: the program fails.
        """
        words = ["-m", str(model), "-f", str(text), "--kl-divergence-base", str(base), "--kl-divergence"]
        for _ in range(_ATTEMPTS):
            log = self._run("llama-perplexity", [*words, *self._window(context, chunks), *_EXACT])
            mean = re.search(r"Mean\s+KLD:\s+(-?[\d.]+)", log)
            top = re.search(r"Same top p:\s+([\d.]+)", log)
            if mean and top:
                return {"mean": float(mean.group(1)), "same_top": float(top.group(1)) / 100}
        return None

    def complete(self, model: Path, prompt: str, steps: int) -> str:
        """Return the text that greedy decoding adds to a prompt.

        Raises:
            LlamaFailure: the program fails.
        """
        words = ["-m", str(model), "-p", prompt, "-n", str(steps), "--temp", "0", "--ignore-eos", "-no-cnv"]
        words += ["--no-display-prompt", "--no-warmup", "-t", _threads(), *_EXACT]
        done = _finished([str(self.programs / "llama-completion"), *words])
        if done.returncode:
            raise LlamaFailure(f"llama-completion ended with {_last(done.stderr)}")
        return done.stdout

    def quantize(self, model: Path, out: Path, kind: str, options: Sequence[str] = ()) -> Path:
        """Write a GGUF file with weights of fewer bits, such as `Q4_K_M`.

        Args:
            model: a GGUF file.
            out: where the new one goes.
            kind: of most weights.
            options: more of llama-quantize's, such as `--tensor-type attn_k_b=q8_0`.

        Raises:
            LlamaFailure: llama-quantize is not there, or fails.
        """
        if not (self.programs / "llama-quantize").is_file():
            raise LlamaFailure(f"{self.programs} has no llama-quantize")
        self._run("llama-quantize", [*options, str(model), str(out), kind, _threads()])
        return out

    def _window(self, context: int, chunks: int) -> list[str]:
        return ["-c", str(context), "--chunks", str(chunks), "-t", _threads()]

    def _run(self, program: str, arguments: Sequence[str]) -> str:
        done = _finished([str(self.programs / program), *arguments])
        if done.returncode:
            raise LlamaFailure(f"{program} ended with {_last(done.stderr)}")
        return done.stdout + done.stderr

    def _python(self, arguments: Sequence[str]) -> CompletedProcess[str]:
        path = os.pathsep.join([str(self.home / "gguf-py"), *filter(None, [os.environ.get("PYTHONPATH")])])
        return _finished([sys.executable, *arguments], {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"})


def _finished(words: Sequence[str], environment: Mapping[str, str] | None = None) -> CompletedProcess[str]:
    """Run a program to its end, without any input.

    Raises:
        LlamaFailure: it has not ended after HOURS, or cannot be started.
    """
    try:
        return subprocess.run(
            list(words),
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            errors="replace",
            env={**os.environ, **(environment or {})},
            timeout=HOURS * 3600,
        )
    except subprocess.TimeoutExpired:
        name = Path(words[0]).name
        raise LlamaFailure(f"{name} was stopped, since it had not ended after {HOURS:g} hours") from None
    except OSError as error:
        raise LlamaFailure(f"{words[0]} cannot be started: {error.strerror}") from None


def _same_tokenizer(one: Path, other: Path) -> bool:
    files = [directory / "tokenizer.json" for directory in (one, other)]
    return all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes()


def _threads() -> str:
    return os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count() or 1)


def _last(log: str) -> str:
    lines = [line for line in log.strip().splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or " E " in line]
    return (errors or lines or ["no message"])[-1][-300:]


@dataclass(frozen=True)
class BaseFile:
    """The file that llama-perplexity writes with --kl-divergence-base.

    Attributes:
        tokens: of every window.
        log_probs: for every window, position of its second half and token of the vocabulary; nats, at least
            the most probable one's less 16.
    """

    tokens: list[list[int]]
    log_probs: Any

    def scores(self) -> list[float]:
        """Return the log-probabilities of the text's own tokens, window by window."""
        first = len(self.tokens[0]) // 2
        return [
            float(self.log_probs[window, position, token])
            for window, ids in enumerate(self.tokens)
            for position, token in enumerate(ids[first + 1 :])
        ]

    def distance(self, source: BaseFile) -> dict[str, float]:
        """Return what `LlamaCpp.divergence` returns, from the log-probabilities of two models.

        Raises:
            LlamaFailure: they are of other tokens.
        """
        import numpy

        if self.tokens != source.tokens:
            raise LlamaFailure("llama.cpp reads the text as other tokens than with the source")
        ours, theirs = (known.log_probs.astype(numpy.float64) for known in (self, source))
        same = ours.argmax(-1) == theirs.argmax(-1)
        nats = (numpy.exp(theirs) * (theirs - ours)).sum(-1)
        return {"mean": float(nats.mean()), "same_top": float(same.mean())}


def read_base(file: Path) -> BaseFile:
    """Read a file that llama-perplexity wrote.

    Raises:
        LlamaFailure: it is none.
    """
    import numpy

    data = file.read_bytes()
    if data[:8] != b"_logits_":
        raise LlamaFailure(f"{file.name} holds no log-probabilities")
    context = int(numpy.frombuffer(data, numpy.uint32, 1, 8)[0])
    vocabulary, chunks = (int(size) for size in numpy.frombuffer(data, numpy.int32, 2, 12))
    tokens = numpy.frombuffer(data, numpy.int32, chunks * context, 20).reshape(chunks, context)
    width = 2 * ((vocabulary + 1) // 2) + 4
    rows = context - 1 - context // 2
    raw = numpy.frombuffer(data, numpy.uint16, chunks * rows * width, 20 + tokens.nbytes)
    raw = raw.reshape(chunks, rows, width)
    scale = numpy.ascontiguousarray(raw[..., :4]).view(numpy.float32)
    known = scale[..., :1] * raw[..., 4 : 4 + vocabulary] + scale[..., 1:2]
    return BaseFile([[int(token) for token in window] for window in tokens], known)
