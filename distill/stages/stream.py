"""Alignment of a model that is larger than memory: one layer of student and teacher at a time.

The hidden states between the teacher's layers are on disk, boundary n being those that enter layer n: for
every step of the stage those that enter the layer at work, and those that leave it so far. The former are
removed once the layer is done. Steps, batches and gradients are those of `align.Alignment`, so the weights
are too. In bfloat16, the teacher has weights and hidden states of that precision, and the student computes in
it. A finished layer stays finished when the run is killed.

    work/  boundary-00003/step-00000.safetensors ...  boundary-00004/...  layer-00000.safetensors
    layer-00000.json ...

Shapes: B windows of a micro-batch, W of a step, S tokens of a window, D hidden size.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoints.directory import finish
from ...checkpoints.quantised.packed_checkpoint import open_checkpoint
from ...checkpoints.shards import read_header
from ...convert.formats import to_published, to_trainable
from ...core.errors import InvalidInput
from ...core.files import load_whole, save_whole
from ...core.signals import Interrupted
from ...core.untrusted import read_json
from ...models.causal_lm import Described, check_comparable, describe
from ...models.decoder import Decoder, LayerCall
from ...models.layered_model import LayeredModel
from ...models.load_options import LoadOptions
from ..data.batch import Batch
from ..data.order import TrainingWindows
from ..display import Show, progress_table
from ..recipe.recipe import Stage
from .align import Adds, adds, clip, learn, step_losses, weights_of
from .isolation import isolate_documents
from .optimizer import adamw, learning_rate, take_step
from .stage_work import Run
from .student import check_positions
from .student_checkpoint import unchanged, writing


@dataclass(frozen=True)
class Streaming:
    """The input of a stage with mode: stream.

    Attributes:
        student: directory of the checkpoint to be trained.
        cursor: of the stage's first window.
    """

    run: Run
    stage: Stage
    student: Path
    windows: TrainingWindows
    cursor: int

    @property
    def out(self) -> Path:
        """The directory of the checkpoint that the stage writes."""
        return self.run.partial / "stages" / self.stage.name

    @property
    def work(self) -> Path:
        """The directory of unfinished work."""
        return self.out.with_name(f"{self.stage.name}.stream")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the teacher and of the hidden states between its layers."""
        return torch.bfloat16 if self.run.accelerator.mixed_precision == "bf16" else torch.float32

    @property
    def steps(self) -> int:
        """The optimizer steps of the stage, the same for every layer."""
        return self.run.recipe.steps(self.stage)

    def micro_batches(self, step: int) -> Iterator[Batch]:
        """Yield the micro-batches of a step, in order."""
        count, size = self.run.recipe.step_windows(self.stage), self.stage.micro_batch
        first = self.cursor + step * count
        for start in range(first, first + count, size):
            yield self.windows.batch(range(start, min(start + size, first + count)))

    def store(self, number: int, step: int, hidden: Iterable[Tensor]) -> None:
        """Write a step's hidden states (B, S, D) that enter layer `number`, one batch at a time on a GPU."""
        place = self.boundary(number)
        place.mkdir(parents=True, exist_ok=True)
        hidden_WSD = torch.cat([hidden_BSD.to("cpu", self.dtype) for hidden_BSD in hidden])
        save_whole({"hidden": hidden_WSD}, place / f"step-{step:05d}.safetensors")

    def read(self, number: int, step: int) -> Tensor:
        """Return the hidden states (W, S, D) of a step, on the CPU.

        An earlier start on another machine may have stored them in another precision. Layers that are aligned
        already keep the precision of the earlier start.

        Raises:
            InvalidInput: the file is missing or damaged.
        """
        return self.load(self.boundary(number) / f"step-{step:05d}.safetensors")["hidden"].to(self.dtype)

    def load(self, file: Path) -> dict[str, Tensor]:
        """Return the tensors of a file of the unfinished work.

        Raises:
            InvalidInput: the file is missing or damaged.
        """
        found = load_whole(file)
        if found is None:
            raise InvalidInput(f"{file} is damaged; remove {self.work} to begin the stage again")
        return found

    def boundary(self, number: int) -> Path:
        """Return the directory of the hidden states that enter a layer."""
        return self.work / f"boundary-{number:05d}"

    @property
    def finished(self) -> list[Path]:
        """The files of the layers that are aligned, in order."""
        return sorted(self.work.glob("layer-*.safetensors"))


