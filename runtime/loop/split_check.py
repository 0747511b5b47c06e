"""Checks on a few samples that a batch may be split into shards."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from runtime.evaluation.pending_means import evaluating
from runtime.loop.gather import COUPLED_OUTPUT, OutputGather, ShardOutput
from runtime.loop.rank_replica import read_output
from runtime.loop.scatter import InputRules, Scatter

logger = logging.getLogger(__name__)

NUM_SAMPLES = 4
TOLERANCE = 0.05
"""Relative norm of a difference that is no rounding."""
NOISE = 0.005
"""Relative norm of a difference between two equal calls of a model that draws random numbers."""
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


def can_check(scatter: Scatter, model: nn.Module) -> bool:
    """True if a batch has enough samples, and the model uses no statistics of them in eval mode."""
    norms = (m for m in model.modules() if isinstance(m, _BatchNorm))
    return scatter.num_samples >= NUM_SAMPLES and all(m.running_mean is not None for m in norms)


def needs_check(scatter: Scatter) -> bool:
    """True if an input may belong to no sample, or have its batch in another dimension.

    That is so with several inputs, with sequences of features, and with sequences of indices.
    """
    return len(scatter.split_names) > 1 or any(
        t.dim() == 3 or (t.dim() == 2 and not t.is_floating_point()) for t in scatter.tensors
    )


def check_split(
    trial: nn.Module, scatter: Scatter, rules: InputRules, device: torch.device
) -> None:
    """Run a copy of the model on a few samples, at once and in two parts.

    A model that fails on so few samples, or draws random numbers, is not judged. In train mode,
    without dropout and batch normalization, a difference is logged.

    Args:
        trial: A copy of the model.
        scatter: The inputs of a call.
        rules: Rules for cutting them.
        device: The copy's device.

    Raises:
        ValueError: The outputs in eval mode differ, or one is a sum over the samples.
    """
    with evaluating(trial):
        found = _difference(trial, scatter, rules, device)
    if found:
        raise ValueError(found)
    in_train_mode = any(module.training for module in trial.modules())
    for module in trial.modules():
        module.training &= not isinstance(module, (_BatchNorm, _DropoutNd))
    if in_train_mode and (found := _difference(trial, scatter, rules, device)):
        logger.warning("in train mode %s", found)


@torch.no_grad()
def _difference(
    trial: nn.Module, scatter: Scatter, rules: InputRules, device: torch.device
) -> str | None:
    """A message if the model's output for some samples is not that of two parts of them."""

    def run(start: int, stop: int) -> ShardOutput:
        inputs = scatter.shard(start, stop, device, copies=True)  # forward may write to them
        output = trial(*inputs.args, **inputs.kwargs)
        return read_output(0, trial, inputs, output, (start, stop), rules.loss_weight)

    half = NUM_SAMPLES // 2
    sizes = {"n": NUM_SAMPLES, "a": half, "b": NUM_SAMPLES - half}
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            whole, again = run(0, NUM_SAMPLES), run(0, NUM_SAMPLES)
            parts = [run(0, half), run(half, NUM_SAMPLES)]
        if whole.spec.difference(again.spec) is not None:
            return None
        if (structure := whole.spec.difference(parts[0].spec)) is not None:
            return OTHER_STRUCTURE.format(difference=structure, n=NUM_SAMPLES, half=half)
        gather = OutputGather(scatter, parts, device, None)
    except Exception:
        logger.debug("the split of inputs could not be checked", exc_info=True)
        return None
    columns = zip(whole.outputs or (), again.outputs or (), gather.gathered, strict=True)
    for i, (expected, repeated, gathered) in enumerate(columns):
        found = gathered.value
        if gathered.weight_is_guessed:
            if _is_sum(expected, found):
                return IS_A_SUM.format(whole=float(expected), mean=float(found), **sizes)
        elif _differ(expected, found) and not _differ(expected, repeated, NOISE):
            if not expected.dim():
                return LOSS_DEPENDS_ON_SPLIT.format(
                    whole=float(expected), mean=float(found), **sizes
                )
            if gather.may_couple_samples and expected.shape != found.shape:
                shapes = ", ".join(str(tuple((part.outputs or [])[i].shape)) for part in parts)
                return COUPLED_OUTPUT.format(shapes=shapes, sizes="{a}, {b}".format(**sizes))
            return DEPENDS_ON_SPLIT.format(
                dim=rules.batch_dim,
                split_names=scatter.split_description,
                example=scatter.split_names[-1],
                **sizes,
            )
    return None


def _is_sum(whole: Tensor, mean_of_halves: Tensor) -> bool:
    """True if the number for all samples is the sum of those for the two halves."""
    difference = (whole - 2 * mean_of_halves).abs()
    return bool(whole != 0) and bool(difference <= 1e-3 * whole.abs())


def _differ(expected: Tensor, found: Tensor, tolerance: float = TOLERANCE) -> bool:
    if expected.shape != found.shape:
        return True
    if not expected.is_floating_point():  # the index of a maximum may differ by rounding
        return bool((expected != found).sum() * 2 >= max(1, expected.numel()))
    return bool((found - expected).norm() > tolerance * expected.norm())
