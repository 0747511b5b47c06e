"""Checks on a few samples that a batch may be split into shards."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from runtime.evaluation.pending_means import evaluating
from runtime.loop.caller_modes import CallerModes
from runtime.loop.gather import COUPLED_OUTPUT, GatheredTensor, OutputGather, ShardOutput
from runtime.loop.rank_replica import read_output
from runtime.loop.scatter import InputRules, Scatter
from runtime.replica.rank_statistics import first_difference, statistics_of

logger = logging.getLogger(__name__)

MAX_SAMPLES = 4
DIFFERENT = 1e-2
"""Relative distance of outputs that is no rounding; in dtypes of low precision it is larger."""
ROUNDING = 1e-9
"""Relative distance of outputs in float64 that is rounding."""
LOW_PRECISION = 1e-5
"""Relative distance in float64 that a part of lower precision may cause."""
NUM_DRAWS = 4
"""Outputs of each kind that are compared if a model draws random numbers."""
DEPENDS_ON_SPLIT = (
    "the model's output for {n} samples is not that for {a} and {b} of them put together, so "
    "devices that share a batch would compute something else than one device. Split along "
    "dimension {dim}: {split_names}. If one of these belongs to no sample (a memory bank, "
    "prototypes), name it: "
    "Trainer.setup_with(..., config=DdpConfig(whole=[{example!r}])). If the batch is in "
    "another dimension (sequence first), name that: DdpConfig(batch_dim=1), or use "
    "batch_first=True. If the model relates the samples of a batch to each other (a softmax or a "
    "mean over the batch), return what it relates and do that in the loop, which has the output of "
    "the whole batch; DdpConfig(whole=[]) accepts the difference"
)

IS_A_SUM = (
    "the model returned a number that is a sum over the samples: {whole:.4g} for {n} of them, and "
    "{mean:.4g} on average for {a} and {b} of them. Numbers that devices return for their parts of "
    "a batch are averaged: return the mean, such as F.cross_entropy(output, target), or a value "
    "for each sample, and compute the sum in the loop"
)
LOSS_DEPENDS_ON_SPLIT = (
    "the model returned {whole:.4g} for {n} samples, and {mean:.4g} on average for {a} and {b} of "
    "them, weighted by the count that the loss is a mean over. Pass the right count, "
    "DdpConfig(loss_weight=f(inputs, output)), or return it as a field loss_weight; if the loss "
    "relates the samples of a batch to each other (as contrastive losses do), return what it "
    "relates and compute it in the loop, which has the output of the whole batch; "
    "DdpConfig(whole=[]) accepts the difference"
)
OTHER_STRUCTURE = (
    "the structure of the model's output depends on the number of samples: {difference}, for {n} "
    "samples there and for {half} here. Outputs of devices that share a batch are put together "
    "tensor by tensor: return tensors with a row for each sample, such as torch.stack(list), and "
    "make lists and numbers of the whole batch in the loop"
)


FAILS_IN_PIECES = (
    "forward fails for the devices' pieces of this batch, of {sizes} samples, and works for all "
    "{num} on one device. Split along dimension {dim}: {split_names}. If one of these belongs to "
    "no sample, name it: DdpConfig(whole=[{example!r}]). If the batch is in another dimension, "
    "name that: DdpConfig(batch_dim=1). If forward needs the whole batch, train whole batches on "
    "each device: model.accumulate(loss_fn, batches)"
)


def can_check(model: nn.Module) -> bool:
    """True if a model uses no statistics of its batch in eval mode."""
    norms = (m for m in model.modules() if isinstance(m, _BatchNorm))
    return all(m.running_mean is not None for m in norms)


def needs_check(scatter: Scatter) -> bool:
    """True if an input may belong to no sample, or have its batch in another dimension.

    That is so with several inputs, with sequences of features, and with sequences of indices.
    """
    return len(scatter.split_names) > 1 or any(
        t.dim() == 3 or (t.dim() == 2 and not t.is_floating_point()) for t in scatter.tensors
    )


def check_split(
    new_trial: Callable[[], nn.Module | None],
    scatter: Scatter,
    rules: InputRules,
    device: torch.device,
    *,
    may_convert: bool,
) -> None:
    """Run a copy of the model on a few samples, at once and in two parts.

    A model that fails on so few samples is not judged. In train mode, without dropout and batch
    normalization, a difference is logged.

    Args:
        new_trial: Makes a copy of the model; ``None`` if it cannot.
        scatter: The inputs of a call.
        device: The copy's device.
        may_convert: True if copies have parameters of their own, and may be converted to float64.

    Raises:
        ValueError: The outputs in eval mode differ, or one is a sum over the samples.
    """
    model = new_trial()
    if model is None:
        return
    is_training = any(module.training for module in model.modules())
    for training in (False, True) if is_training else (False,):
        trial = _Trial(model, new_trial, scatter, rules, device, training, may_convert)
        try:
            with _in_mode(model, training=training):
                found = trial.difference()
        except _NotJudged:
            logger.debug("the split of inputs could not be checked", exc_info=True)
            continue
        if found and training:
            logger.warning("in train mode %s", found)
        elif found:
            raise ValueError(found)


@contextmanager
def _in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Evaluation mode, or the model's modes without dropout and batch normalization."""
    if not training:
        with evaluating(model):
            yield
        return
    for module in model.modules():
        module.training &= not isinstance(module, (_BatchNorm, _DropoutNd))
    with torch.no_grad():
        yield


