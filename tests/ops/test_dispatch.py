"""The choice of a backend: preference, force, and reasons."""

import asyncio
import logging
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch

from hf_hybrid_ssm.ops.core.dispatch import REGISTRY, Op, backend
from tests import processes
from tests.row_options import longhorn_scan


def implementation(name):
    def double(x):
        return (2 * x,)

    double.__name__ = name
    return double


EXAMPLES = (lambda: torch.ones(2),)


@pytest.fixture
def op(monkeypatch):
    module = ModuleType("fast_on_cpu")
    module.naming_native = implementation("native")
    module.supports = lambda device_type, dtype: None if device_type == "cpu" else f"it runs on cpu, not {device_type}"
    monkeypatch.setitem(sys.modules, "fast_on_cpu", module)
    plain = {name: implementation(name) for name in ("torch", "reference")}
    yield Op("naming", plain, {"native": "fast_on_cpu", "triton": "no_such_package_at_all"}, EXAMPLES)
    REGISTRY.pop("naming", None)


def chosen(op, device_type="cpu", requested=None):
    return op.select(device_type, torch.float32, requested).__name__


def test_prefers_the_fastest_that_can_run(op):
    assert chosen(op) == "native"
    assert chosen(op, "meta") == "torch"


def test_force_by_argument_and_context(op):
    assert chosen(op, requested="reference") == "reference"
    with backend("reference"):
        assert chosen(op) == "reference"
        with backend("torch"):
            assert chosen(op) == "torch"
        assert chosen(op) == "reference"
        assert chosen(op, requested="native") == "native"
    assert chosen(op) == "native"


def fresh(value):
    code = "from hf_hybrid_ssm.ops.core.dispatch import forced_backend; print(forced_backend())"
    environment = {**os.environ, "HF_HYBRID_SSM_BACKEND": value, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return processes.run([sys.executable, "-c", code], env=environment)


def test_force_by_environment():
    assert fresh("reference").stdout.strip() == "reference"
    assert fresh("").stdout.strip() == "None"
    assert "HF_HYBRID_SSM_BACKEND='quick' is not a backend" in fresh("quick").stderr


def test_a_forced_backend_that_cannot_run_says_why(op):
    with pytest.raises(ValueError, match="runs on cpu, not cuda"):
        chosen(op, "cuda", "native")
    with pytest.raises(ValueError, match="no_such_package_at_all"):
        chosen(op, requested="triton")


def test_unknown_names(op):
    with pytest.raises(ValueError, match=r"backend='cuda'.*triton"):
        chosen(op, requested="cuda")
    with pytest.raises(ValueError, match="fastest"), backend("fastest"):
        pass


def test_the_context_ends_with_an_error(op):
    with pytest.raises(RuntimeError), backend("reference"):
        raise RuntimeError
    assert chosen(op) == "native"


def test_threads_force_for_themselves(op):
    """Blocks that overlap in two threads, and a third thread that forces nothing."""
    inside, leave, seen = threading.Barrier(2), threading.Event(), {}

    def first():
        with backend("reference"):
            inside.wait()  # both are inside, then this one leaves first
            seen["first"] = chosen(op)
        seen["first after"] = chosen(op)
        leave.set()

    def second():
        with backend("torch"):
            inside.wait()
            leave.wait()
            seen["second"] = chosen(op)
        seen["second after"] = chosen(op)

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"first": "reference", "first after": "native", "second": "torch", "second after": "native"}
    with backend("reference"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(chosen, op).result() == "native"
    assert chosen(op) == "native"


def test_tasks_force_for_themselves(op):
    async def task(name, first, then):
        with backend(name):
            await asyncio.sleep(first)
            found = chosen(op)
            await asyncio.sleep(then)
        return found, chosen(op)

    async def both():
        return await asyncio.gather(task("reference", 0.02, 0), task("torch", 0.01, 0.03))

    assert asyncio.run(both()) == [("reference", "native"), ("torch", "native")]
    assert chosen(op) == "native"


class Nested(torch.autograd.Function):
    """Its backward runs another backward; torch moves deep nests to threads of its own."""

    @staticmethod
    def forward(ctx, x, depth, look):
        ctx.depth, ctx.look = depth, look
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.look()
        if ctx.depth:
            with torch.enable_grad():
                Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1, ctx.look).sum().backward()
        return grad, None, None


def test_the_force_reaches_the_threads_of_backward(op):
    """A checkpoint computes its forward again there, and must meet the same backend."""
    seen = set()

    def look():
        seen.add((threading.get_ident(), chosen(op)))

    loss = Nested.apply(torch.ones(1, requires_grad=True), 80, look).sum()
    with backend("reference"):
        loss.backward(retain_graph=True)
    assert len({thread for thread, _ in seen}) > 1 and {name for _, name in seen} == {"reference"}
    seen.clear()
    loss.backward()
    assert {name for _, name in seen} == {"native"}


def test_compiled_functions_follow_the_force():
    """A force outside of the compiled function makes another graph, one inside of it is traced."""
    tensors = [torch.randn(1, 5, n) for n in (3, 3, 2, 2)]
    graphs = []

    def recording(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if "longhorn" in str(node.target)])
        return graph.forward

    def scan(*tensors):
        return longhorn_scan(*tensors)[0]

    def forced_inside(*tensors):
        with backend("reference"):
            return scan(*tensors)

    compiled = torch.compile(scan, backend=recording, fullgraph=True)
    compiled(*tensors)
    with backend("torch"):
        compiled(*tensors)
    with backend("reference"):
        compiled(*tensors)
    compiled(*tensors)
    torch.compile(forced_inside, backend=recording, fullgraph=True)(*tensors)
    assert [len(graph) for graph in graphs] == [1, 1, 0, 0]
    assert "longhorn_scan_torch" in graphs[1][0]


def test_a_broken_package_costs_time_only(monkeypatch, tmp_path, caplog):
    (tmp_path / "broken_kernels.py").write_text("raise OSError('no driver')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = {"torch": implementation("torch"), "reference": None}
    op = Op("breaking", plain, {"native": "broken_kernels"}, EXAMPLES)
    with caplog.at_level(logging.WARNING):
        assert chosen(op) == chosen(op) == "torch"
    assert len([record for record in caplog.records if "no driver" in record.getMessage()]) == 1
    REGISTRY.pop("breaking")


def test_kernels_that_nothing_checks_are_refused():
    with pytest.raises(ValueError, match=r"unchecked has kernels \(native\) but no examples"):
        Op("unchecked", {"torch": implementation("torch"), "reference": None}, {"native": "some_module"})
    assert "unchecked" not in REGISTRY
