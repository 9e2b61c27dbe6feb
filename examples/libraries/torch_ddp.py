# hpcgpu run --gpus sim:2 examples/libraries/torch_ddp.py
"""DistributedDataParallel of PyTorch in workers.

A task on each worker is a rank. --gpu speaks NCCL between the workers that have a GPU, whatever their pool, else gloo
between the CPUs of all. Neither is encrypted.
"""

import argparse
import socket
import sys

import torch
from distributed import Client, get_worker
from torch import distributed as dist


def free_address() -> tuple[str, int]:
    """Return this worker's address for the others, and a port that is free."""
    host = get_worker().address.split("://")[1].rpartition(":")[0].strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return host, probe.getsockname()[1]


def train(rank: int, size: int, address: tuple[str, int], gpu: bool) -> list[float]:
    """Train on this rank's part of the data; return the weights, the same on all ranks: DDP averages gradients."""
    device = "cuda" if gpu else "cpu"  # the worker's GPU is CUDA's device 0
    store = dist.TCPStore(*address, size, rank == 0)
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=size)
    x = torch.randn(1200, 4, generator=torch.Generator().manual_seed(1))
    y = x @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
    x, y = x[rank::size].to(device), y[rank::size].to(device)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1, bias=False).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    dist.destroy_process_group()
    return [float(weight) for weight in model.module.weight.detach().flatten()]


def ranks(client: Client, gpu: bool) -> list[str]:
    """Return the workers that can take part, in the order of their names: those of a node are neighbours."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    able = client.run(torch.cuda.is_available) if gpu else dict.fromkeys(workers, True)
    return sorted(filter(able.get, able), key=lambda address: str(workers[address]["name"]))


def compute(client: Client, gpu: bool = False) -> list[float]:
    """Return the weights, the same from each rank."""
    places = ranks(client, gpu)
    shared = len(places), client.submit(free_address, workers=places[0], pure=False).result(), gpu
    trained = [client.submit(train, i, *shared, workers=place, pure=False) for i, place in enumerate(places)]
    return list(client.gather(trained)[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="real GPUs; needs PyTorch with CUDA")
    options = parser.parse_args()
    with Client() as client:  # the cluster's line: the run's cluster, or distributed's LocalCluster
        weights = compute(client, options.gpu)
    print("weights", " ".join(f"{weight:.3f}" for weight in weights))
    sys.exit(int(max(abs(a - b) for a, b in zip(weights, (1, -2, 3, 0.5), strict=True)) > 0.01))
