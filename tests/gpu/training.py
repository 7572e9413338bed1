"""Training with DDP, FSDP1 and FSDP2, compared with one process on the CPU."""

from __future__ import annotations

from gpu.processes import NOT_RUN, Rank

STEPS = 5


def make_model():
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            batch, length, width = x.shape
            q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(101, 64)
            self.blocks = nn.ModuleList([Block(64), Block(64)])
            self.head = nn.Linear(64, 101)

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.manual_seed(3)
    return Transformer(), Block


def training(me: Rank) -> None:
    """Tests that DDP, FSDP1 and FSDP2 train a small transformer to the losses of one process on the CPU."""
    import torch
    import torch.distributed as dist
    from torch import nn

    device, size = me.device, me.size
    data = torch.Generator().manual_seed(5)
    batches = [torch.randint(101, (2 * size, 17), generator=data) for _ in range(STEPS)]

    def losses(model, where, part, parts, optimizer=None) -> list[float]:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.2)
        found = []
        for ids in batches:
            ids = ids.chunk(parts)[part].to(where)
            logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            if parts > 1:
                dist.all_reduce(mean, dist.ReduceOp.AVG)
            found.append(float(mean))
        return found

    wanted = losses(make_model()[0], "cpu", 0, 1)

    def compare(name: str, model, optimizer=None) -> None:
        found = losses(model, device, me.rank, size, optimizer)
        gap = max(abs(a - b) / abs(b) for a, b in zip(found, wanted))
        me.check(
            name, gap < 5e-5 and wanted[-1] < wanted[0], f"maximum relative difference from the CPU's losses: {gap:.1e}"
        )

    ids = [device] if me.on_cuda else None
    compare("DDP", nn.parallel.DistributedDataParallel(make_model()[0].to(device), device_ids=ids))
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooked = nn.parallel.DistributedDataParallel(make_model()[0].to(device), device_ids=ids)
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    compare("DDP with a hook", hooked)
    import functools

    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    plain, block = make_model()
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={block})
    compare(
        "FSDP1",
        FullyShardedDataParallel(plain.to(device), auto_wrap_policy=policy, device_id=device, use_orig_params=True),
    )
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        me.record("FSDP2", NOT_RUN, "this torch has no fully_shard")
        return
    plain, _ = make_model()
    plain.to(device)
    mesh = init_device_mesh(device.type, (size,))
    for layer in plain.blocks:
        fully_shard(layer, mesh=mesh)
    compare("FSDP2", fully_shard(plain, mesh=mesh))
