"""The lint names what will hang, and is silent on all else: warnings that cry wolf are turned off."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbtrain.magics.lint import lint

HANGS = {
    "a branch": ("if rank == 0:\n    dist.barrier()", 2, "only rank 0 comes to dist.barrier"),
    "the rank asked for": ("import torch.distributed as d\nif d.get_rank() == 3: d.barrier()", 2, "only rank 3"),
    "the environment": ("import os\nif int(os.environ['RANK']) > 1: dist.all_reduce(t)", 2, "only ranks 2-3"),
    "a local rank": ("if not local_rank:\n    dist.broadcast(t, 0)", 2, "only rank 0"),
    "a name from an import": ("from torch.distributed import all_reduce as r\nif rank: r(t)", 2, "only ranks 1-3"),
    "a variable": ("main = rank == 0\nif main:\n    dist.barrier()", 3, "condition in line 2"),
    "a name that is known": ("if is_main_process():\n    dist.barrier()", 2, "only rank 0"),
    "an attribute": ("if accelerator.is_main_process:\n    accelerator.wait_for_everyone()", 2, "only rank 0"),
    "and": ("rank == 0 and dist.barrier()", 1, "only rank 0"),
    "or": ("rank == 0 or dist.barrier()", 1, "only ranks 1-3"),
    "an expression": ("x = dist.barrier() if rank else 1", 1, "only ranks 1-3"),
    "a match": ("match rank:\n    case 0: dist.barrier()\n    case _: pass", 2, "only rank 0"),
    "other collectives": ("if rank:\n    dist.barrier()\nelse:\n    dist.all_reduce(t)", 4, "same order"),
    "an early return": ("def f():\n    if rank == 0: return\n    dist.barrier()\nf()", 3, "only ranks 1-3"),
    "an early return, perhaps": (
        "def f(x):\n    if x and rank == 0:\n        return\n    dist.barrier()",
        3,
        "rank 0 may leave the function here, and ranks 1-3 then wait in dist.barrier (line 4)",
    ),
    "a continue": ("for b in loader:\n    if rank == 0: continue\n    trainer.step(b)", 3, "only ranks 1-3"),
    "a break": ("for b in loader:\n    trainer.step(b)\n    if rank == 0: break", 3, "may leave the loop"),
    "a function of the cell": ("def f():\n    dist.barrier()\nif rank == 0:\n    f()", 2, "only rank 0"),
    "a function that is not called": ("def f():\n    if rank == 0:\n        dist.barrier()", 3, "only rank 0"),
    "a method": (
        "class A:\n    def __init__(self): self.m = rank == 0\n    def f(self):\n        if self.m: dist.barrier()",
        4,
        "only rank 0",
    ),
    "a name that is bound later": (
        "def f():\n    if main: dist.barrier()\nif x: y = 1\nmain = rank == 0\nf()",
        2,
        "only rank 0",
    ),
    "turns by rank": ("for _ in range(rank): dist.all_reduce(t)", 1, "only ranks 1-3"),
    "a while": ("while rank > 2: dist.barrier()", 1, "only rank 3"),
    "a comprehension": ("[dist.all_reduce(t) for t in ts if rank == 0]", 1, "only rank 0"),
    "the group of all": ("if rank == 0: dist.barrier(group=dist.group.WORLD)", 1, "only rank 0"),
    "a trainer's state": ("if rank == 0:\n    torch.save(trainer.state_dict(), 'x')", 2, "trainer.state_dict"),
    "a trainer by another name": (
        "t = nt.Trainer(net, optimizer=opt)\nif rank == 0:\n    t.save('x')",
        3,
        "only rank 0 comes to t.save",
    ),
    "evaluation": ("if rank == 0: print(trainer.evaluate(loader))", 1, "trainer.evaluate"),
    "a DTensor": ("if rank == 0:\n    print(w.full_tensor())", 2, "w.full_tensor"),
    "wrapping": (
        "from torch.nn.parallel import DistributedDataParallel as DDP\nif rank == 0: net = DDP(net)",
        2,
        "only rank 0 comes to DDP",
    ),
    "a new group": ("if rank < 2: g = dist.new_group([0, 1])", 1, "only ranks 0-1"),
    "a magic above": ("%%time\n\n!ls \\\n  -l\nif rank == 0:\n    dist.barrier()", 6, "only rank 0"),
    "input": ("x = input('go on?')", 1, "input() asks you on ranks 0-3"),
    "a breakpoint": ("for b in loader:\n    breakpoint()", 2, "breakpoint() asks you"),
    "the debugger": ("%debug", 1, "%debug asks you"),
}
RUNS = {
    "printing": "if rank == 0: print(loss)\ndist.barrier()",
    "both branches": "if rank == 0:\n    print(1)\n    dist.barrier()\nelse:\n    dist.barrier()",
    "first one, then the others": "if rank != 0: dist.barrier()\nload()\nif rank == 0: dist.barrier()",
    "one after another": "for r in range(world_size):\n    if r == rank: print(r)\n    dist.barrier()",
    "a group": "if rank < 2: dist.all_reduce(t, group=g)",
    "a group by position": "if rank < 2: dist.all_reduce(t, dist.ReduceOp.SUM, g)",
    "a mesh's group": "if mesh.get_local_rank('tp') == 0: dist.barrier(mesh.get_group('dp'))",
    "p2p": "if rank == 0: dist.send(t, 1)\nelif rank == 1: dist.recv(t, 0)",
    "a model's state": "if rank == 0:\n    torch.save(model.state_dict(), 'x')",
    "a state taken before": "state = trainer.state_dict()\nif rank == 0: torch.save(state, 'x')",
    "another trainer": "trainer = transformers.Trainer(model)\nif rank == 0: trainer.save('x')",
    "an exception": "if rank == 1: raise ValueError\ndist.barrier()",
    "a failure": "if rank == 1: open('/nowhere')\ndist.barrier()",
    "data": "x = torch.ones(4 if rank != 2 else 6)\ndist.all_reduce(x)",
    "a condition that all share": "if step % 10 == 0: dist.barrier()",
    "the world's size": "if world_size > 1: dist.barrier()",
    "torchrun or not": "import os\nif int(os.environ.get('RANK', -1)) != -1: dist.barrier()",
    "a script for one process or many": (
        "import os\nddp = int(os.environ.get('RANK', -1)) != -1\nif ddp:\n    main = int(os.environ['RANK']) == 0\n"
        "else:\n    main = True\nif ddp: net = DDP(net)\nwhile True:\n    if it % 10 == 0 and main:\n"
        "        torch.save(raw.state_dict(), 'x')\n    if ddp: dist.all_reduce(loss)\n    if it > 5: break"
    ),
    "the main process first": "def first(local_rank):\n    if local_rank not in [-1, 0]: dist.barrier()\n    yield\n"
    "    if local_rank == 0: dist.barrier()\nwith first(local_rank): load()",
    "the end of data": "while True:\n    try: b = next(it)\n    except StopIteration: break\n    dist.all_reduce(b)",
    "a shared way out": "for b in loader:\n    trainer.step(b)\n    if trainer.num_steps > 3: break",
    "a rank that is a number": "for rank in range(3):\n    if rank == 0: dist.barrier()",
    "a rank of a matrix": "def low(rank, x):\n    return x[:rank] if rank > 0 else x",
    "items shared out": "for i in range(rank, n, world_size): dist.all_reduce(t)",
    "a callback": "if rank == 0:\n    def f(): dist.barrier()\n    study.optimize(f)\nelse:\n    dist.barrier()",
    "two halves": "class A:\n    def __enter__(self):\n        if rank: dist.barrier()\n"
    "    def __exit__(self, *_):\n        if not rank: dist.barrier()",
    "input on one": "if rank == 0: input()",
    "clipping": "if rank == 0: torch.nn.utils.clip_grad_norm_(ps, 1.0)",
}


@pytest.mark.parametrize("name", HANGS)
def test_what_hangs_is_named_with_its_line(name: str) -> None:
    source, line, words = HANGS[name]
    found = lint(source, range(4), 4)
    assert [one.line for one in found] == [line], found
    assert words in found[0].text


@pytest.mark.parametrize("name", RUNS)
def test_what_runs_is_not_mentioned(name: str) -> None:
    assert lint(RUNS[name], range(4), 4) == []


def test_lines_are_the_cells() -> None:
    (one,) = lint("if rank == 0:\n    dist.barrier()", range(4), 4, offset=1)
    assert one.line == 3
    assert "line 2" in one.text


def test_one_warning_a_condition() -> None:
    source = "if rank == 0:\n    dist.barrier()\n    dist.all_reduce(t)\nif rank == 1:\n    dist.broadcast(t, 1)"
    assert [one.line for one in lint(source, range(4), 4)] == [2, 5]


@pytest.mark.parametrize("source", ["dist.barrier()", "trainer.step(x)", "def f(): dist.barrier()\nf()"])
def test_a_world_collective_on_some_ranks(source: str) -> None:
    (one,) = lint(source, [0, 2], 4)
    assert "waits for all 4 ranks" in one.text
    assert "ranks 0,2 only" in one.text


@pytest.mark.parametrize("source", ["dist.barrier(group=g)", "def f(): dist.barrier()", "if rank == 0: print(1)"])
def test_some_ranks_may_do_what_is_theirs(source: str) -> None:
    assert lint(source, [0, 2], 4) == []


def test_prompts_on_one_rank_are_welcome() -> None:
    assert lint("input()\nbreakpoint()", [2], 4) == []


def test_a_session_of_one_rank_has_nobody_to_wait_for() -> None:
    assert lint("if rank == 0: dist.barrier()\ninput()", [0], 1) == []


# -- on whatever Python ------------------------------------------------------------------------------------------------

_WORDS = """rank|x|0|world_size|f(x)|dist.barrier()|dist.get_rank()|[*x]|x[rank]|(y := rank)|-rank|rank // 0|
'a' * 10 ** 9|2 ** 10 ** 9|lambda: dist.barrier()|[dist.barrier() for i in x if rank]|f'{x}'"""
_ATOMS = st.sampled_from([word.strip() for word in _WORDS.split("|")])
_TESTS = st.builds(
    lambda a, op, b: f"{a} {op} {b}", _ATOMS, st.sampled_from(["==", "<", "in", "is", "and", "or", "%", "+"]), _ATOMS
)
_LEAVES = st.one_of(
    st.sampled_from(
        ["pass", "return", "break", "continue", "raise", "dist.barrier()", "rank += 1", "global x", "del x"]
    ),
    _TESTS.map(lambda test: f"a, *b = {test}"),
    _TESTS,
)


def _indented(lines: list[str]) -> str:
    return "\n".join("    " + line for part in lines for line in part.splitlines())


_HEADS = ["if {}:", "while {}:", "for rank in {}:", "with {} as x:", "try:", "def f(rank, x={}):", "class C({}):"]


def _compound(head: str, test: str, body: list[str], orelse: list[str]) -> str:
    text = f"{head.format(test)}\n{_indented(body)}"
    if head == "try:":
        return f"{text}\nfinally:\n{_indented(orelse)}"
    return f"{text}\nelse:\n{_indented(orelse)}" if head.startswith(("if", "while", "for")) else text


_BLOCKS = st.recursive(
    _LEAVES,
    lambda inner: st.builds(
        _compound,
        st.sampled_from(_HEADS),
        _TESTS,
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=2),
    ),
    max_leaves=12,
)


@given(st.lists(_BLOCKS, min_size=1, max_size=4).map("\n".join))
@settings(max_examples=300, deadline=None)
def test_it_never_raises_on_what_parses(source: str) -> None:
    lint(source, range(3), 3)


def test_it_is_silent_on_the_standard_library() -> None:
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[::12]
    found = {path.name: lint(path.read_text(errors="replace"), range(2), 2) for path in paths}
    asks = {name for name, some in found.items() if any("asks you" not in one.text for one in some)}
    assert len(paths) > 10
    assert asks == set()


def test_a_cell_is_linted_in_no_time() -> None:
    deep = "\n".join(f"def f{i}(x):\n    f{i - 1}(x)\n    f{i - 1}(x)\n    f{i - 1}(x)" for i in range(1, 40))
    assert lint(f"def f0(x): dist.barrier()\n{deep}\nf39(rank)\n", range(64), 64) == []
    assert ast.parse(deep)
