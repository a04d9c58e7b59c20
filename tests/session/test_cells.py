"""``%%distributed`` in a real kernel, on four real ranks."""

from __future__ import annotations

import pytest
from notebook import Notebook


def test_every_rank_runs_the_cell_with_the_promised_names(nb: Notebook) -> None:
    output = nb(
        "%%distributed -o names\n(rank, world_size, local_rank, str(device), dist.get_rank(), mesh.size(), nt.__name__)"
    )
    assert output.status == "ok", output.error
    assert nb.value("names") == [(r, 4, r, "cpu", r, 4, "nbtrain") for r in range(4)]


def test_torchruns_variables_are_in_the_environment(nb: Notebook) -> None:
    nb("%%distributed -o env\nimport os\n[os.environ[k] for k in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')]")
    assert nb.value("env") == [[str(r), "4", "127.0.0.1"] for r in range(4)]


def test_code_written_for_torchrun_runs_more_than_once(nb: Notebook) -> None:
    script = """%%distributed -o sums
import torch, torch.distributed as dist
if dist.is_initialized():
    dist.destroy_process_group()
dist.init_process_group("gloo")
t = torch.ones(1) * dist.get_rank()
dist.all_reduce(t)
dist.destroy_process_group()
t.item()"""
    for _ in range(2):
        output = nb(script)
        assert output.status == "ok", output.error
        assert nb.value("sums") == [6.0] * 4
    output = nb("%%distributed -o total\nt = torch.ones(1); dist.all_reduce(t); t.item()")
    assert output.status == "ok", output.error
    assert nb.value("total") == [4.0] * 4


def test_a_collective_from_a_cell(nb: Notebook) -> None:
    output = nb("%%distributed\nt = torch.ones(2) * rank\ndist.all_reduce(t)\nt")
    assert output.plain == ["tensor([6., 6.])"]


def test_ranks_draw_different_random_numbers(nb: Notebook) -> None:
    nb("%%distributed -o drawn\nimport random\nround(torch.rand(1).item(), 6)")
    assert len(set(nb.value("drawn"))) == 4


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [
        ("0", [0]),
        ("0,2", [0, 2]),
        ("1-3", [1, 2, 3]),
        ("-1", [3]),
        ("all", [0, 1, 2, 3]),
        ("even", [0, 2]),
        ("odd", [1, 3]),
    ],
)
def test_the_ranks_of_a_cell(nb: Notebook, spec: str, ranks: list[int]) -> None:
    output = nb(f"%%distributed -r {spec} -o who\nrank")
    assert output.status == "ok", output.error
    assert nb.value("who") == ranks


def test_values_arrive_without_torch(nb: Notebook) -> None:
    nb("%%distributed -o got\n{'a': torch.ones(2, dtype=torch.bfloat16), 'b': [torch.tensor(3)], 'c': (torch.half,)}")
    assert (
        nb.value("[{'a': g['a'].tolist(), 'b': g['b'], 'c': g['c']} for g in got]")
        == [{"a": [1.0, 1.0], "b": [3], "c": ("torch.float16",)}] * 4
    )
    assert nb.value("__import__('sys').modules.get('torch') is None")


def test_a_model_arrives_as_what_it_is_called(nb: Notebook) -> None:
    nb("%%distributed -o models\nclass Net(torch.nn.Linear): pass\nNet(2, 2)")
    assert "on the rank" in nb.value("repr(models[0])")


def test_magics_work_inside(nb: Notebook) -> None:
    assert "loop" in nb("%%distributed\n%timeit -n 1 -r 1 pass").stdout
    assert nb("%%distributed\n!echo from the shell").stdout == "from the shell\n"
    assert nb("%%distributed\n%%time\nx = 1").status == "ok"


def test_top_level_await(nb: Notebook) -> None:
    output = nb("%%distributed\nimport asyncio\nawait asyncio.sleep(0.01)\nprint('awaited')")
    assert output.stdout == "awaited\n"


