"""Models of PyTorch Geometric, metrics of torchmetrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.compat.case import NUM_SAMPLES, Case, Listed
from tests.compat.recipes import NUM_CLASSES, classify, network, vectors

NUM_FEATURES, WIDTH = 4, 8


def small_graphs() -> Listed:
    """Rings of three to six nodes."""
    from torch_geometric.data import Data

    graphs = []
    for index in range(NUM_SAMPLES):
        size = 3 + index % 4
        nodes = torch.arange(size)
        edges = torch.stack([nodes, (nodes + 1) % size])
        graphs.append(
            Data(
                x=torch.randn(size, NUM_FEATURES, dtype=torch.float64),
                edge_index=torch.cat([edges, edges.flip(0)], 1),
                y=torch.randint(NUM_CLASSES, (1,)),
            )
        )
    return Listed(graphs)


def together(samples: list[Any]) -> Any:
    """Collate samples like the ``DataLoader`` of PyTorch Geometric."""
    from torch_geometric.data import Batch

    return Batch.from_data_list(samples)


class Graphs(nn.Module):
    """Two convolutions, the mean of each graph's nodes, and a classifier."""

    def __init__(self, convolution: Any) -> None:
        super().__init__()
        self.first = convolution(NUM_FEATURES, WIDTH)
        self.second = convolution(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, batch: Any) -> Any:
        from torch_geometric.nn import global_mean_pool

        x = torch.relu(self.first(batch.x, batch.edge_index))
        x = self.second(x, batch.edge_index)
        return self.head(global_mean_pool(x, batch.batch))


def gcn() -> nn.Module:
    from torch_geometric.nn import GCNConv

    return Graphs(GCNConv)


def gat() -> nn.Module:
    from torch_geometric.nn import GATConv

    return Graphs(GATConv)


def classify_graphs(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch), batch.y)


def follow_accuracy(bare: nn.Module) -> Any:
    """An accuracy of torchmetrics, of the model after each step."""
    from torchmetrics.classification import MulticlassAccuracy

    metric = MulticlassAccuracy(NUM_CLASSES)

    def update(model: nn.Module) -> None:
        inputs, labels = vectors().tensors
        with torch.no_grad():
            metric.update(model(inputs), labels)
        assert 0.0 <= float(metric.compute()) <= 1.0

    return update


def graphs(name: str, make: Any) -> Case:
    return Case(
        name=name,
        group="PyTorch Geometric",
        make=make,
        data=small_graphs,
        loss=classify_graphs,
        loader={"collate_fn": together},
        whole=True,
    )


CASES = [
    graphs("GCN on mini-batches of graphs", gcn),
    graphs("GAT on mini-batches of graphs", gat),
    Case(
        name="torchmetrics on the average",
        group="torchmetrics",
        make=network,
        data=vectors,
        loss=classify,
        watch=follow_accuracy,
    ),
]
