"""Binding: which addresses are refused, and errors with their fix."""

import socket

import pytest
from bindery_kit.http.listening import BindRefused, bind_tcp


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_only_loopback_is_bound_without_insecure(host: str) -> None:
    with pytest.raises(BindRefused, match="--insecure"):
        bind_tcp(host, 0)


def test_loopback_is_bound_and_other_addresses_only_with_insecure() -> None:
    bind_tcp("127.0.0.1", 0).close()
    bind_tcp("0.0.0.0", 0, insecure=True).close()


def test_the_error_of_a_port_in_use_names_it_and_the_fix() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BindRefused, match=f"cannot listen on 127.0.0.1:{port}: Address already in use; another"):
            bind_tcp("127.0.0.1", port)