def test_a_semicolon_mutes_a_value(nb: Notebook) -> None:
    assert nb("%%distributed\n1 + 1;").displays == []


def test_push_pull_and_local(nb: Notebook) -> None:
    nb("data = [1, 2]\ndef double(x): return [2 * v * world_size for v in x]\nworld_size = 1")
    output = nb("%%distributed --push data,double --local\nprint(double(data))")
    assert output.lines == ["[8, 16]", "[2, 4]"]
    assert nb("%distributed pull data").status == "ok"
    assert nb.value("data") == [[1, 2]] * 4


def test_pushing_an_object_of_an_unknown_class_says_what_to_do(nb: Notebook) -> None:
    nb("class Mine: pass\nmine = Mine()")
    output = nb("%distributed push mine")
    assert output.ename == "UsageError"
    assert "--local" in output.error


def test_names_on_the_ranks_complete_and_leave_no_local_variable(nb: Notebook) -> None:
    nb("%%distributed\nlearning_rate_of_mine = 0.1")
    code = "%%distributed\nlearning_rate_of"
    reply = nb.client.complete(code, len(code), reply=True, timeout=10)["content"]
    assert reply["matches"] == ["learning_rate_of_mine"]
    assert code[reply["cursor_start"] : reply["cursor_end"]] == "learning_rate_of"
    assert not nb.value("'learning_rate_of_mine' in globals()")


def test_completion_answers_while_a_cell_runs(nb: Notebook) -> None:
    nb("%%distributed\nimport time\nquick_to_complete = 1")
    nb("%%distributed --no-block --name slow\ntime.sleep(4)")
    code = "%%distributed\nquick_to"
    try:
        # a rank of a busy machine may answer too late for one Tab
        asked = (nb.client.complete(code, len(code), reply=True, timeout=10)["content"]["matches"] for _ in range(5))
        assert ["quick_to_complete"] in asked
        assert nb("slow.done").plain == ["False"]
    finally:
        nb("slow.wait()")


def test_auto_runs_every_cell_on_the_ranks(nb: Notebook) -> None:
    nb("%distributed auto on")
    try:
        assert nb("print(rank)").lines == [f"{r}| {r}" for r in range(4)]
        assert nb("%%local\nprint('here')").lines == ["here"]
        assert "Cell In[" in nb("1 / 0").error
        assert ", line 1" in nb("1 / 0").error
    finally:
        nb("%distributed auto off")
    assert nb("print('here')").lines == ["here"]


def test_a_cell_that_does_not_block(nb: Notebook) -> None:
    started = nb("%%distributed --no-block --name job\nimport time\ntime.sleep(2)\nrank * 2")
    assert started.seconds < 1.5
    busy = nb("%%distributed\n1")
    assert busy.ename == "BusyError"
    assert "'job'" in busy.error
    assert nb("job.result()").plain == ["[0, 2, 4, 6]"]
    assert "done in" in nb("print(job)").stdout
    assert nb("%%distributed --no-block --name job\nimport time\ntime.sleep(0.2)\n7").status == "ok"
    assert nb("print(await job)").stdout == "[7, 7, 7, 7]\n"


def test_a_handle_interrupts(nb: Notebook) -> None:
    nb("%%distributed --no-block --name job\nimport time\ntime.sleep(60)")
    nb("job.interrupt()")
    output = nb("job.wait(5)")
    assert output.ename == "CellError"
    assert "KeyboardInterrupt" in output.error


def test_a_timeout_interrupts(nb: Notebook) -> None:
    output = nb("%%distributed --timeout 0.5\nimport time\ntime.sleep(60)")
    assert output.ename == "CellTimeoutError"
    assert output.seconds < 5
    assert nb("%%distributed\n'alive'").plain == ["'alive'"]