def stream_stage(given: Streaming, begun: Callable[[], None]) -> list[dict[str, float]]:
    """Align every layer in turn, and write the student with its new attention.

    Args:
        given: the input; `given.work` may hold the work of an earlier start, and `given.out` its checkpoint.
        begun: called when everything is checked and training begins: from then on the work is worth keeping.

    Returns:
        The losses of every step, with the names of `align.Alignment`.

    Raises:
        InvalidInput: the layers do not correspond, a layer diverged, or the disk is too small.
        Interrupted: a signal arrived; the layer at work will be begun again.
    """
    given.work.mkdir(parents=True, exist_ok=True)
    student = _Side(given.student, given, torch.float32)
    teacher = _Side(given.run.teacher, given, given.dtype)
    width = teacher.layered.model.config.get_text_config().hidden_size
    need = 2 * given.dtype.itemsize * given.steps * given.run.recipe.step_tokens(given.stage) * width
    held = sum(file.stat().st_size for file in given.work.rglob("*") if file.is_file())
    free = shutil.disk_usage(given.work).free + held
    if need > free:
        raise InvalidInput(
            f"mode: stream stores hidden states between layers on disk, which takes {need:,} bytes, but "
            f"{given.work} has {free:,}; give the stage fewer tokens, or name an output on a larger disk"
        )
    change, layers, done = adds(student.decoder, teacher.decoder), len(teacher.decoder), len(given.finished)
    if done == 0:
        with teacher.layered.rest(without="head"):
            for step in range(given.steps):
                batches = (batch.to(teacher.layered.device) for batch in given.micro_batches(step))
                given.store(0, step, (teacher.decoder.embedded(**batch.inputs) for batch in batches))
    begun()
    table = progress_table(given.stage.name, layers * given.steps)
    with table as show, student.layered.rest(without="ends"), teacher.layered.rest(without="ends"):
        for number in range(done, layers):
            _Layer(given, student, teacher, change, number).align(show)
    if not given.out.exists():
        _write(given)
    errors = [read_json(file.with_suffix(".json"), top=list) for file in given.finished]
    return [step_losses(list(of_step)) for of_step in zip(*errors, strict=True)]


class _Side:
    """The student or the teacher, with the weights that are in use."""

    def __init__(self, directory: Path, given: Streaming, dtype: torch.dtype) -> None:
        checkpoint, place = open_checkpoint(directory), given.run.accelerator.device
        self.layered = LayeredModel(checkpoint, attention=None, dtype=dtype, place=place)
        self.decoder = Decoder(self.layered.model)
        if given.run.recipe.data.packing == "documents":
            with self.layered.streamed(kept=0) as model:
                isolate_documents(model, str(directory))
        with self.layered.block(0), self.layered.rest(without="head"):
            # The first call runs a layer to learn its output; later calls run none.
            first = given.windows.batch([given.cursor]).to(self.layered.device)
            self.decoder.calls(**first.inputs)