class _NotJudged(Exception):
    """A trial failed, for a cause of its own."""


class _Trial:
    """A copy of the model, and a few samples.

    Args:
        model: The copy.
        new_trial, scatter, rules, device, may_convert: See :func:`check_split`.
        training: The copy is in train mode.
    """

    def __init__(
        self,
        model: nn.Module,
        new_trial: Callable[[], nn.Module | None],
        scatter: Scatter,
        rules: InputRules,
        device: torch.device,
        training: bool,
        may_convert: bool,
    ) -> None:
        self._model, self._new_trial = model, new_trial
        self._training, self._may_convert = training, may_convert
        self._scatter, self._rules, self._device = scatter, rules, device
        self._num = min(MAX_SAMPLES, scatter.num_samples)
        self._half = self._num // 2
        self._sizes = {"n": self._num, "a": self._half, "b": self._num - self._half}

    def _run(
        self,
        start: int,
        stop: int,
        *,
        changed: bool = False,
        model: nn.Module | None = None,
        dtype: torch.dtype | None = None,
    ) -> ShardOutput:
        """The output for samples; with ``changed`` other ones stand in for the second half."""
        model = model or self._model
        try:
            given = self._scatter.shard(start, stop, self._device, copies=True, dtype=dtype)
            if changed:
                self._scatter.overwrite(given, self._half)
            output = model(*given.args, **given.kwargs)
            weight = self._rules.loss_weight
            return read_output(0, model, given, output, (start, stop), weight)
        except Exception as error:
            raise _NotJudged from error

    @cached_property
    def _whole(self) -> ShardOutput:
        return self._run(0, self._num)

    @cached_property
    def _again(self) -> ShardOutput:
        """A second call after an equal one, which may have left a state."""
        self._run(0, self._num)
        return self._run(0, self._num)

    @cached_property
    def _changed(self) -> ShardOutput:
        return self._run(0, self._num, changed=True)

    def _run_parts(self) -> list[ShardOutput]:
        return [self._run(0, self._half), self._run(self._half, self._num)]

    def _gather(self, parts: Sequence[ShardOutput]) -> OutputGather:
        try:
            return OutputGather(self._scatter, parts, self._device, None)
        except ValueError as error:  # which the call itself raises, too
            raise _NotJudged from error

    def difference(self) -> str | None:
        """A message if the model's output for the samples is not that of two parts of them.

        Raises:
            _NotJudged: The model fails.
        """
        with _keeping_random_state(self._device):
            whole, parts = self._whole, self._run_parts()
            if (structure := whole.spec.difference(parts[0].spec)) is not None:
                self._require_alike()
                return OTHER_STRUCTURE.format(difference=structure, n=self._num, half=self._half)
            gather = self._gather(parts)
            for i, expected in enumerate(_outputs(whole)):
                own = [_outputs(part)[i] for part in parts]
                gathered = gather.gathered[i]
                if gathered.weight_is_guessed:
                    if _is_sum(expected, own):
                        return IS_A_SUM.format(**_numbers(expected, gathered), **self._sizes)
                    continue
                if self._depends_on_split(i, expected, gathered):
                    return self._message(expected, own, gathered, gather)
        return None

    def _message(
        self,
        expected: Tensor,
        parts: Sequence[Tensor],
        gathered: GatheredTensor,
        gather: OutputGather,
    ) -> str:
        if not expected.dim():
            return LOSS_DEPENDS_ON_SPLIT.format(**_numbers(expected, gathered), **self._sizes)
        if gather.may_couple_samples and expected.shape != gathered.value.shape:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            return COUPLED_OUTPUT.format(shapes=shapes, sizes="{a}, {b}".format(**self._sizes))
        return DEPENDS_ON_SPLIT.format(**_naming(self._scatter, self._rules), **self._sizes)

    def _depends_on_split(self, i: int, expected: Tensor, gathered: GatheredTensor) -> bool:
        """True if an output of the whole is that of the parts neither by rounding nor by chance."""
        distance, rounding = _distance(expected, gathered.value), _rounding(expected)
        if not distance:
            return False
        is_weak, changes = distance <= max(DIFFERENT, rounding), 0.0
        if is_weak:
            # A weak relation of samples, or rounding: that of the first samples stays if others
            # stand in for the rest, as all shapes are equal.
            changes = _change_of_first(i, self._whole, self._changed, gathered.rows)
            if not changes and distance <= rounding:
                return False
        self._require_alike()
        noise = _distance(expected, _outputs(self._again)[i])
        relates = changes > noise
        if noise > ROUNDING:  # random numbers, or a state that a call leaves to the next
            if (self._change_anew(i, gathered.rows) or 0.0) > rounding:
                return True
            relates = distance > noise and self._exceeds_noise(i)
            if not relates or (self._distance_anew(i) or 0.0) <= rounding:
                return False
        if not is_weak:
            return True
        if not relates and distance <= rounding:
            return False
        exact = self._distance_anew(i, in_float64=True)
        return relates if exact is None else exact > (ROUNDING if relates else LOW_PRECISION)

    def _require_alike(self) -> None:
        """Raise if the structure of the output is drawn at random."""
        if self._whole.spec.difference(self._again.spec) is not None:
            raise _NotJudged

    def _exceeds_noise(self, i: int) -> bool:
        """True if outputs at once and in parts differ by twice what each differ by repetition."""
        whole = [_outputs(self._run(0, self._num))[i] for _ in range(NUM_DRAWS)]
        parts = [self._gather(self._run_parts()).gathered[i].value for _ in range(NUM_DRAWS)]
        within = max(_distance(a, b) for each in (whole, parts) for a, b in combinations(each, 2))
        return min(_distance(a, b) for a, b in product(whole, parts)) > 2 * within

    def _run_anew(
        self, start: int, stop: int, *, changed: bool = False, in_float64: bool = False
    ) -> ShardOutput:
        """The output of a new copy, in the state of the model, with equal random numbers."""
        model = self._new_trial()
        if model is None or (in_float64 and not self._may_convert):
            raise _NotJudged
        dtype = torch.float64 if in_float64 else None
        model = model.double() if in_float64 else model
        with _keeping_random_state(self._device), _in_mode(model, training=self._training):
            return self._run(start, stop, changed=changed, model=model, dtype=dtype)

    def _change_anew(self, i: int, rows: tuple[int, int] | None) -> float | None:
        """Change of an output for the first samples beside other ones.

        ``None`` if it fails, or if forward computes buffers, those of the first device, from its
        samples.
        """
        new = self._new_trial()
        if new is None or first_difference(statistics_of(self._model), statistics_of(new)):
            return None
        with suppress(_NotJudged):
            whole, changed = (self._run_anew(0, self._num, changed=c) for c in (False, True))
            return _change_of_first(i, whole, changed, rows)
        return None

    def _distance_anew(self, i: int, *, in_float64: bool = False) -> float | None:
        """Distance of an output at once and in parts; ``None`` if it fails."""
        spans = (0, self._num), (0, self._half), (self._half, self._num)
        with suppress(_NotJudged):
            whole, *parts = (self._run_anew(*span, in_float64=in_float64) for span in spans)
            return _distance(_outputs(whole)[i], self._gather(parts).gathered[i].value)
        return None


