"""Calls on which ranks do not agree: an error on all of them, and everything goes on. Legal calls never notice."""

from __future__ import annotations

import time

import pytest
from notebook import Notebook, Output, plain

NAMES = "rank, world_size, id(dist), id(mesh), sub is not None, os.getpid()"
SETUP = f"""%%distributed -o before
import os, time
sub = dist.new_group([0, 1, 3])
{NAMES}"""
LEGAL = """
g = torch.Generator().manual_seed(rank)
x = torch.randn(4, generator=g)
n, group = world_size, None
def new(*shape): return torch.zeros(*shape)
def done(work): work.wait() if work is not None else None
def all_ops(group, n, me, first, asynchronous):
    out = []
    a = dict(group=group, async_op=asynchronous)
    t = x.clone(); done(dist.all_reduce(t, **a)); out.append(t)
    t = x.clone(); done(dist.all_reduce(t if me else t.view(2, 2), op=dist.ReduceOp.MAX, **a)); out.append(t)
    t = x.clone(); done(dist.broadcast(t, first, **a)); out.append(t)
    t = x.clone(); done(dist.broadcast(t, group_src=1, **a)); out.append(t)
    t = x.clone(); done(dist.reduce(t, first, **a)); out.append(t if me == 0 else new(1))
    l = [new(4) for _ in range(n)]; done(dist.all_gather(l, x, **a)); out += l
    t = new(4 * n); done(dist.all_gather_single(t, x, **a)); out.append(t)
    l = [new(4) for _ in range(n)] if me == 0 else None; done(dist.gather(x, l, first, **a)); out += l or []
    t = new(4); done(dist.scatter(t, [x + i for i in range(n)] if me == 0 else None, first, **a)); out.append(t)
    t = new(4); done(dist.reduce_scatter(t, [x * i for i in range(n)], **a)); out.append(t)
    t = new(2); done(dist.reduce_scatter_single(t, torch.arange(2.0 * n) * rank, **a)); out.append(t)
    t = new(n); done(dist.all_to_all_single(t, torch.arange(float(n)) + rank, **a)); out.append(t)
    # uneven: rank `me` sends i + 1 elements to rank i, and receives me + 1 from each
    t = new(n * (me + 1))
    sends = [i + 1 for i in range(n)]
    done(dist.all_to_all_single(t, torch.arange(float(sum(sends))), [me + 1] * n, sends, **a)); out.append(t)
    done(dist.barrier(**a))
    o = [None] * n; dist.all_gather_object(o, "x" * rank, group=group); out.append(o)
    o = [None] * n if me == 0 else None; dist.gather_object({rank: 1}, o, first, group=group); out.append(o)
    o = [rank, "a" * rank]; dist.broadcast_object_list(o, first, group=group); out.append(o)
    o = [None]; dist.scatter_object_list(o, list(range(n)) if me == 0 else None, first, group=group); out.append(o)
    return out
def messages():
    out = []
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    t = new(3); r = dist.irecv(t, left); s = dist.isend(torch.full((3,), float(rank)), right); r.wait(); s.wait()
    out.append(t); t = new(5)
    ops = [dist.P2POp(dist.irecv, t, left), dist.P2POp(dist.isend, torch.full((5,), float(rank)), right)]
    for work in dist.batch_isend_irecv(ops): work.wait()
    out.append(t)
    if rank == 0:
        for peer in (1, 2, 3): t = new(2); dist.recv(t); out.append(t)
        out = [*out[:2], sum(out[2:])]
    else: dist.send(torch.full((2,), float(rank)), 0)
    if rank == 2: dist.send_object_list(["from", 2], 1)
    if rank == 1: o = [None, None]; dist.recv_object_list(o, 2); out.append(o)
    return out
def functional():
    import torch.distributed.nn.functional as fn
    t = x.clone().requires_grad_(); fn.all_reduce(t * 2).sum().backward()
    return [t.grad]
def plain(values): return [v.tolist() if isinstance(v, torch.Tensor) else v for v in values]
def everything():
    out = [plain(all_ops(None, world_size, rank, 0, a)) for a in (False, True)]
    if sub is not None and rank != 2: out += [plain(all_ops(sub, 3, sub.rank(), 0, a)) for a in (False, True)]
    dist.monitored_barrier()
    return [*out, plain(messages()), plain(functional())]
"""
# what one rank calls, or all but one, where the others call `all_reduce` of four numbers
MISMATCHES = {
    "shape": "dist.all_reduce(torch.ones(6))",
    "dtype": "dist.all_reduce(torch.ones(4, dtype=torch.float64))",
    "reduction": "dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)",
    "operation": "dist.broadcast(torch.ones(4), 0)",
    "object": "dist.all_gather_object([None] * 4, 1)",
    "barrier": "dist.barrier()",
    "asynchronous": "dist.all_reduce(torch.ones(6), async_op=True).wait()",
    "deprecated": "dist.all_gather_into_tensor(torch.ones(16), torch.ones(4))",
}
PAIRS = {
    "src": ("dist.broadcast(torch.ones(4), 0)", "dist.broadcast(torch.ones(4), 1)"),
    "dst": ("dist.reduce(torch.ones(4), 0)", "dist.reduce(torch.ones(4), 1)"),
    "scatter": (
        "dist.scatter(torch.ones(2), [torch.ones(2)] * 4 if rank == 0 else None)",
        "dist.scatter(torch.ones(3), None)",
    ),
    "gather": ("dist.gather(torch.ones(2), [torch.ones(2)] * 4 if rank == 0 else None)", "dist.gather(torch.ones(3))"),
    "all_gather": (
        "dist.all_gather([torch.ones(2) for _ in range(4)], torch.ones(2))",
        "dist.all_gather([torch.ones(3) for _ in range(4)], torch.ones(3))",
    ),
    "reduce_scatter": (
        "dist.reduce_scatter_single(torch.ones(2), torch.ones(8))",
        "dist.reduce_scatter_single(torch.ones(3), torch.ones(12))",
    ),
    "splits": (
        "dist.all_to_all_single(torch.ones(4), torch.ones(4))",
        "dist.all_to_all_single(torch.ones(7), torch.ones(4), [1, 2, 2, 2], [1, 1, 1, 1])",
    ),
    "object list": ("dist.broadcast_object_list([1, 2], 0)", "dist.broadcast_object_list([1], 0)"),
    "order": ("dist.barrier(); dist.all_reduce(torch.ones(4))", "dist.all_reduce(torch.ones(4)); dist.barrier()"),
    "one ahead": (
        "dist.all_reduce(torch.ones(4)); dist.broadcast(torch.ones(2), 0)",
        "dist.broadcast(torch.ones(2), 0)",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _names(nb: Notebook) -> None:
    output = nb(SETUP)
    assert output.status == "ok", output.error


@pytest.fixture(autouse=True)
def _everything_is_as_before(nb: Notebook):
    yield
    output = nb(f"%%distributed -o after\nt = torch.ones(1); dist.all_reduce(t); assert t.item() == 4\n{NAMES}")
    assert output.status == "ok", output.error
    assert nb.value("after == before")


def assert_refused(output: Output, *parts: str, all_ranks: bool = True) -> None:
    text = plain(output.error)
    assert "CollectiveError on rank" in text
    assert "the ranks do not call the same: " in text
    for part in parts:
        assert part in text
    assert output.seconds < 10
    if all_ranks:  # by the guard, not freed after another's failure
        assert "then failed" not in text


def test_a_mismatched_collective_is_an_error_on_all_ranks(nb: Notebook) -> None:
    """Case 13."""
    output = nb("%%distributed\nx = torch.ones(4 if rank != 2 else 6)\ndist.all_reduce(x)")
    shapes = "ranks 0, 1, 3: all_reduce(SUM) of float32 [4]; rank 2: all_reduce(SUM) of float32 [6]"
    assert_refused(output, "CollectiveError on ranks 0-3", shapes)


@pytest.mark.parametrize("who", [pytest.param("rank == 2", marks=pytest.mark.slow), "rank == 0", "rank != 0"])
@pytest.mark.parametrize("other", MISMATCHES.values(), ids=MISMATCHES)
def test_one_rank_or_all_but_one_call_something_else(nb: Notebook, who: str, other: str) -> None:
    code = f"%%distributed\nif {who}: {other}\nelse: dist.all_reduce(torch.ones(4))"
    assert_refused(nb(code), all_ranks="async_op" not in other)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_every_kind_of_disagreement_is_refused(nb: Notebook, pair: tuple[str, str]) -> None:
    assert_refused(nb(f"%%distributed\nif rank == 3: {pair[1]}\nelse: {pair[0]}"))


def test_a_cell_can_catch_it_and_go_on(nb: Notebook) -> None:
    """Nothing was sent: the group is as it was, in the same cell."""
    output = nb("""%%distributed -o sums
try: dist.all_reduce(torch.ones(4 if rank != 2 else 6))
except nt.errors.CollectiveError: t = torch.ones(2); dist.all_reduce(t)
t.tolist()""")
    assert output.status == "ok", output.error
    assert nb.value("sums") == [[4.0, 4.0]] * 4


@pytest.mark.parametrize("group", ["sub", "pairs[rank % 2]"])
def test_in_a_smaller_group(nb: Notebook, group: str) -> None:
    """Ranks that are not in it do not notice."""
    code = f"""%%distributed
sub = dist.new_group([0, 1, 3])
pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
if rank != 2: dist.all_reduce(torch.ones(5 if rank == 1 else 4), group={group})"""
    output = nb(code) if group == "sub" else nb(code.replace("if rank != 2: ", ""))
    assert_refused(output, "rank 1: all_reduce(SUM) of float32 [5]")
    assert "CollectiveError on ranks" in plain(output.error)


@pytest.mark.parametrize(("sent", "received"), [(3, 5), (5, 3)])
@pytest.mark.parametrize("late", [0, 1])
def test_a_message_of_the_wrong_size(nb: Notebook, sent: int, received: int, late: int) -> None:
    code = f"""%%distributed
if rank == {late}: time.sleep(0.3)
if rank == 0: dist.send(torch.ones({sent}), 1)
if rank == 1: dist.recv(torch.ones({received}), 0)"""
    assert_refused(nb(code), f"send of float32 [{sent}]", f"recv of float32 [{received}]", all_ranks=False)


@pytest.mark.parametrize("mode", ["cells", "on"])
def test_legal_calls_give_what_they_give_without_a_guard(nb: Notebook, mode: str) -> None:
    nb("%distributed guard off")
    renew = f"%%distributed\nsub = dist.new_group([0, 1, 3]){LEGAL}"  # other tests have bound its names to other things
    assert nb(renew).status == "ok"
    output = nb("%%distributed -o free\neverything()", timeout=100)
    assert output.status == "ok", plain(output.error)
    assert nb(f"%distributed guard {mode}").stdout == f"guard: {mode}\n"
    output = nb("%%distributed -o guarded\neverything()", timeout=100)
    nb("%distributed guard cells")
    assert output.status == "ok", plain(output.error)
    assert nb.value("free == guarded")
    assert nb.value("len(free[0]), len(free[2])") == (6, 4)


def test_names_that_were_bound_before_are_guarded(nb: Notebook) -> None:
    output = nb("%%distributed\nfrom torch.distributed import all_reduce\nall_reduce(torch.ones(4 if rank else 6))")
    assert_refused(output)


def test_a_message_whose_handle_a_cell_lets_go_stops_no_later_one(nb: Notebook) -> None:
    output = nb("""%%distributed --timeout 20 -o heard
if rank == 0: dist.irecv(torch.zeros(9), 1)
dist.barrier()
if rank == 1: dist.isend(torch.ones(9), 0)
dist.barrier()
t = torch.ones(4); dist.all_reduce(t)
float(t[0])""")
    assert output.status == "ok", plain(output.error)
    assert nb.value("heard[0]") == 4.0


def test_exchanges_of_trainers_leave_no_names_behind(nb: Notebook) -> None:
    output = nb("""%%distributed -o names
from nbtrain.engine import guard
torch.manual_seed(0)
trainer = nt.Trainer(torch.nn.Linear(4, 4), nt.Plan(zero=1), loss_fn=torch.nn.functional.mse_loss,
                     optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
counts = guard._state.ledger._counts
trainer.step(torch.ones(4, 4), torch.ones(4, 4)); before = len(counts)
for _ in range(5): trainer.step(torch.ones(4, 4), torch.ones(4, 4))
len(counts) - before""")
    assert output.status == "ok", plain(output.error)
    assert nb.value("max(names)") == 0


def test_functions_keep_their_signatures(nb: Notebook) -> None:
    output = nb("%%distributed\nimport inspect\nprint(inspect.signature(dist.all_reduce)); print(dist.isend.__name__)")
    assert output.stdout.splitlines()[0].startswith("(tensor, op=")
    assert output.stdout.splitlines()[1] == "isend"


def test_the_store_does_not_grow(nb: Notebook) -> None:
    output = nb(
        """%%distributed -o grown
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
def use(n, **options):
    for _ in range(n):
        work = dist.barrier(**options)
        if work is not None: work.wait()
use(100); use(100, async_op=True); before = store.num_keys()
use(1500)
for _ in range(1000): dist.send(torch.ones(1), rank + 1) if rank % 2 == 0 else dist.recv(torch.ones(1), rank - 1)
use(1500, async_op=True)
dist.barrier()
store.num_keys() - before""",
        timeout=100,
    )
    assert output.status == "ok", plain(output.error)
    assert max(nb.value("grown")) < 1500  # 11,500 keys were put


def test_ranks_that_wait_in_the_guard_are_interrupted_and_their_groups_stay(nb: Notebook) -> None:
    request = nb.send("%%distributed\nif rank != 2: dist.all_reduce(torch.ones(4))")
    time.sleep(1.0)
    began = time.monotonic()
    nb.interrupt()
    output = nb.wait(request)
    assert output.ename == "CellInterrupted"
    assert "they kept their state" in output.error
    assert time.monotonic() - began < 5


def test_a_failure_frees_ranks_that_wait_in_the_guard(nb: Notebook) -> None:
    output = nb("%%distributed\nif rank == 2: raise ValueError('first')\ndist.all_reduce(torch.ones(4))")
    text = plain(output.error)
    assert output.seconds < 8
    assert text.startswith("ValueError on rank 2: first")
    assert "ranks 0-1,3 then failed" in text


def test_a_peer_that_comes_by_an_unguarded_way_is_not_refused(nb: Notebook) -> None:
    """Rank 0 calls from the cell, the others from a library: the guard gives way after its grace."""
    output = nb("""%%distributed
import types, sys
library = types.ModuleType("library")
source = "import torch.distributed as d\\ndef call(t): d.all_reduce(t)"
exec(compile(source, os.path.join(os.path.dirname(torch.__file__), "library.py"), "exec"), library.__dict__)
t = torch.ones(4)
dist.all_reduce(t) if rank == 0 else library.call(t)
u = torch.ones(4); dist.all_reduce(u)
t.tolist(), u.tolist()""")
    assert output.status == "ok", plain(output.error)
    assert output.plain == ["([4.0, 4.0, 4.0, 4.0], [4.0, 4.0, 4.0, 4.0])"]


def test_training_pays_nothing(nb: Notebook) -> None:
    """What nbtrain and FSDP call is not compared."""
    output = nb("""%%distributed -o posted
import torch.nn as nn
from nbtrain.engine import agreement
posts = []
post = agreement.Agreement.post
agreement.Agreement.post = lambda self, call, *, begins: (posts.append(call.op), post(self, call, begins=begins))
try:
    for zero in (0, 3):
        trainer = nt.Trainer(nn.Linear(4, 4), nt.Plan(zero=zero), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                             loss_fn=nn.functional.mse_loss, grad_clip=1.0)
        trainer.step(torch.ones(2, 4), torch.ones(2, 4))
finally: agreement.Agreement.post = post
posts""")
    assert output.status == "ok", plain(output.error)
    assert nb.value("posted") == [[]] * 4


def test_a_mode_that_there_is_not(nb: Notebook) -> None:
    assert "did you mean 'cells'?" in nb("%distributed guard cell").error
    assert "type %distributed guard on" in nb("%distributed guard").error
