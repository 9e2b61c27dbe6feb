"""PyTorch's tensors, numba's arrays and RMM's buffers on a GPU: each is tested where its library is."""

import importlib
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from spill_stores import NewStore, put
from waiting import scaled

from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.devices.cuda import device_of, is_device_array

MIB = 1 << 20
MAKE: dict[str, Callable[[Any, int], Any]] = {
    "torch": lambda torch, n: torch.full((MIB,), n, dtype=torch.uint8, device="cuda:0"),
    "numba": lambda numba, n: numba.cuda.to_device(np.full(MIB, n, "u1")),
    "rmm": lambda rmm, n: rmm.DeviceBuffer.to_device(np.full(MIB, n, "u1").tobytes()),
}
HOST: dict[str, Callable[[Any], Any]] = {
    "torch": lambda x: x.cpu().numpy(),
    "numba": lambda x: x.copy_to_host(),
    "rmm": lambda x: np.frombuffer(x.copy_to_host(), "u1"),
}


@pytest.fixture
def store(new_store: NewStore) -> GpuSpillBuffer:
    return new_store(8 * MIB, 8 * MIB)


def library(name: str) -> Any:
    """Return a library that has a GPU."""
    found = pytest.importorskip(name, reason=f"no {name} here")
    try:
        if name == "torch":
            found.zeros(1, device="cuda:0")
        elif name == "numba":
            importlib.import_module("numba.cuda").device_array(1)
        else:
            found.DeviceBuffer(size=1)
    except Exception as why:  # each library has its own errors, of no public class
        pytest.skip(f"no GPU for {name} here: {why}")
    return found


@pytest.mark.parametrize("name", MAKE)
def test_every_tier_is_used_and_values_are_right(store: GpuSpillBuffer, name: str) -> None:
    module = library(name)
    for n in range(40):
        store[n] = {"x": [MAKE[name](module, n)], "n": n}
    kind = type(store[0]["x"][0])
    assert store.settle(scaled(30))
    assert 0 < store.tiers["device"] <= 8 * MIB
    assert store.tiers["disk"] > 0
    for n in range(40):
        (found,) = store[n]["x"]
        assert type(found) is kind
        np.testing.assert_array_equal(HOST[name](found), np.full(MIB, n, "u1"))


def test_any_tensor_comes_back_as_it_was(store: GpuSpillBuffer) -> None:
    torch = library("torch")
    base = torch.arange(600.0, device="cuda").reshape(20, 30)
    tensors = {"base": base, "T": base.T, "slice": base[::2, 3:], "0-d": base[1, 2], "half": base.to(torch.bfloat16)}
    tensors |= {"expanded": base[0].expand(4, 30), "bool": base > 3, "empty": base[:0], "none": torch.empty(0).cuda()}
    tensors |= {"parameter": torch.nn.Parameter(base.clone()), "leaf": base.clone().requires_grad_()}
    tensors["frozen"] = torch.nn.Parameter(base.clone(), requires_grad=False)
    for name, tensor in tensors.items():
        device = device_of(tensor)
        assert device is not None
        ((root, views),) = device.pack([[tensor]], lambda nbytes: np.empty(nbytes, np.uint8))
        (found,) = device.unpack(root, pickle.loads(pickle.dumps(views)))
        assert (type(found), found.dtype, found.shape) == (type(tensor), tensor.dtype, tensor.shape), name
        assert (found.stride(), found.requires_grad) == (tensor.stride(), tensor.requires_grad), name
        assert found.is_leaf
        assert found.data_ptr() != tensor.data_ptr() or not tensor.numel()
        assert torch.equal(found, tensor), name
    assert not is_device_array(base.cpu())
    store["one"], store["two"] = base, [base.T]
    assert store.tiers["device"] == base.untyped_storage().nbytes()


def test_a_model_moves_and_learns_on(store: GpuSpillBuffer) -> None:
    torch = library("torch")
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.BatchNorm1d(512)).cuda().eval()
    given = torch.randn(5, 512, device="cuda")
    expected = model(given).cpu()
    store["model"] = model
    del model
    put(store, range(20), lambda n: MAKE["torch"](torch, n))
    assert store.counters["device_to_host"].nbytes > MIB
    model = store["model"]
    assert torch.equal(model(given).cpu(), expected)
    step = torch.optim.SGD(model.parameters(), 0.1)
    model.train()(given).sum().backward()
    step.step()


def test_what_has_a_gradient_stays_and_counts(store: GpuSpillBuffer, caplog: pytest.LogCaptureFixture) -> None:
    torch = library("torch")
    weight = torch.nn.Parameter(torch.ones(MIB // 4, device="cuda"))
    (weight * 2).sum().backward()
    store["weight"] = weight
    put(store, range(20), lambda n: MAKE["torch"](torch, n))
    assert store["weight"] is weight
    assert store.immovable == (1, MIB)
    assert "torch.nn.parameter.Parameter" in caplog.text


@pytest.mark.parametrize("layout", ["C", "F", "strided", "records"])
def test_any_array_of_numba_comes_back_as_it_was(layout: str) -> None:
    cuda = library("numba").cuda
    base = np.arange(600.0).reshape(20, 30)
    records = np.array([(1, 2.5), (3, 4.5)], "i4,f8")
    sent = {"C": base, "F": np.asfortranarray(base), "strided": base, "records": records}[layout]
    array = cuda.to_device(sent)
    array, sent = (array[::2, 3:], sent[::2, 3:]) if layout == "strided" else (array, sent)
    device = device_of(array)
    assert device is not None
    ((root, views),) = device.pack([[array]], lambda nbytes: np.empty(nbytes, np.uint8))
    (found,) = device.unpack(root, pickle.loads(pickle.dumps(views)))
    assert (type(found), found.dtype, found.strides) == (type(array), array.dtype, array.strides)
    (view,) = views
    ((down, _),) = device.pack([[found]], lambda nbytes: np.empty(nbytes, np.uint8))
    np.testing.assert_array_equal(np.ndarray(view.shape, view.dtype, down, view.offset, view.strides), sent)