@dataclass(frozen=True)
class _Layer:
    """The alignment of one layer."""

    given: Streaming
    student: _Side
    teacher: _Side
    adds: Adds
    number: int

    def align(self, show: Show) -> None:
        """Take all steps, and keep the result."""
        given, number = self.given, self.number
        with self.teacher.layered.block(number), self.student.layered.block(number) as block:
            to_trainable(block)
            weights = weights_of(self.student.decoder.attention(number).requires_grad_(True))
            optimizer = adamw(weights, given.stage)
            errors = []
            for step in range(given.steps):
                error, power = self._accumulate(step)
                for weight in weights:
                    weight.grad = None if weight.grad is None else weight.grad / power
                rate = learning_rate(given.stage, step, given.steps)
                norm = take_step(optimizer, rate, clip(weights, given.stage))
                if not math.isfinite(norm):
                    raise InvalidInput(
                        f"stage {given.stage.name} diverged: the gradient of layer {number} in step "
                        f"{step + 1} is {norm}; use a lower lr"
                    )
                if given.run.signals:
                    raise Interrupted(
                        max(given.run.signals), f"stopped in layer {number} of stage {given.stage.name}"
                    )
                errors.append(error / power)
                show(number * given.steps + step + 1, {"loss": errors[-1]})
            decoder = self.student.decoder
            attention = decoder.attentions[number].removeprefix(decoder.layers[number] + ".")
            whole = block.state_dict()
            named = {name: whole[name] for name in whole if name.startswith(f"{attention}.")}
            self._keep(to_published(block, named), errors)

    @torch.no_grad()
    def _accumulate(self, step: int) -> tuple[float, float]:
        """Form the gradient of a step, store the output of the layer; return Σ ‖ŷ - y‖² and Σ ‖y‖²."""
        given, number = self.given, self.number
        student, teacher, device = self.student.decoder, self.teacher.decoder, self.teacher.layered.device
        inputs_WSD = given.read(number, step)
        totals = torch.zeros(2)
        outputs = []
        start = 0
        for batch in given.micro_batches(step):
            hidden_BSD = inputs_WSD[start : start + len(batch.input_ids_BS)].to(device)
            start += len(hidden_BSD)
            zeros_BSD = torch.zeros_like(hidden_BSD)  # whose dtype the rotary tables get
            positions_BS = batch.position_ids_BS.to(device)
            mine = student.calls(inputs_embeds=zeros_BSD.float(), position_ids=positions_BS)[number]
            its = teacher.calls(inputs_embeds=zeros_BSD, position_ids=positions_BS)[number]

            def see(_: int, read_BSD: Tensor, given_BSD: Tensor, mine: LayerCall = mine) -> None:
                with given.run.accelerator.autocast():
                    learnt = learn(student, number, mine, read_BSD, self.adds(given_BSD))
                totals.add_(torch.stack(learnt).cpu())

            with teacher.seen_by(see):
                output_BSD = its.run(teacher.layer(number), hidden_BSD)
            outputs.append(output_BSD.cpu())  # a whole step's would fill a GPU
        if number + 1 < len(teacher):
            given.store(number + 1, step, outputs)
        error, power = totals.tolist()
        return error, power

    def _keep(self, named: dict[str, Tensor], errors: list[float]) -> None:
        """Store the layer's tensors, which marks it as done, and remove its input."""
        work, number = self.given.work, self.number
        prefix = self.student.decoder.layers[number]
        (work / f"layer-{number:05d}.json").write_text(json.dumps(errors) + "\n", encoding="utf-8")
        tensors = {f"{prefix}.{name}": tensor.detach().cpu().contiguous() for name, tensor in named.items()}
        save_whole(tensors, work / f"layer-{number:05d}.safetensors")
        shutil.rmtree(self.given.boundary(number), ignore_errors=True)


def _write(given: Streaming) -> None:
    """Write the student as it was, with the aligned layers; all or nothing."""
    stored = open_checkpoint(given.student)
    aligned = {name: file for file in given.finished for name in read_header(file)}
    load = lru_cache(maxsize=1)(given.load)  # names of one file follow each other
    unknown = sorted(aligned.keys() - set(stored))
    if unknown:
        raise InvalidInput(
            f"{given.student} does not store {unknown[0]} under that name; use mode: layerwise"
        )
    partial = given.out.with_name(given.out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    kept = {name for name in stored if name not in aligned}
    kept |= unchanged(stored, aligned, lambda name: load(aligned[name])[name])
    shapes = {name: stored.spec(name).shape for name in stored}
    with writing(stored, shapes, kept, partial) as write:
        for name, file in aligned.items():
            if name not in kept:
                write(name, load(file)[name])
    finish(partial, given.out)


def describe_student(student: Path, teacher: Path, seq_len: int) -> Described:
    """Return tokenizer and configuration of a student that is not in memory.

    Raises:
        InvalidInput: its teacher has another tokenizer, or windows are longer than the student takes.
    """
    mine, its = (describe(directory, LoadOptions()) for directory in (student, teacher))
    check_comparable(mine, its, "")
    check_positions(mine, seq_len)
    return mine
