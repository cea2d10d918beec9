"""Networks of torch_geometric on random graphs: features of nodes, and edges as [2, count] indices."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from zoo import Program, generator


def graph(size):
    """A graph of `size` nodes with three edges for each, some of them more than once."""
    source = generator(size)
    return torch.randn(size, 8, generator=source), torch.randint(size, (2, 3 * size), generator=source)


class Network(nn.Module):
    """One of the package's networks, and a mean over the nodes."""

    def __init__(self, kind: str, **options):
        super().__init__()
        from torch_geometric.nn import models

        torch.manual_seed(0)
        self.model = getattr(models, kind)(8, 16, num_layers=2, out_channels=4, **options)

    def forward(self, features: Tensor, edges: Tensor) -> Tensor:
        return self.model(features, edges)


class Convolutions(nn.Module):
    """Convolutions of other kinds, one after the other, with norms of graphs between them."""

    def __init__(self):
        super().__init__()
        from torch_geometric import nn as pyg

        torch.manual_seed(0)
        self.first = pyg.TransformerConv(8, 8, heads=2, concat=True)
        self.norm = pyg.GraphNorm(16)
        self.second = pyg.ResGatedGraphConv(16, 8)
        self.layer_norm = pyg.LayerNorm(8)
        self.third = pyg.TAGConv(8, 8, K=2)
        self.fourth = pyg.PNAConv(
            8, 8, ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"],
            deg=torch.tensor([0, 2, 4, 4]), edge_dim=3,
        )  # fmt: skip
        self.fifth = pyg.ChebConv(8, 4, K=2)

    def forward(self, features: Tensor, edges: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(features, edges)))
        x = torch.nn.functional.silu(self.layer_norm(self.second(x, edges)))
        x = torch.tanh(self.third(x, edges))
        x = self.fourth(x, edges, features[edges[0], :3])
        return self.fifth(x, edges)


NETWORKS = {
    "GCN": dict(norm="batch_norm"),
    "GraphSAGE": dict(act="elu", jk="cat"),
    "GIN": dict(norm="batch_norm", act="gelu"),
    "EdgeCNN": dict(act="leaky_relu"),
}
PROGRAMS = [
    Program(
        f"torch_geometric: {kind}",
        ("torch_geometric",),
        functools.partial(Network, kind, **options),
        graph,
        "features, edges",
        loads=kind != "GCN",  # a variable that is a sparse tensor in one branch
    )
    for kind, options in NETWORKS.items()
] + [
    Program(
        "torch_geometric: convolutions",
        ("torch_geometric",),
        Convolutions,
        graph,
        "features, edges",
        loads=False,
    ),
]
