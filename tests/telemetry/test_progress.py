"""The bar: what it shows, how often, and that nothing is left half drawn."""

import io

import pytest

import nbtrain as nt
from nbtrain.telemetry import progress as module


class Clock:
    """A clock that each item moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setenv("COLUMNS", "100")
    return Clock(monkeypatch)


def lines(file: io.StringIO) -> list[str]:
    return [line.rstrip() for line in file.getvalue().split("\r")[1:]]


def test_it_shows_values_speed_and_time_left(clock: Clock) -> None:
    file = io.StringIO()
    bar = nt.progress(range(4), label="epoch 1", samples=32, file=file)
    for step in bar:
        clock.now += 2
        bar.update(loss=1.0 / (step + 1))
    assert lines(file) == [
        "epoch 1 ░░░░░░░░░░░░░░░░░░░░ 0/4  0:00",
        "epoch 1 █████░░░░░░░░░░░░░░░ 1/4  loss 1  16 samples/s  0:06 left",
        "epoch 1 ██████████░░░░░░░░░░ 2/4  loss 0.5  16 samples/s  0:04 left",
        "epoch 1 ███████████████░░░░░ 3/4  loss 0.3333  16 samples/s  0:02 left",
        "epoch 1 ████████████████████ 4/4  loss 0.25  16 samples/s  0:08",
        "epoch 1 ████████████████████ 4/4  loss 0.25  16 samples/s  0:08",
    ]
    assert file.getvalue().endswith("\n")


def test_it_draws_ten_times_a_second_at_most_and_reads_values_only_then(clock: Clock) -> None:
    class Loss:
        reads = 0

        def item(self) -> float:
            Loss.reads += 1
            return 0.5

    file = io.StringIO()
    bar = nt.progress(range(1000), file=file)
    for _ in bar:
        clock.now += 0.01
        bar.update(loss=Loss())
    assert len(lines(file)) <= 103
    assert Loss.reads == len(lines(file)) - 1


def test_a_loop_that_is_left_or_raises_ends_its_line(clock: Clock) -> None:
    file = io.StringIO()
    for _ in nt.progress(range(3), file=file):
        break
    assert file.getvalue().endswith("\n")
    with pytest.raises(ZeroDivisionError):
        _ = [1 / step for step in nt.progress(range(3), file=file)]
    assert file.getvalue().endswith("\n")


def test_a_shorter_line_covers_a_longer_one(clock: Clock) -> None:
    file = io.StringIO()
    bar = nt.progress(range(2), file=file)
    for step in bar:
        clock.now += 1
        bar.update(note="x" * 20 if step == 0 else "x")
    drawn = file.getvalue().split("\r")
    assert len(drawn[3]) >= len(drawn[2].rstrip())


def test_without_a_length_it_counts() -> None:
    file = io.StringIO()
    bar = nt.progress(iter(range(3)), file=file)
    assert list(bar) == [0, 1, 2]
    assert "3  " in lines(file)[-1]
    assert "left" not in file.getvalue()
    with pytest.raises(TypeError, match="give total="):
        len(bar)
    assert len(nt.progress(iter(range(3)), total=3)) == 3


def test_a_loader_gives_its_batch_size() -> None:
    class Loader(list[int]):
        batch_size = 64

    file = io.StringIO()
    list(nt.progress(Loader([1, 2]), file=file))
    assert "samples/s" in lines(file)[-1]


def test_a_narrow_terminal_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    file = io.StringIO()
    list(nt.progress(range(2), label="a long label", file=file))
    assert all(len(line.strip("\n")) <= 30 for line in lines(file))
    assert "█" not in file.getvalue()
