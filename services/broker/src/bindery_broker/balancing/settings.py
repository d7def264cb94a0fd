"""Settings of load balancing."""

from typing import Annotated

from bindery_kit.configuration.bounds import Ge, Le
from bindery_kit.configuration.settings import Settings, SettingsConfigDict

MIB = 2**20


class BalancingSettings(Settings):
    """How bundles of topics are spread over the brokers."""

    model_config = SettingsConfigDict(env_prefix="BROKER_BALANCING_")

    enabled: bool = True
    """Choose the broker of a bundle without owner by load, and move bundles from loaded brokers to others. False: the
    broker that is asked first takes a bundle, and keeps it. Source: Pulsar's loadBalancerEnabled."""

    report_interval_s: Annotated[float, Ge(0.1), Le(3600)] = 5.0
    """Minimum seconds between two load reports of a broker in the metadata, and between two measurements. Source:
    Pulsar's loadBalancerReportUpdateMinIntervalMillis."""

    report_interval_s_max: Annotated[float, Ge(1), Le(86_400)] = 60.0
    """Maximum seconds between two load reports if the load does not change by `report_change_percent`. Pulsar's is
    15 minutes (loadBalancerReportUpdateMaxIntervalMinutes)."""

    report_change_percent: Annotated[int, Ge(1), Le(1000)] = 10
    """Change of the load, in percent, after which it is reported before `report_interval_s_max`. A change of the number
    of bundles is reported always. Source: Pulsar's loadBalancerReportUpdateThresholdPercentage."""

    interval_s: Annotated[float, Ge(0.1), Le(86_400)] = 10.0
    """Seconds between two rounds in which the leader compares the brokers. Pulsar's is a minute
    (loadBalancerSheddingIntervalMinutes)."""

    threshold_percent: Annotated[int, Ge(5), Le(100)] = 15
    """Difference of a broker's load from the mean, in percent, above which bundles move. Pulsar's is 10
    (loadBalancerBrokerThresholdShedderPercentage)."""

    moves_max: Annotated[int, Ge(1), Le(1000)] = 32
    """Maximum number of bundles that move in one round."""

    moves_in_parallel: Annotated[int, Ge(1), Le(100)] = 4
    """Maximum number of bundles that move at a time."""

    rest_s: Annotated[float, Ge(0), Le(86_400)] = 120.0
    """Seconds for which a bundle that has moved is not moved again. Pulsar's is 30 minutes
    (loadBalancerSheddingGracePeriodMinutes)."""

    split_enabled: bool = True
    """Split bundles above the limits below. Source: Pulsar's loadBalancerAutoBundleSplitEnabled."""

    split_topics: Annotated[int, Ge(1)] = 1000
    """Loaded topics of a bundle above which it is split. Source: Pulsar's loadBalancerNamespaceBundleMaxTopics."""

    split_sessions: Annotated[int, Ge(1)] = 1000
    """Consumers and producers of a bundle above which it is split. Source: loadBalancerNamespaceBundleMaxSessions."""

    split_messages_rate: Annotated[float, Ge(1)] = 30_000.0
    """Messages per second, in and out, of a bundle above which it is split. Source:
    loadBalancerNamespaceBundleMaxMsgRate."""

    split_bytes_rate: Annotated[float, Ge(1)] = 100.0 * MIB
    """Bytes per second, in and out, of a bundle above which it is split. Source:
    loadBalancerNamespaceBundleMaxBandwidthMbytes."""

    split_bundles_max: Annotated[int, Ge(1), Le(1024)] = 128
    """Number of bundles of a namespace at which none of them is split any more. Source: Pulsar's
    loadBalancerNamespaceMaximumBundles."""
