"""Metrics have the names and buckets that dashboards and alerts rely on."""

from bindery_kit.observability.metrics import COUNT_BUCKETS, LATENCY_BUCKETS_S, SIZE_BUCKETS, Metrics


def lines(metrics: Metrics) -> list[str]:
    return [
        line for line in metrics.render().decode().splitlines() if not line.startswith("#") and "_created" not in line
    ]


def metrics() -> Metrics:
    return Metrics("kittest", with_process=False)


def test_names_begin_with_bindery_and_the_subsystem() -> None:
    kit = metrics()
    assert kit.subsystem == "kittest"
    kit.counter("adds_total", "adds").inc(3)
    kit.gauge("bytes", "bytes", ["kind"]).labels(kind="free").set(7)
    assert lines(kit) == ["bindery_kittest_adds_total 3.0", 'bindery_kittest_bytes{kind="free"} 7.0']
    assert b"# HELP bindery_kittest_adds_total adds\n# TYPE bindery_kittest_adds_total counter\n" in kit.render()


def test_counters_can_have_labels() -> None:
    kit = metrics()
    kit.counter("adds_total", "adds", ["status"]).labels(status="ok").inc()
    assert lines(kit) == ['bindery_kittest_adds_total{status="ok"} 1.0']


def test_a_histogram_has_the_latency_buckets_by_default() -> None:
    kit = metrics()
    kit.histogram("add_seconds", "latency").observe(0.003)
    shown = dict(line.rsplit(" ", 1) for line in lines(kit))
    buckets = [name.split('"')[1] for name in shown if "_bucket" in name]
    assert buckets == [
        "0.0001", "0.00025", "0.0005", "0.001", "0.0025", "0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5",
        "1.0", "2.5", "5.0", "10.0", "30.0", "+Inf",
    ]  # fmt: skip
    assert shown['bindery_kittest_add_seconds_bucket{le="0.0025"}'] == "0.0"
    assert shown['bindery_kittest_add_seconds_bucket{le="0.005"}'] == "1.0"
    assert shown["bindery_kittest_add_seconds_sum"] == "0.003"


def test_a_histogram_can_have_other_buckets_and_labels() -> None:
    kit = metrics()
    kit.histogram("batch_count", "items", ["kind"], buckets=(1, 2)).labels(kind="add").observe(2)
    assert lines(kit)[:3] == [
        'bindery_kittest_batch_count_bucket{kind="add",le="1.0"} 0.0',
        'bindery_kittest_batch_count_bucket{kind="add",le="2.0"} 1.0',
        'bindery_kittest_batch_count_bucket{kind="add",le="+Inf"} 1.0',
    ]


def test_buckets_are_the_ones_of_the_dashboards() -> None:
    assert LATENCY_BUCKETS_S[0] == 0.0001
    assert LATENCY_BUCKETS_S[-1] == 30.0
    assert SIZE_BUCKETS == (128, 512, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304)
    assert COUNT_BUCKETS == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


def test_the_process_is_described_unless_it_is_not_wanted() -> None:
    with_process = Metrics("kittest").render()
    for name in (b"process_cpu_seconds_total", b"python_info", b"python_gc_collections_total"):
        assert name in with_process
        assert name not in metrics().render()


def test_the_content_type_is_that_of_prometheus() -> None:
    assert metrics().content_type.startswith("text/plain; version=")
