"""Executors connect to ZooKeeper as their driver does."""

from bindery_spark.reading.zookeeper import executor_conf


def test_executors_get_the_variables_that_are_set() -> None:
    environment = {
        "BINDERY_ZOOKEEPER": "zk:2281",
        "BINDERY_ZOOKEEPER_CA_FILE": "/tls/ca.pem",
        "BINDERY_ZOOKEEPER_CREDENTIALS_FILE": "/secrets/zookeeper",
        "BINDERY_ZOOKEEPER_KEY_FILE": "",
        "PATH": "/bin",
    }
    assert executor_conf(environment) == {
        "spark.executorEnv.BINDERY_ZOOKEEPER_CA_FILE": "/tls/ca.pem",
        "spark.executorEnv.BINDERY_ZOOKEEPER_CREDENTIALS_FILE": "/secrets/zookeeper",
    }
