"""One right norm for a model that is spread in two directions: FSDP2 over data, tensor parallel over heads and widths.

Run it: python examples/torch_fsdp_tp.py. It trains a small transformer on one process, then the same by torchrun on four, as
2 × 2: linear layers lie on both dimensions of the mesh, embeddings and norms on the first alone, which torch's own
`clip_grad_norm_` cannot put together. `attach` needs nothing to be said: the norms of both runs agree at every step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradclip
from gradclip.integrations.torch import attach

STEPS, BATCH, LENGTH, VOCABULARY, WIDTH, HEADS, LAYERS = 200, 8, 24, 32, 48, 4, 2
PLAN = {
    "query": ColwiseParallel(),
    "key": ColwiseParallel(),
    "value": ColwiseParallel(),
    "out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


class Block(nn.Module):
    """Attention and a feed-forward network, of which a rank may have some of the heads and some of the width."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attended(self.first(x))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))

    def attended(self, x: Tensor) -> Tensor:
        heads = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Its loss in saying the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def spread(model: Transformer, mesh: DeviceMesh) -> None:
    """Each block's linear layers over "tp", then everything over "dp"."""
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], PLAN)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def batch(step: int) -> Tensor:
    """Sequences in which each token follows from the two before it; the same on every rank."""
    draw = torch.Generator().manual_seed(step)
    tokens = [torch.randint(VOCABULARY, (BATCH,), generator=draw) for _ in range(2)]
    while len(tokens) <= LENGTH:
        tokens.append((3 * tokens[-1] + tokens[-2] + 1) % VOCABULARY)
    return torch.stack(tokens, 1)


def train(mesh: DeviceMesh | None) -> tuple[list[float], list[float]]:
    """The norm and the loss of every step."""
    torch.manual_seed(0)
    model = Transformer()
    if mesh is not None:
        spread(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    attached = attach(optimizer, gradclip.MaxNorm(0.5), named_parameters=model.named_parameters())
    norms, losses = [], []
    for step in range(STEPS):
        tokens = batch(step)
        if mesh is not None:
            tokens = tokens.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        norms.append(float(attached.last.norm))
        losses.append(loss.item())
    return norms, losses


def on_four(out: str) -> None:
    """One of the four processes that torchrun starts; the first writes what it saw."""
    dist.init_process_group("gloo")
    norms, losses = train(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps([norms, losses]))
    dist.destroy_process_group()


def main() -> None:
    """Both runs, and how far their norms are apart."""
    norms, losses = train(None)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "four.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        subprocess.run([*torchrun, __file__, str(out)], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        of_four, _ = json.loads(out.read_text())
    for step in range(0, STEPS, 40):
        print(f"step {step:3}: loss {losses[step]:.3f}, norm {norms[step]:.6f} on one process, {of_four[step]:.6f} on four")
    apart = max(abs(a - b) / b for a, b in zip(of_four, norms, strict=True))
    clipped = sum(norm > 0.5 for norm in norms)
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}, {clipped} of {STEPS} steps clipped")
    print(f"the norms of {STEPS} steps differ by at most {apart:.1e}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        on_four(sys.argv[1])
    else:
        main()