def test_the_cell_right_after_an_interrupt_runs_on_every_rank(nb: Notebook) -> None:
    request = nb.send("%%distributed\nimport time\ncount = 0\ntime.sleep(600)")
    with pytest.raises(TimeoutError):
        nb.wait(request, timeout=1.0)
    nb.interrupt()
    following = nb.send("%%distributed -o n\ncount += 1\ncount")
    stopped = nb.wait(request, timeout=10)
    assert stopped.error.splitlines() == ["KeyboardInterrupt: interrupted on ranks 0-3; they kept their state"]
    if nb.wait(following).status == "aborted":  # Jupyter aborts what was queued behind an error: that is local
        nb("%%distributed -o n\ncount += 1\ncount")
    assert nb.value("n") == [1, 1, 1, 1]


def test_a_handles_result_is_its_own_cells(nb: Notebook) -> None:
    nb("%%distributed --no-block --name first\n'first'")
    nb("first.wait()")
    nb("%%distributed -o second\n'second'")
    assert nb.value("first.result()") == ["first"] * 4
    assert nb.value("second") == ["second"] * 4


def test_help_is_complete(nb: Notebook) -> None:
    nb.client.execute_interactive("%distributed?", output_hook=lambda _: None, timeout=20)
    found = nb.client.inspect("%distributed", 5, reply=True, timeout=20)["content"]
    text = found["data"]["text/plain"]
    assert [word for word in ("--parallelize", "auto on|off", "restart", "torchrun") if word not in text] == []


def test_arrays_travel_to_the_ranks(nb: Notebook) -> None:
    nb("import numpy as np\na = np.arange(12.0).reshape(3, 4)\nb = np.array(['x'])")
    nb("c = [a.T, {'k': a}]\nd = np.ones(10**6)")
    output = nb("%distributed push a, b, c, d")
    assert output.status == "ok", output.error
    nb("%%distributed -o sums\na.sum(), str(b[0]), c[0].shape, float(c[1]['k'][0, 1]), d.sum()")
    assert nb.value("[(float(s), t, u, v, float(w)) for s, t, u, v, w in sums]") == [(66.0, "x", (4, 3), 1.0, 1e6)] * 4
    assert "is a module; import it" in nb("%distributed push np").error


def test_values_keep_their_order_and_may_be_written_to(nb: Notebook) -> None:
    nb("%%distributed -o d\n{'z': torch.ones(3), 'a': 2, 1: None}")
    assert nb.value("list(d[0])") == ["z", "a", 1]
    nb("d[0]['z'][0] = 5")
    assert nb.value("float(d[0]['z'][0])") == 5.0


def test_values_of_any_shape_arrive_or_say_what_they_are(nb: Notebook) -> None:
    nb("%%distributed -o odd\nloop = []; loop.append(loop)\nloop")
    assert "on the rank: builtins.list" in nb.value("repr(odd[0])")
    nb("%%distributed -o big\ntorch.zeros(10**7)")
    assert nb.value("[b.nbytes for b in big]") == [40_000_000] * 4


def test_a_result_can_be_asked_for_twice(nb: Notebook) -> None:
    nb("%%distributed --no-block --name twice\nrank")
    assert nb.value("[twice.result(), twice.result()]") == [[0, 1, 2, 3]] * 2


def test_an_interrupt_that_comes_too_early_is_not_lost(nb: Notebook) -> None:
    nb("import nbtrain\nh = nbtrain.session().run('import time; time.sleep(8)', block=False)\nh.interrupt()")
    output = nb("h.wait(3)")
    assert output.ename == "CellError"
    assert "KeyboardInterrupt" in output.error


def test_the_notebooks_import_path_is_the_ranks_too() -> None:
    with Notebook() as other:
        other("import sys; sys.path.append('/some/folder/of/mine')")
        other("%distributed start -n 1")
        assert other("%%distributed\nimport sys\n'/some/folder/of/mine' in sys.path").plain == ["True"]
        other("%distributed stop")
