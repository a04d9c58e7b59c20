"""What a cell shows: once where ranks agree, labelled where they do not, live, and at linear cost."""

from __future__ import annotations

import json
from pathlib import Path

from notebook import Notebook, Output


def published_bytes(output: Output) -> int:
    return sum(len(json.dumps(message["content"])) for message in output.messages if message["msg_type"] == "stream")


def test_alike_lines_once_and_different_ones_by_rank(nb: Notebook) -> None:
    output = nb("%%distributed\nprint('hello')\nprint('rank', rank)\nprint('odd one' if rank == 2 else 'others')")
    assert output.lines == [
        "hello",
        *(f"{r}| rank {r}" for r in range(4)),
        "0-1,3| others",
        "2| odd one",
    ]


def test_one_ranks_output_has_no_label(nb: Notebook) -> None:
    assert nb("%%distributed -r 1\nprint('alone')").lines == ["alone"]


def test_standard_error_stays_apart(nb: Notebook) -> None:
    output = nb("%%distributed\nimport sys\nprint('oops', file=sys.stderr)\nprint('fine')")
    assert (output.stdout, output.stderr) == ("fine\n", "oops\n")


def test_output_is_live(nb: Notebook) -> None:
    request = nb.send("%%distributed\nimport time\nprint('first')\ntime.sleep(1.5)")
    nb.listen(1.0)
    assert nb.by_request[request].stdout == "first\n"
    nb.wait(request)


def test_values_that_differ_by_address_only_are_alike(nb: Notebook) -> None:
    assert len(nb("%%distributed\nobject()").displays) == 1


def test_a_figure_shows_once(nb: Notebook) -> None:
    code = "%%distributed\n%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);"
    assert ["image/png" in data for data in nb(code).displays] == [True]


def test_figures_that_differ_are_shown_by_rank(nb: Notebook) -> None:
    output = nb("%%distributed -r 0,1\nimport matplotlib.pyplot as plt\nplt.plot([1, 2 + rank])\nplt.show()")
    assert sum("image/png" in data for data in output.displays) == 2
    assert "rank 0:" in output.stdout
    assert "rank 1:" in output.stdout


def test_html_and_updates_of_a_display(nb: Notebook) -> None:
    code = (
        "%%distributed -r 0\nfrom IPython.display import HTML, display\n"
        "h = display(HTML('<b>one</b>'), display_id=True)\nh.update(HTML('<b>two</b>'))"
    )
    kinds = [(m["msg_type"], m["content"]["data"]["text/html"]) for m in nb(code).messages if "data" in m["content"]]
    assert kinds == [("display_data", "<b>one</b>"), ("update_display_data", "<b>two</b>")]


def test_updates_come_behind_what_they_update_and_reach_every_rank(nb: Notebook) -> None:
    nb(
        "%%distributed\nh = display(f'start {rank % 2}', display_id=True)\n"
        "for i in range(3): h.update(f'state {i} {rank % 2}')"
    )
    output = nb.by_request[nb.last_id]
    page: dict[str, str] = {}
    for message in output.messages:
        if message["msg_type"] in ("display_data", "update_display_data"):
            content = message["content"]
            known = content["transient"]["display_id"] in page
            assert known == (message["msg_type"] == "update_display_data")
            page[content["transient"]["display_id"]] = content["data"]["text/plain"]
    assert sorted(page.values()) == ["'state 2 0'", "'state 2 1'"]


def test_clear_output_clears_once(nb: Notebook) -> None:
    output = nb("%%distributed\nfrom IPython.display import clear_output\nprint('old')\nclear_output()\nprint('new')")
    assert sum(message["msg_type"] == "clear_output" for message in output.messages) == 1
    kinds = [m["msg_type"] for m in output.messages if m["msg_type"] in ("stream", "clear_output")]
    assert kinds == ["stream", "clear_output", "stream"]
    assert output.lines == ["old", "new"]


