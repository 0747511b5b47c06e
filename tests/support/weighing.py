"""Losses that are not a plain mean over samples, and the training on one device to compare with."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, LENGTH, WIDTH = 7, 6, 8
CLASS_WEIGHTS = torch.linspace(0.3, 2.5, VOCAB, dtype=torch.float64)


class TinyGpt(nn.Module):
    """A causal language model that maps labels to a dict with the mean loss, as on a model hub."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.place = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
            self.norm = nn.LayerNorm(WIDTH)
            self.mix = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.head = nn.Linear(WIDTH, VOCAB)
        self.double()

    def logits(self, ids):
        x = self.embed(ids) + self.place
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        y = self.norm(x)
        return self.head(x + self.mix(y, y, y, attn_mask=mask, need_weights=False)[0])

    def forward(self, input_ids, labels=None):
        logits = self.logits(input_ids)
        if labels is None:
            return {"logits": logits}
        return {"loss": token_loss(logits, labels), "logits": logits}


def token_loss(logits, labels, class_weights=None):
    """Mean over the labels that are not ignored; NaN without any, as are its gradients."""
    shifted, wanted = logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1)
    known = wanted.clamp(min=0)
    counts = (wanted != -100).to(logits.dtype)
    if class_weights is not None:
        counts = counts * class_weights[known]
    # Not by ignore_index, which would hide the 0 / 0 in the gradients.
    return (F.cross_entropy(shifted, known, reduction="none") * counts).sum() / counts.sum()


def token_weight(labels, class_weights=None):
    """The weight of that mean."""
    wanted = labels[:, 1:]
    counted = wanted != -100
    if class_weights is None:
        return counted.sum()
    return (class_weights[wanted.clamp(min=0)] * counted).sum()


def make_tokens(size, seed=1, *, blank=2):
    """Ids, and labels of which half are ignored, including all of the first samples."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (size, LENGTH), generator=generator)
    labels = ids.clone()
    labels[torch.rand(size, LENGTH, generator=generator) < 0.5] = -100
    labels[:blank] = -100
    labels[blank:, 2] = ids[blank:, 2]
    return ids, labels


def one_device(batches, class_weights=None, steps=2):
    """Train in plain PyTorch: each step on the mean over all labels of its batches."""
    model = TinyGpt()
    optimizer = adamw(model.parameters())
    for _ in range(steps):
        ids, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        token_loss(model.logits(ids), labels, class_weights).backward()
        optimizer.step()
    return model


def adamw(params):
    return torch.optim.AdamW(params, 1e-2, weight_decay=0.1)


def assert_same(model, wanted, tolerance=1e-8):
    """Compare the norm over all parameters: attention's key bias alone has no gradient."""
    mine, theirs = (
        torch.cat([p.detach().reshape(-1) for p in m.parameters()]) for m in (model, wanted)
    )
    error = (mine - theirs).norm() / theirs.norm()
    assert error < tolerance, f"relative error {error:.1e}"


def twins(count):
    first = TinyGpt()
    return [first, *(copy.deepcopy(first) for _ in range(count - 1))]
