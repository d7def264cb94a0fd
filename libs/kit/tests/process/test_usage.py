"""What a process uses of CPU and memory."""

from pathlib import Path

from bindery_kit.process.usage import ProcessUsage, machine_bytes, resident_bytes


class Clocks:
    now_s = 10.0
    used_s = 3.0

    def now(self) -> float:
        return self.now_s

    def used(self) -> float:
        return self.used_s


def test_the_use_of_the_cpu_is_that_since_the_last_call_in_percent_of_a_core() -> None:
    clocks = Clocks()
    usage = ProcessUsage(clocks.now, cpu_s=clocks.used)
    assert usage.cpu_percent() == 0.0
    clocks.now_s, clocks.used_s = 14.0, 4.0
    assert usage.cpu_percent() == 25.0
    clocks.now_s, clocks.used_s = 16.0, 7.0
    assert usage.cpu_percent() == 150.0


def test_calls_in_quick_succession_return_the_same() -> None:
    clocks = Clocks()
    usage = ProcessUsage(clocks.now, cpu_s=clocks.used)
    clocks.now_s, clocks.used_s = 12.0, 4.0
    assert usage.cpu_percent() == 50.0
    clocks.now_s, clocks.used_s = 12.5, 4.5
    assert usage.cpu_percent() == 50.0
    clocks.now_s = 14.0
    assert usage.cpu_percent() == 25.0


def test_the_memory_of_this_process_is_less_than_its_limit() -> None:
    usage = ProcessUsage(Clocks().now)
    assert 0 < usage.memory() < usage.memory_limit() <= machine_bytes()


def test_a_system_that_says_nothing_about_memory_counts_as_none(tmp_path: Path) -> None:
    assert resident_bytes(tmp_path / "missing") == 0
    (tmp_path / "statm").write_text("nonsense")
    assert resident_bytes(tmp_path / "statm") == 0