def test_a_bar_shows_once_from_the_slowest_rank(nb: Notebook) -> None:
    code = "from tqdm.auto import tqdm\nimport time\nfor i in tqdm(range(20)): time.sleep(0.01 * (1 + rank))"
    output = nb(f"%%distributed\n{code}")
    assert output.displays == []
    assert sum("20/20" in line for line in output.shown) == 1
    assert output.stdout.endswith("\n")


def test_lines_printed_beside_a_bar_stand_by_themselves(nb: Notebook) -> None:
    code = "for i in nt.progress(range(4)):\n    time.sleep(0.25)\n    print('step', i)"
    output = nb(f"%%distributed\nimport time\n{code}")
    assert [line for line in output.shown if line.startswith("step")] == [f"step {i}" for i in range(4)]
    assert sum("4/4" in line for line in output.shown) == 1


def test_help_is_shown(nb: Notebook) -> None:
    assert "One optimizer step" in nb("%%distributed\nnt.Trainer.step?").stdout


def test_warnings_are_alike_though_processes_differ(nb: Notebook) -> None:
    output = nb("%%distributed\nimport warnings\nwarnings.warn('only once')")
    assert output.stderr.count("UserWarning: only once") == 1


def test_nothing_is_lost_and_the_cost_is_linear(nb: Notebook) -> None:
    output = nb("%%distributed\nfor i in range(1000): print(f'rank {rank} line {i}')", timeout=60)
    by_rank = {r: [line for line in output.lines if line.startswith(f"{r}|")] for r in range(4)}
    assert by_rank == {r: [f"{r}| rank {r} line {i}" for i in range(1000)] for r in range(4)}
    printed = sum(len(f"rank {r} line {i}\n") for r in range(4) for i in range(1000))
    assert published_bytes(output) <= 1.3 * printed


def test_alike_output_is_published_once(nb: Notebook) -> None:
    output = nb("%%distributed\nfor i in range(1000): print(f'line number {i}')", timeout=60)
    printed = sum(len(f"line number {i}\n") for i in range(1000))
    assert published_bytes(output) <= 1.1 * printed


def test_a_flood_is_capped_and_spilled(nb: Notebook) -> None:
    output = nb("%%distributed\nfor i in range(2000): print(f'rank {rank} line {i}')", timeout=60)
    assert len(output.lines) == 5000
    path = Path(output.stderr.split(" more lines are in ")[1].split(" (until")[0])
    spilled = path.read_text().splitlines()
    assert len(spilled) == 3000
    assert sorted(output.lines + spilled) == sorted(f"{r}| rank {r} line {i}" for r in range(4) for i in range(2000))
    assert spilled[-1] in output.stderr


def test_few_but_endless_lines_are_a_flood_too(nb: Notebook) -> None:
    output = nb("%%distributed -r 0\nprint('y' * 6_000_000)\nprint('after')", timeout=60)
    assert published_bytes(output) < 100_000
    assert "more lines are in" in output.stderr


def test_a_thread_prints_into_the_cell_that_started_it(nb: Notebook) -> None:
    nb(
        "%%distributed\nimport threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(1), print('late line of cell one'))).start()"
    )
    first = nb.last_id
    second = nb("%%distributed\nimport time; time.sleep(2)")
    assert second.stdout == ""
    assert nb.by_request[first].stdout == "late line of cell one\n"


def test_printing_in_a_worker_process_arrives(nb: Notebook) -> None:
    output = nb("""%%distributed
class Noisy(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i):
        if i == 3: print("worker reads", i, flush=True)
        return torch.tensor([float(i)])
for batch in torch.utils.data.DataLoader(Noisy(), batch_size=4, num_workers=2): pass
print("done")""")
    assert output.status == "ok", output.error
    assert "worker reads 3" in output.stdout
    assert nb("%%distributed\n1").plain == ["1"]


def test_capture_captures(nb: Notebook) -> None:
    nb("%%capture caught\nget_ipython().run_cell_magic('distributed', '', 'print(\"inside\")')")
    assert nb.value("caught.stdout") == "inside\n"