def _keeping_random_state(device: torch.device) -> AbstractContextManager[None]:
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _outputs(shard: ShardOutput) -> list[Tensor]:
    return shard.outputs or []


def _change_of_first(
    i: int, whole: ShardOutput, changed: ShardOutput, rows: tuple[int, int] | None
) -> float:
    """Distance of an output for the first samples from that beside other ones."""
    if rows is None:
        return 0.0
    first, other = _outputs(whole)[i], _outputs(changed)[i]
    if other.shape != first.shape:
        return math.inf
    return _distance(first.narrow(rows[0], 0, rows[1]), other.narrow(rows[0], 0, rows[1]))


def _numbers(whole: Tensor, gathered: GatheredTensor) -> dict[str, float]:
    return {"whole": float(whole), "mean": float(gathered.value)}


def _is_sum(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """True if the number for all samples is the sum of those for the parts."""
    difference = (whole - torch.stack(list(parts)).sum()).abs()
    return bool(whole != 0) and bool(difference <= 1e-3 * whole.abs())


def _distance(expected: Tensor, found: Tensor) -> float:
    """Relative distance of two outputs; of indices and flags the fraction that differs.

    Below a half that is less than :data:`DIFFERENT`: an index may differ by rounding.
    """
    if expected.shape != found.shape:
        return math.inf
    if not (expected.is_floating_point() or expected.is_complex()):
        fraction = float((expected != found).double().mean()) if expected.numel() else 0.0
        return fraction * (DIFFERENT if fraction < 0.5 else math.inf)
    both = expected.isfinite() & found.isfinite()
    difference = float(torch.where(both, found - expected, 0).norm())
    norm = float(torch.where(both, expected, 0).norm())
    return difference / norm if norm else math.inf if difference else 0.0


def _rounding(output: Tensor) -> float:
    """Relative distance that may be rounding in the dtype of an output."""
    is_float = output.is_floating_point() or output.is_complex()
    return max(ROUNDING, 32 * torch.finfo(output.dtype).eps) if is_float else 0.0


def _naming(scatter: Scatter, rules: InputRules) -> dict[str, Any]:
    return {
        "dim": rules.batch_dim,
        "split_names": scatter.split_description,
        "example": scatter.split_names[-1],
    }


def fails_in_pieces(
    trial: nn.Module,
    scatter: Scatter,
    rules: InputRules,
    device: torch.device,
    modes: CallerModes,
    sizes: Sequence[int],
) -> str | None:
    """A message if a copy of the model runs on a batch whose pieces make forward fail.

    Args:
        trial: The copy.
        device: The copy's device.
        modes: The caller's modes.
        sizes: Samples of each piece.
    """
    try:
        given = scatter.shard(0, scatter.num_samples, device, copies=True)
        with _keeping_random_state(device), modes.applied(), torch.no_grad():
            trial(*given.args, **given.kwargs)
    except Exception:
        logger.debug("forward fails for the whole batch, too", exc_info=True)
        return None
    return FAILS_IN_PIECES.format(
        sizes=", ".join(map(str, sizes)), num=scatter.num_samples, **_naming(scatter, rules)
    )
